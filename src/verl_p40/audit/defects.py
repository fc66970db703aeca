"""Known upstream bugs on the P40 path, found by the code of one function or class."""

from __future__ import annotations

import ast

from verl_p40.audit.model import Finding
from verl_p40.audit.pyscan import parse
from verl_p40.audit.reviewed import Defect


def find(defect: Defect, path: str, data: bytes) -> Finding | None:
    """The defect as a finding at its definition's first line, or None where it is not."""
    try:
        tree = parse(path, data)
    except (SyntaxError, ValueError, RecursionError):
        return None  # the scan reports the file as unreadable
    node = _definition(tree, defect.qualname.split("."))
    if node is None:
        return None
    text = " ".join(ast.unparse(node).split())
    if not all(part in text for part in defect.contains) or any(p in text for p in defect.lacks):
        return None
    return Finding(
        path=path,
        line=node.lineno,
        column=node.col_offset + 1,
        rule="upstream-defect",
        qualname=defect.qualname,
        code=defect.id,
        source=data.decode("utf-8", "replace").splitlines()[node.lineno - 1].strip(),
        reason=" ".join(defect.reason.split()),
    )


def _definition(
    tree: ast.Module, names: list[str]
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    body: list[ast.stmt] = tree.body
    found = None
    for name in names:
        found = next(
            (
                node
                for node in body
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                and node.name == name
            ),
            None,
        )
        if found is None:
            return None
        body = found.body
    return found
