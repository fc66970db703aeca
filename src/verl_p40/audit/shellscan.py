"""Shell sites of a tree: words of commands that ask for half precision or a hostile feature."""

from __future__ import annotations

import re

from verl_p40.audit import words
from verl_p40.audit.datascan import setting_rule
from verl_p40.audit.model import Finding
from verl_p40.audit.settings import shell

_SETTING = re.compile(r"(?:\+\+|\+|--)?([A-Za-z_][\w.@-]*)=(.+)", re.DOTALL)
_FLASH_PACKAGES = frozenset({"flash-attn", "flash_attn"})


def scan(path: str, data: bytes) -> list[Finding]:
    """Every site of one shell script."""
    if not words.relevant(data):
        return []
    script = shell.parse(data.decode("utf-8", "replace"))
    found = []
    for command in script.commands:
        argv = command.words
        for index, word in enumerate(argv):
            following = argv[index + 1].text if index + 1 < len(argv) else ""
            rule = _rule(word.text, following, command.argv)
            if rule:
                found.append(
                    Finding(
                        path=path,
                        line=word.line,
                        column=1,
                        rule=rule,
                        qualname="<script>",
                        code=word.text.replace(shell.OPAQUE, "$…"),
                        source=" ".join(command.argv).replace(shell.OPAQUE, "$…")[:200],
                    )
                )
    return found


def _rule(word: str, following: str, argv: list[str]) -> str | None:
    match = _SETTING.fullmatch(word)
    if match:
        value = match.group(2)
        return setting_rule(match.group(1), value, is_true=value.lower() == "true")
    if word.startswith("--"):
        name = word[2:]
        return setting_rule(name, following, is_true=following == "" or following.startswith("-"))
    if "install" in argv and re.split(r"[<>=!\[~]", word)[0] in _FLASH_PACKAGES:
        return "flash-attn-import"
    return None
