"""Whether the facts that a reviewed entry stands on hold in the tree at hand."""

from __future__ import annotations

import re
from typing import Any

import yaml

from verl_p40.audit import yamlio
from verl_p40.audit.imports import Edge, reachable
from verl_p40.audit.reviewed import Entry, Reach, Reviewed, glob_regex
from verl_p40.audit.trees import Tree

_REFERENCE = re.compile(r"\$\{([A-Za-z0-9_.]+)\}")


class Facts:
    """What the claims are checked against; each part is read when first asked for."""

    def __init__(self, tree: Tree, reviewed: Reviewed) -> None:
        self._tree = tree
        self._reviewed = reviewed
        self._imports: dict[str, Edge | None] | None = None
        self._config: dict[str, Any] | None = None
        self._texts: dict[str, str] | None = None
        self._named: dict[str, list[str]] = {}

    def broken(self, entry: Entry, path: str) -> str:
        """Why ``entry`` does not hold for a site in ``path``; empty when it does."""
        for reach in entry.reached_by:
            if reach.setting and (problem := self._open(reach)):
                return problem
        if entry.never_imported and path in self._imported():
            edge = self._imported()[path]
            by = (
                f"{edge.path}:{edge.line} imports {edge.module}" if edge else "it is an entry point"
            )
            return f"{path} can be imported on the P40 path: {by}"
        for name, globs in entry.only_named_in.items():
            for other in self._naming(name):
                if not any(glob_regex(glob).fullmatch(other) for glob in globs):
                    return f"{other} names {name}, which the review places elsewhere"
        return ""

    def _open(self, reach: Reach) -> str:
        value = self.default(reach.setting)
        if value is not None and value.lower() in {wanted.lower() for wanted in reach.values}:
            return f"{reach.setting} is {value} by default in {self._reviewed.config}"
        return ""

    def default(self, key: str) -> str | None:
        """The default of a dotted key in the tree's own config, references followed, as text."""
        for _ in range(10):
            node: Any = self._defaults()
            for part in key.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            if isinstance(node, str) and (match := _REFERENCE.fullmatch(node)):
                key = match.group(1)
                continue
            return None if node is None else str(node)
        return None

    def _defaults(self) -> dict[str, Any]:
        if self._config is None:
            data: Any = None
            if self._reviewed.config in self._tree.files:
                try:
                    data = yamlio.load(self._tree.read(self._reviewed.config))
                except yaml.YAMLError:  # reported as unreadable by the scan itself
                    data = None
            self._config = data if isinstance(data, dict) else {}
        return self._config

    def _imported(self) -> dict[str, Edge | None]:
        if self._imports is None:
            gates = {
                (gate.path, module) for gate in self._reviewed.gates for module in gate.imports
            }
            self._imports = reachable(self._tree, list(self._reviewed.roots), gates)
        return self._imports

    def _naming(self, name: str) -> list[str]:
        if self._texts is None:
            self._texts = {
                path: self._tree.read(path).decode("utf-8", "replace")
                for path in self._tree
                if path.endswith(".py")
            }
        if name not in self._named:
            word = re.compile(rf"\b{re.escape(name)}\b")
            self._named[name] = [
                path for path, text in self._texts.items() if name in text and word.search(text)
            ]
        return self._named[name]


def shut_gates(tree: Tree, reviewed: Reviewed) -> list[str]:
    """Gates that are not what they were: no such import any more, or open by default."""
    facts = Facts(tree, reviewed)
    problems = []
    for gate in reviewed.gates:
        text = tree.read(gate.path).decode("utf-8", "replace") if gate.path in tree.files else ""
        problems += [
            f"gate {gate.path}: it no longer imports {module}"
            for module in gate.imports
            if module.rpartition(".")[2] not in text
        ]
        problems += [
            f"gate {gate.path}: {problem}"
            for reach in gate.reached_by
            if reach.setting and (problem := facts._open(reach))
        ]
    return problems
