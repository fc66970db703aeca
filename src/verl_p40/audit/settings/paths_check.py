"""Paths and modules of verl that a script names but the pinned release does not have."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from functools import lru_cache

from verl_p40.audit.settings.commands import Meaning, shown
from verl_p40.audit.settings.model import SettingFinding
from verl_p40.stack import paths

_PATH = re.compile(r"(?:^|[^\w.-])(verl/[\w./-]+\.(?:py|yaml))(?![\w])")
_BESIDE = ("examples/", "scripts/", "tests/", "recipe/", "docs/", "docker/", "verl/", "setup.py")
"""What a checkout of the repository has in its own ``verl/`` folder beside the package."""


@lru_cache(maxsize=1)
def release_files() -> frozenset[str]:
    """Files of the pinned release, from the queue's manifest; empty where there is none."""
    manifest = paths.patches_dir() / "verl" / "upstream.sha256"
    if not manifest.is_file():
        return frozenset()
    lines = manifest.read_text(encoding="utf-8").splitlines()
    return frozenset(line.split(maxsplit=1)[1].strip() for line in lines if len(line.split()) == 2)


def findings(meaning: Meaning) -> Iterator[SettingFinding]:
    known = release_files()
    if not known:
        return
    for command in meaning.commands:
        for word in command.words:
            for match in _PATH.finditer(word.text):
                path = match.group(1)
                inner = path.rpartition("verl/verl/")[2] if "verl/verl/" in path else path[5:]
                if inner.startswith(_BESIDE) or f"verl/{inner}" in known:
                    continue
                near = difflib.get_close_matches(f"verl/{inner}", sorted(known), n=1, cutoff=0.6)
                yield SettingFinding(
                    "wrong", "path-missing", shown(path), word.line,
                    f"verl 0.4.1 has no file verl/{inner}",
                    near[0] if near else "", "patches/verl/upstream.sha256",
                )  # fmt: skip
    for module, line in meaning.modules:
        if not module.startswith("verl.") or "\x00" in module:
            continue
        base = module.replace(".", "/")
        if {f"{base}.py", f"{base}/__init__.py", f"{base}/__main__.py"} & known:
            continue
        names = [p.removesuffix(".py").replace("/", ".") for p in known if p.endswith(".py")]
        near = difflib.get_close_matches(module, sorted(names), n=1, cutoff=0.6)
        yield SettingFinding(
            "wrong", "module-missing", f"python -m {module}", line,
            f"verl 0.4.1 has no module {module}",
            f"python -m {near[0]}" if near else "", "patches/verl/upstream.sha256",
        )  # fmt: skip
