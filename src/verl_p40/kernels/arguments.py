"""The arguments of a launch, from the words of the catalog to tensors. Runs in the stack.

``float32[tokens, heads, D]`` is an uninitialised tensor (small index tensors hold zeros),
``int32[n] = 5`` one filled with a value, ``int32[n] = 16*arange`` one that counts; sizes are sums
and products of numbers and of the variant's variables. ``torch.float16`` and ``tl.float32`` are
those dtypes, ``=D`` the value of a variable or an expression. Lists and mappings are built of
such words; anything else stands for itself.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

_TENSOR = re.compile(r"(?P<dtype>[a-z]+\d+\w*|bool)\[(?P<shape>[^\]]*)\](?:\s*=\s*(?P<value>.+))?")
_STEPS = re.compile(r"(?:(\d+)\s*\*\s*)?arange")
_DTYPE = re.compile(r"(torch|tl)\.(\w+)")
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def number(text: str, variables: Mapping[str, Any]) -> Any:
    """The value of an expression of numbers, variables, ``+ - * // **``.

    Raises:
        ValueError: anything else is in it.
    """

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in variables:
            return variables[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{text!r}: {ast.unparse(node)} is neither a number nor a variable")

    return value(ast.parse(text.strip(), mode="eval").body)


def build(words: Any, variables: Mapping[str, Any], module: Any = None) -> Any:
    """The value that ``words`` stand for; ``variables`` are the variant's."""
    if isinstance(words, Mapping):
        if "new" in words:  # an object of a class of the module: {new: Class, attribute: ...}
            made = getattr(module, words["new"], SimpleNamespace)()
            for name, value in words.items():
                if name != "new":
                    setattr(made, name, build(value, variables, module))
            return made
        return {name: build(value, variables, module) for name, value in words.items()}
    if isinstance(words, list):
        return [build(item, variables, module) for item in words]
    if not isinstance(words, str):
        return words
    if words.startswith("="):
        return number(words[1:], variables)
    if match := _DTYPE.fullmatch(words):
        return _dtype(match[1], match[2])
    for name, value in variables.items():  # dtype[...] where a variable names the dtype
        if isinstance(value, str) and words.startswith(f"{name}["):
            words = value.removeprefix("torch.") + words[len(name) :]
    if match := _TENSOR.fullmatch(words):
        return _tensor(match, variables)
    return words


def _dtype(where: str, name: str) -> Any:
    import torch
    import triton.language as tl

    return getattr(torch if where == "torch" else tl, name)


def _tensor(match: re.Match[str], variables: Mapping[str, Any]) -> Any:
    import torch

    dtype = getattr(torch, match["dtype"])
    shape = [int(number(part, variables)) for part in match["shape"].split(",") if part.strip()]
    value = match["value"]
    if value and (steps := _STEPS.fullmatch(value)):
        count = 1
        for size in shape:
            count *= size
        made = (torch.arange(count) * int(steps[1] or 1)).to(dtype).reshape(shape)
    elif value is not None:
        made = torch.full(shape, number(value, variables), dtype=dtype)
    elif dtype.is_floating_point:
        made = torch.empty(shape, dtype=dtype)
    else:
        made = torch.zeros(shape, dtype=dtype)
    return made


def from_signature(signature: str) -> list[Any]:
    """Positional arguments from the notation of Triton's own ahead-of-time compiler.

    ``*fp32:16`` is a pointer divisible by 16 bytes, ``*fp32`` any pointer, ``i32:16`` an integer
    divisible by 16, ``i32:1`` one that is 1, ``fp32`` a number; anything else is a constant.
    """
    return [_argument(word.strip()) for word in signature.split(",")]


_TYPES = {
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    "u8": "uint8",
    "i1": "bool",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
}


def _argument(word: str) -> Any:
    import torch

    name, _, hint = word.partition(":")
    if name.startswith("*"):
        if name[1:] not in _TYPES:
            raise ValueError(f"{word!r}: unknown type; one of {', '.join(sorted(_TYPES))}")
        made = torch.zeros(64, dtype=getattr(torch, _TYPES[name[1:]]))
        return made if hint == "16" else made[1:]
    if name in {"i8", "i16", "i32", "u32"}:
        return {"": 7, "1": 1, "16": 64}[hint]
    if name in {"i64", "u64"}:
        return {"": 2**40 + 7, "1": 1, "16": 2**40}[hint]
    if name in {"fp16", "bf16", "fp32", "fp64"}:
        return 1.5
    if name == "i1":
        return True
    return ast.literal_eval(word)
