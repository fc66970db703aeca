"""Which modules of a package a set of entry points can import, read from the source.

Imports inside functions count as well, so the answer errs on the side of "reachable"; a *gate*
(an import that only one reviewed setting opens) is left out by name.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from verl_p40.audit.pyscan import parse
from verl_p40.audit.trees import Tree


@dataclass(frozen=True)
class Edge:
    """``path`` imports ``module`` at ``line``."""

    path: str
    line: int
    module: str


def reachable(tree: Tree, roots: list[str], gates: set[tuple[str, str]]) -> dict[str, Edge | None]:
    """Files that importing ``roots`` can load, each with the import that leads to it.

    Args:
        tree: the package.
        roots: dotted module names of the entry points.
        gates: ``(path, module)`` pairs that are not followed.
    """
    seen: dict[str, Edge | None] = {}
    queue: deque[str] = deque()

    def add(module: str, edge: Edge | None) -> bool:
        path = _file_of(tree, module)
        if path is None:
            return False
        parts = module.split(".")
        for depth in range(1, len(parts)):  # importing a.b.c runs a and a.b first
            parent = _file_of(tree, ".".join(parts[:depth]))
            if parent and parent not in seen:
                seen[parent] = edge
                queue.append(parent)
        if path not in seen:
            seen[path] = edge
            queue.append(path)
        return True

    for root in roots:
        add(root, None)
    while queue:
        path = queue.popleft()
        for edge, names in _imports(tree, path):
            if (path, edge.module) in gates:
                continue
            if add(edge.module, edge):
                for name in names:
                    if (path, f"{edge.module}.{name}") not in gates:
                        add(f"{edge.module}.{name}", edge)
    return seen


def _file_of(tree: Tree, module: str) -> str | None:
    base = module.replace(".", "/")
    for path in (f"{base}.py", f"{base}/__init__.py"):
        if path in tree.files:
            return path
    return None


def _imports(tree: Tree, path: str) -> list[tuple[Edge, list[str]]]:
    try:
        module = parse(path, tree.read(path))
    except (SyntaxError, ValueError, RecursionError):
        return []
    package = (
        path.removesuffix("/__init__.py")
        if path.endswith("/__init__.py")
        else path.rpartition("/")[0]
    )
    found: list[tuple[Edge, list[str]]] = []
    for node in _statements(module):
        if isinstance(node, ast.Import):
            found.extend((Edge(path, node.lineno, alias.name), []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split("/")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            found.append((Edge(path, node.lineno, base), [alias.name for alias in node.names]))
    return [item for item in found if item[0].module.split(".")[0] == tree.package]


def _statements(module: ast.Module) -> Iterator[ast.stmt]:
    """Every statement at any depth; expressions hold no imports and are most of a tree."""
    stack: list[ast.stmt] = list(module.body)
    while stack:
        node = stack.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            for item in getattr(node, name, ()):
                if isinstance(item, ast.stmt):
                    stack.append(item)
                else:  # an except clause or a match case
                    stack.extend(item.body)
