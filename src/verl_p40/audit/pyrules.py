"""Which rule, if any, one node of a Python syntax tree breaks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from verl_p40.audit import words

Parents = dict[ast.AST, ast.AST]
Origins = dict[str, str]
"""Names that a file imports with ``from``, and the module each comes from."""

_GETTERS = frozenset(
    {"get", "pop", "setdefault", "getattr", "getenv", "field", "add_argument", "Field"}
)
JUDGED = (
    ast.Constant, ast.Attribute, ast.Name, ast.Call, ast.Import, ast.ImportFrom,
    ast.FunctionDef, ast.AsyncFunctionDef,
)  # fmt: skip
"""The node types that :func:`sites_of` looks at."""
_ATTENTION_KEYS = frozenset({"attn_implementation", "_attn_implementation"})


class Site(NamedTuple):
    node: ast.AST
    rule: str


def sites_of(node: ast.AST, parents: Parents, origins: Origins) -> Iterator[Site]:
    """The sites that ``node`` itself makes (its children are asked separately)."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield from _string(node, node.value, parents)
        elif node.value is True:
            yield from _switch(node, parents)
    elif isinstance(node, ast.Attribute):
        yield from _attribute(node, parents)
    elif isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load):
            yield from _name(node, node.id, parents)
    elif isinstance(node, ast.Call):
        yield from _call(node, origins)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from _import(node)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and words.CAPABILITY.search(
        node.name
    ):
        yield Site(node, "capability")


def _string(node: ast.Constant, value: str, parents: Parents) -> Iterator[Site]:
    parent = parents.get(node)
    if isinstance(parent, ast.Expr):  # a docstring
        return
    if words.half_word(value):
        yield Site(node, _half_rule(node, parents, "half-literal"))
    elif words.fp8_word(value):
        yield Site(node, "fp8")
    elif value in words.FLASH_VALUES:
        yield Site(node, _flash_rule(node, parents))
    elif words.FLASH_MODULE.search(value) and _is_module_lookup(node, parents):
        yield Site(node, "flash-attn-import")
    elif value in _ATTENTION_KEYS and value.startswith("_"):
        yield Site(node, "attn-internal")
    elif value == "auto":
        key = _key_of(node, parents)
        if key in words.DTYPE_KEYS:
            yield Site(node, "auto-dtype")
    elif value in words.BACKEND_VALUES and _key_of(node, parents) in words.BACKEND_KEYS:
        yield Site(node, words.BACKEND_VALUES[value])


def _switch(node: ast.Constant, parents: Parents) -> Iterator[Site]:
    rule = words.SWITCHES_ON.get(_key_of(node, parents) or "")
    if rule:
        yield Site(node, rule)


def _attribute(node: ast.Attribute, parents: Parents) -> Iterator[Site]:
    attr, parent = node.attr, parents.get(node)
    called = isinstance(parent, ast.Call) and parent.func is node
    if called and attr in {"half", "bfloat16"} and isinstance(parent, ast.Call):
        if not parent.args and not parent.keywords:
            yield Site(node, "half-cast")
        return
    base = _dotted(node.value)
    if attr in words.HALF_ATTRS and (attr != "half" or base == "torch"):
        yield Site(node, _half_rule(node, parents, "half-dtype"))
    elif attr.startswith("float8_"):
        yield Site(node, "fp8")
    elif attr == "_attn_implementation":
        yield Site(node, "attn-internal")
    elif base == "torch" and attr in {"compile", "_dynamo", "_inductor"}:
        yield Site(node, "torch-compile")
    elif base == "triton" and attr in words.TRITON_DECORATORS:
        yield Site(node, "triton-kernel")
    elif attr == "torch_dtype" and isinstance(node.ctx, ast.Load):
        yield Site(node, "implicit-dtype")
    elif isinstance(node.ctx, ast.Load):
        yield from _name(node, attr, parents)


def _name(node: ast.expr, name: str, parents: Parents) -> Iterator[Site]:
    if words.FLASH_IDENT.search(name):
        yield Site(node, "flash-attn-use")
    elif words.CAPABILITY.search(name) and not _met_by_sm61(node, parents):
        yield Site(node, "capability")


def _call(node: ast.Call, origins: Origins) -> Iterator[Site]:
    name = _dotted(node.func)
    last = name.rpartition(".")[2]
    # A package's own helper of that name is judged where it calls torch's.
    torchs = origins.get(name.partition(".")[0], "torch").partition(".")[0] == "torch"
    if (last == "autocast" and torchs and not _names_dtype(node)) or (
        last == "GradScaler" and torchs
    ):
        yield Site(node, "autocast")
    elif _builds_model(node) and not any(k.arg in {"torch_dtype", None} for k in node.keywords):
        yield Site(node, "implicit-dtype")


def _builds_model(node: ast.Call) -> bool:
    """``X.from_config`` where X is a transformers model class (``Auto*``, ``*auto_model*``)."""
    owner, _, method = _dotted(node.func).rpartition(".")
    if method not in {"from_config", "_from_config"} or "AutoConfig" in owner:
        return False
    owner = owner.rpartition(".")[2].lower()
    return "auto" in owner or owner.endswith(("model", "model_class"))


def _import(node: ast.Import | ast.ImportFrom) -> Iterator[Site]:
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    else:
        base = node.module or ""
        modules = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        if base == "torch":
            names = {alias.name for alias in node.names}
            if names & words.HALF_ATTRS:
                yield Site(node, "half-dtype")
            if "compile" in names:
                yield Site(node, "torch-compile")
    rules: set[str] = set()
    for module in modules:
        top = module.partition(".")[0]
        if top in words.NO_SM61_LIBRARIES:
            rules.add(words.NO_SM61_LIBRARIES[top])
        elif words.FLASH_MODULE.search(module) or words.FLASH_IDENT.search(
            module.rpartition(".")[2]
        ):
            rules.add("flash-attn-import")
        elif words.TRITON_MODULE.search(module):
            rules.add("triton-import")
        elif module.startswith(("torch._dynamo", "torch._inductor")):
            rules.add("torch-compile")
    for rule in sorted(rules):
        yield Site(node, rule)


def _half_rule(node: ast.expr, parents: Parents, plain: str) -> str:
    """The most telling rule for a half dtype, from where it stands."""
    child: ast.AST = node
    while child in parents:
        parent = parents[child]
        if isinstance(parent, ast.Compare):
            return "half-test"
        if isinstance(parent, ast.arguments):
            return "half-default"
        if isinstance(parent, ast.AnnAssign):
            return "half-default" if child is parent.value else plain
        if isinstance(parent, ast.Call):
            return _half_in_call(child, parent, plain)
        if isinstance(parent, ast.keyword):
            call = parents[parent]
            if isinstance(call, ast.Call):
                last = _dotted(call.func).rpartition(".")[2]
                if last == "autocast":
                    return "autocast"
                if parent.arg == "default" and last in _GETTERS:
                    return "half-default"
                if last in {"to", "type"}:
                    return "half-cast"
            return plain
        if isinstance(parent, ast.stmt):
            return plain
        child = parent
    return plain


def _half_in_call(child: ast.AST, call: ast.Call, plain: str) -> str:
    last = _dotted(call.func).rpartition(".")[2] or getattr(call.func, "attr", "")
    position = next((i for i, arg in enumerate(call.args) if arg is child), -1)
    if last == "autocast":
        return "autocast"
    if last in {"to", "type", "astype"} and position >= 0:
        return "half-cast"
    if (last in {"get", "pop", "setdefault", "getenv"} and position == 1) or (
        last == "getattr" and position == 2
    ):
        return "half-default"
    return plain


def _flash_rule(node: ast.expr, parents: Parents) -> str:
    return "flash-attn-import" if _is_module_lookup(node, parents) else "flash-attn-implementation"


def _is_module_lookup(node: ast.AST, parents: Parents) -> bool:
    parent = parents.get(node)
    if not isinstance(parent, ast.Call):
        return False
    last = _dotted(parent.func).rpartition(".")[2]
    return last in {"import_module", "__import__", "find_spec", "version", "is_package_available"}


def _key_of(node: ast.AST, parents: Parents) -> str | None:
    """The name that ``node`` is the value of: argument, default, dict key, target, ``get`` key."""
    parent = parents.get(node)
    if isinstance(parent, ast.keyword):
        if parent.arg == "default":
            return _first_string(parents[parent])
        return parent.arg
    if isinstance(parent, ast.Dict):
        for key, value in zip(parent.keys, parent.values, strict=True):
            if value is node and isinstance(key, ast.Constant) and isinstance(key.value, str):
                return key.value
    elif isinstance(parent, ast.Call):
        if _dotted(parent.func).rpartition(".")[2] in _GETTERS or (
            isinstance(parent.func, ast.Attribute) and parent.func.attr in _GETTERS
        ):
            return _first_string(parent)
    elif isinstance(parent, ast.AnnAssign):
        return _target(parent.target)
    elif isinstance(parent, ast.Assign):
        return _target(parent.targets[0])
    elif isinstance(parent, ast.arguments):
        return argument_of(parent, node)
    return None


def argument_of(arguments: ast.arguments, default: ast.AST) -> str | None:
    """The name of the argument whose default ``default`` is."""
    positional = [*arguments.posonlyargs, *arguments.args]
    offset = len(positional) - len(arguments.defaults)
    for index, value in enumerate(arguments.defaults):
        if value is default:
            return positional[offset + index].arg
    for arg, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if keyword_default is default:
            return arg.arg
    return None


def _target(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return node.id if isinstance(node, ast.Name) else None


def _first_string(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    for arg in node.args:
        if isinstance(arg, ast.Constant) and isinstance(arg.value, str):
            return (
                arg.value.lstrip("-").replace("-", "_") if arg.value.startswith("-") else arg.value
            )
    return None


def _names_dtype(node: ast.Call) -> bool:
    """Whether an autocast call names its dtype (then the dtype itself is judged) or is off."""
    for keyword in node.keywords:
        if keyword.arg in {"dtype", None}:
            return True
        if keyword.arg == "enabled" and isinstance(keyword.value, ast.Constant):
            return keyword.value.value is False
    return len(node.args) >= 2


def _met_by_sm61(node: ast.expr, parents: Parents) -> bool:
    """``has_device_capability(60)``: a test that a P40 passes asks for nothing it lacks."""
    parent = parents.get(node)
    if not isinstance(parent, ast.Call) or parent.func is not node or not parent.args:
        return False
    wanted = parent.args[0]
    return isinstance(wanted, ast.Constant) and isinstance(wanted.value, int) and wanted.value <= 61


def _dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of names; a chain that starts at a call or index keeps its tail."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        parts.append(node.id)
    return ".".join(reversed(parts))
