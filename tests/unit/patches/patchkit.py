"""Queues made with git for one test, and what the tests of this folder share."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from verl_p40.patches.manifest import format_manifest, manifest_of
from verl_p40.patches.queue import Queue, load_queue

REPOSITORY = Path(__file__).resolve().parents[3]

GSM8K = "verl/utils/reward_score/gsm8k.py"
TRACKING = "verl/utils/tracking.py"
DEVICE = "verl/utils/device.py"
NEW = "verl/utils/added/new.py"

Edit = Callable[[bytes], bytes]
Change = Mapping[str, "Edit | bytes | None"]
"""What to do to each file: edit its bytes, write these, or delete it."""


def substitute(old: bytes, new: bytes) -> Edit:
    def edit(content: bytes) -> bytes:
        assert content.count(old) == 1, f"{old!r} stands {content.count(old)} times"
        return content.replace(old, new)

    return edit


def git_diff(before: Path, after: Path) -> bytes:
    """The diff between two trees as git makes it, paths relative to both."""
    work = before.parent / "git-diff"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    shutil.copytree(before, work / "a")
    shutil.copytree(after, work / "b")
    done = subprocess.run(
        ["git", "-c", "core.autocrlf=false", "diff", "--no-index", "--no-renames", "--text",
         "--no-prefix", "a", "b"],
        cwd=work,
        capture_output=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def header_text(**fields: str) -> str:
    values = {
        "Description": "Change something\n for the test",
        "Author": "somebody",
        "Forwarded": "no, only a test",
        "Last-Update": "2026-01-31",
        "Applies-To": "verl 0.4.1",
        "Prevents": "SomeError: some message",
        "Proved-By": "tests/test_proof.py::test_gsm8k",
    } | {name.replace("_", "-"): value for name, value in fields.items()}
    return "".join(f"{name}: {value}\n" for name, value in values.items() if value)


class QueueMaker:
    """Writes a queue patch by patch; each one is a change on what the one before left."""

    def __init__(self, tree: Path, root: Path) -> None:
        self.directory = root / "patches" / "verl"
        self.directory.mkdir(parents=True)
        self._before, self._after = root / "before", root / "after"
        shutil.copytree(tree, self._before)
        shutil.copytree(tree, self._after)
        manifest = format_manifest(manifest_of(tree, "verl"))
        (self.directory / "upstream.sha256").write_text(manifest)
        self._entries: list[str] = []

    def add(self, path: str, change: Change, **header: str) -> QueueMaker:
        for name, what in change.items():
            file = self._after / name
            if what is None:
                file.unlink()
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(what if isinstance(what, bytes) else what(file.read_bytes()))
        diff = git_diff(self._before, self._after)
        shutil.rmtree(self._before)
        shutil.copytree(self._after, self._before)
        target = self.directory / path
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(header_text(**header).encode() + b"---\n" + diff)
        self._entries.append(path)
        (self.directory / "series").write_text("".join(f"{entry}\n" for entry in self._entries))
        return self

    @property
    def result(self) -> Path:
        """The tree that all patches together must give."""
        return self._after

    def load(self) -> Queue:
        return load_queue(self.directory)


def contents(tree: Path) -> dict[str, bytes]:
    """Every file of the package but bytecode and what an application leaves there."""
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in sorted((tree / "verl").rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and not path.name.startswith(".verl-p40")
    }


def entries(folder: Path) -> list[str]:
    """The names in a folder: nothing may be left beside the package."""
    return sorted(path.name for path in folder.iterdir())
