"""YAML and JSON sites: dtype values, switches that are on, attention back ends."""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterator
from typing import NamedTuple

import yaml

from verl_p40.audit import words, yamlio
from verl_p40.audit.model import Finding


class _Scalar(NamedTuple):
    """A leaf: ``path`` of keys, its value as text, whether it is a plain true, and where."""

    path: tuple[str, ...]
    value: str
    is_true: bool
    line: int
    column: int


def scan_yaml(path: str, data: bytes) -> list[Finding]:
    """Every site of a YAML file."""
    if not words.relevant(data):
        return []
    text = data.decode("utf-8", "replace")
    try:
        documents = yamlio.compose_all(text)
    except yaml.YAMLError as error:
        return [_unreadable(path, f"not YAML: {' '.join(str(error).split())}")]
    scalars = [leaf for document in documents for leaf in _yaml_leaves(document, ())]
    return _judge(path, text, scalars)


def scan_json(path: str, data: bytes) -> list[Finding]:
    """Every site of a JSON file."""
    if not words.relevant(data):
        return []
    text = data.decode("utf-8-sig", "replace")
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        return [_unreadable(path, f"not JSON: {error}")]
    return _judge(path, text, list(_json_leaves(text)))


def _unreadable(path: str, message: str) -> Finding:
    return Finding(path, 1, 1, "unreadable", "<document>", "", message)


def _judge(path: str, text: str, scalars: list[_Scalar]) -> list[Finding]:
    lines = text.splitlines()
    found = []
    for leaf in scalars:
        rule = setting_rule(leaf.path[-1] if leaf.path else "", leaf.value, is_true=leaf.is_true)
        if rule:
            found.append(
                Finding(
                    path=path,
                    line=leaf.line,
                    column=leaf.column,
                    rule=rule,
                    qualname=".".join(leaf.path[:-1]) or "<document>",
                    code=f"{'.'.join(leaf.path)}: {leaf.value}",
                    source=lines[leaf.line - 1].strip() if leaf.line <= len(lines) else "",
                )
            )
    return found


def setting_rule(key: str, value: str, *, is_true: bool) -> str | None:
    """The rule that ``key: value`` breaks as a default of a configuration file or a command."""
    key = key.rpartition(".")[2].replace("-", "_")
    if is_true:
        return words.SWITCHES_ON.get(key)
    if words.half_word(value):
        return "half-default"
    if words.fp8_word(value):
        return "fp8"
    if value in words.FLASH_VALUES:
        return "flash-attn-implementation"
    if value == "auto" and key in words.DTYPE_KEYS:
        return "auto-dtype"
    if key in words.BACKEND_KEYS:
        return words.BACKEND_VALUES.get(value)
    return None


def _yaml_leaves(node: yaml.Node, path: tuple[str, ...]) -> Iterator[_Scalar]:
    # An explicit stack: a hostile file nested a thousand levels deep must not end the audit.
    stack: list[tuple[yaml.Node, tuple[str, ...]]] = [(node, path)]
    seen: set[int] = set()
    while stack:
        current, where = stack.pop()
        if isinstance(current, yaml.ScalarNode):
            mark = current.start_mark
            is_true = current.tag == "tag:yaml.org,2002:bool" and current.value.lower() in {
                "true", "yes", "on",
            }  # fmt: skip
            yield _Scalar(where, current.value, is_true, mark.line + 1, mark.column + 1)
        elif id(current) not in seen:  # an anchor may be used many times, even inside itself
            seen.add(id(current))
            if isinstance(current, yaml.MappingNode):
                for key, value in reversed(current.value):
                    name = key.value if isinstance(key, yaml.ScalarNode) else "?"
                    stack.append((value, (*where, str(name))))
            elif isinstance(current, yaml.SequenceNode):
                stack.extend((item, where) for item in reversed(current.value))


_JSON_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def _json_leaves(text: str) -> Iterator[_Scalar]:
    """Leaves of a valid JSON document with their places, which ``json`` does not keep."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    keys: list[str] = []
    in_object: list[bool] = []
    key: str | None = None
    for match in _JSON_TOKEN.finditer(text):
        token = match.group()
        if token in "{[":
            in_object.append(token == "{")
            keys.append(key or "")
            key = None
        elif token in "}]":
            in_object.pop()
            key = keys.pop() or None
        elif token == ",":
            key = None if in_object and in_object[-1] else key
        elif token != ":":
            if in_object and in_object[-1] and key is None:
                key = str(json.loads(token))
                continue
            value = json.loads(token)
            line = bisect.bisect_right(starts, match.start())
            path = tuple(part for part in (*keys, key or "") if part)
            text_value = value if isinstance(value, str) else token
            column = match.start() - starts[line - 1] + 1
            yield _Scalar(path, text_value, value is True, line, column)
