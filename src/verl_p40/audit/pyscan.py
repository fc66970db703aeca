"""Python sites by syntax tree. Nothing is imported or run."""

from __future__ import annotations

import ast
import warnings
from functools import lru_cache

from verl_p40.audit import words
from verl_p40.audit.model import Finding
from verl_p40.audit.pyrules import JUDGED, Site, argument_of, sites_of

_MAX_CODE = 120


@lru_cache(maxsize=1024)
def parse(path: str, data: bytes) -> ast.Module:
    """Parse ``data``; raises ``SyntaxError`` or ``ValueError`` (null bytes) for no Python."""
    with warnings.catch_warnings():  # invalid escapes in somebody else's source are not news
        warnings.simplefilter("ignore")
        return ast.parse(data, filename=path)


def scan(path: str, data: bytes) -> list[Finding]:
    """Every site of one Python file, in source order. ``path`` is kept as given."""
    if not words.relevant(data):
        return []
    try:
        tree = parse(path, data)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None) or 1
        return [Finding(path, line, 1, "unreadable", "<module>", "", f"not Python: {error}")]
    lines = data.decode("utf-8", "replace").splitlines()
    parents, judged, origins = _index(tree)
    found: dict[tuple[int, str, str], Finding] = {}
    for node in judged:
        for site in sites_of(node, parents, origins):
            finding = _finding(path, lines, parents, site)
            # One line can name the same dtype twice; one report of it is enough.
            found.setdefault((finding.line, finding.rule, finding.code), finding)
    return sorted(found.values(), key=lambda f: (f.line, f.column, f.rule))


def _index(tree: ast.AST) -> tuple[dict[ast.AST, ast.AST], list[ast.AST], dict[str, str]]:
    """Parents, the nodes that rules look at, and where ``from`` imports come from: one pass."""
    parents: dict[ast.AST, ast.AST] = {}
    judged: list[ast.AST] = []
    origins: dict[str, str] = {}
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, JUDGED):
            judged.append(node)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    origins[alias.asname or alias.name] = node.module or "."
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.AST):
                        parents[item] = node
                        stack.append(item)
            elif isinstance(value, ast.AST) and name != "ctx":
                parents[value] = node
                stack.append(value)
    return parents, judged, origins


def _finding(path: str, lines: list[str], parents: dict[ast.AST, ast.AST], site: Site) -> Finding:
    node = site.node
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
    guard, guard_line = _guard(node, parents, lines)
    return Finding(
        path=path,
        line=line,
        column=column,
        rule=site.rule,
        qualname=qualname(node, parents),
        code=_code(node, parents),
        source=lines[line - 1].strip() if line <= len(lines) else "",
        guard=guard,
        guard_line=guard_line,
    )


def qualname(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """Dotted name of the functions and classes around ``node``; ``<module>`` outside of any."""
    names: list[str] = []
    current: ast.AST | None = node
    if isinstance(node, ast.expr):
        owner = _decorated(node, parents)
        current = owner if owner is not None else node
    while current is not None:
        if isinstance(current, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(current.name)
        current = parents.get(current)
    return ".".join(reversed(names)) or "<module>"


def _decorated(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST | None:
    current = node
    while current in parents and isinstance(current, ast.expr):
        current = parents[current]
    return (
        current
        if isinstance(current, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        else None
    )


def _guard(node: ast.AST, parents: dict[ast.AST, ast.AST], lines: list[str]) -> tuple[str, int]:
    """The innermost ``if``/``try`` of the same function that decides whether ``node`` runs."""
    current = node
    while current in parents:
        parent = parents[current]
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            break
        if isinstance(parent, ast.If) and current is not parent.test:
            return lines[parent.lineno - 1].strip(), parent.lineno
        if isinstance(parent, ast.Try):
            return "try:", parent.lineno
        current = parent
    return "", 0


def _code(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """The widest expression (or simple statement) around ``node`` that stays short.

    It says enough to tell two sites of one function apart and does not change when a
    neighbouring argument of a long call does.
    """
    parent = parents.get(node)
    if isinstance(parent, ast.arguments):
        return f"{argument_of(parent, node)}={_unparse(node)}"
    best = _unparse(node)
    current = node
    while current in parents:
        current = parents[current]
        if isinstance(current, ast.stmt) and hasattr(current, "body"):
            break
        if not isinstance(current, ast.expr | ast.stmt | ast.keyword):
            continue
        text = _unparse(current)
        if len(text) > _MAX_CODE:
            break
        best = text
        if isinstance(current, ast.stmt):
            break
    return best


def _unparse(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return f"def {node.name}" if not isinstance(node, ast.ClassDef) else f"class {node.name}"
    if isinstance(node, ast.keyword):
        return f"{node.arg or '**'}={ast.unparse(node.value)}"
    return " ".join(ast.unparse(node).split())
