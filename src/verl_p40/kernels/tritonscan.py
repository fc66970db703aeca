"""Every Triton kernel of a source tree, found in the syntax trees of its files. Light, read only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class JitFunction:
    """A function decorated with ``triton.jit``.

    Attributes:
        module: the dotted name of its module, from the root of the tree.
        line: of its ``def``.
        callees: names that its body calls: other jit functions are inlined into it.
    """

    module: str
    name: str
    path: str
    line: int
    callees: frozenset[str]

    @property
    def key(self) -> str:
        return f"{self.module}:{self.name}"


def scan(root: Path, package: str) -> list[JitFunction]:
    """The Triton functions of ``root/package``, in order of module and line."""
    return sorted(
        function
        for path in sorted((root / package).rglob("*.py"))
        for function in scan_file(path, root)
    )


def scan_file(path: Path, root: Path) -> Iterator[JitFunction]:
    """The Triton functions of one file; none where it does not parse."""
    text = path.read_bytes()
    if b"jit" not in text:
        return
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    names = _jit_names(tree)
    relative = path.relative_to(root)
    module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(
            _is_jit(decorator, names) for decorator in node.decorator_list
        ):
            callees = {
                call.func.id
                for call in ast.walk(node)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
            }
            yield JitFunction(module, node.name, str(relative), node.lineno, frozenset(callees))


def _jit_names(tree: ast.Module) -> frozenset[str]:
    """What ``triton`` and ``triton.jit`` are called in this file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(a.asname or a.name) + ".jit" for a in node.names if a.name == "triton"}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "triton":  # from vllm.triton_utils import triton
                    found.add((alias.asname or alias.name) + ".jit")
                elif alias.name == "jit" and (node.module or "").startswith("triton"):
                    found.add(alias.asname or alias.name)
    return frozenset(found)


def _is_jit(decorator: ast.expr, names: frozenset[str]) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in names
