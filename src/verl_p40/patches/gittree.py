"""The queue as a git history, to edit and rebase it with git.

``unpack`` makes a repository with one commit for the release (tag ``upstream``) and one commit a
patch. Its message is the patch's header plus a trailer ``Patch-Name: group/NNNN-name.patch``.
refresh.py is the way back. Both ways together change no byte, whatever the user's git is
configured to do.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from verl_p40.errors import MachineError, TreeError
from verl_p40.patches.hunks import Fit
from verl_p40.patches.manifest import files_below
from verl_p40.patches.queue import Queue, Reader, plan_patches
from verl_p40.patches.swap import new_folder

BASE_TAG = "upstream"
NEXT_TAG = "upstream-next"
TRAILER = "Patch-Name"

_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "verl-p40"),
        ("EMAIL", "verl-p40@localhost"),
        ("DATE", "2000-01-01T00:00:00 +0000"),
    )
}
"""A fixed identity and date: the same queue gives the same commits."""


class Git:
    """Runs git in one folder, deaf to the configuration of the user and the system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, *args: str, stdin: bytes = b"", check: bool = True) -> bytes:
        """Standard output of a git command.

        Raises:
            MachineError: git is not installed.
            TreeError: the command failed, with git's own words.
        """
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        env |= _IDENTITY | {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C",
        }
        try:
            done = subprocess.run(
                ["git", "-C", str(self.folder), *args], input=stdin, capture_output=True, env=env
            )
        except FileNotFoundError:
            raise MachineError(
                "git is not installed; unpack and refresh need it", fix="install git"
            ) from None
        if check and done.returncode:
            words = " ".join(done.stderr.decode("utf-8", "replace").split())
            raise TreeError(f"git {args[0]} failed in {self.folder}: {words[:300]}")
        return done.stdout

    def text(self, *args: str, check: bool = True) -> str:
        return self.run(*args, check=check).decode("utf-8", "replace").strip()


def unpack_queue(
    queue: Queue, tree: Path, folder: Path, *, onto: Path | None = None, onto_label: str = ""
) -> int:
    """Make a git repository of the release and the queue.

    Args:
        queue: what to unpack; it has to fit exactly.
        tree: the unpacked pinned release.
        folder: a new or empty folder.
        onto: another release: committed on top of the pinned one with the tag
            ``upstream-next``, for ``git rebase --onto upstream-next upstream``.
        onto_label: what to call that release.

    Returns:
        The number of patch commits.

    Raises:
        UsageError: ``folder`` is not empty.
        TreeError: a patch does not fit, or git failed. Nothing is left behind.
    """
    with new_folder(folder) as work:
        work.mkdir()
        git = Git(work)
        git.run("init", "--quiet", "--initial-branch=main")
        for key, value in (("core.autocrlf", "false"), ("core.hooksPath", os.devnull)):
            git.run("config", key, value)
        (work / ".git" / "info" / "exclude").write_text("__pycache__/\n", encoding="utf-8")
        roots = queue.facts.roots
        _commit_tree(git, tree, roots, f"{queue.project} {queue.version}\n", BASE_TAG)
        if onto is not None:
            git.run("checkout", "--quiet", "--detach")
            _commit_tree(git, onto, roots, f"{onto_label}\n", NEXT_TAG)
            git.run("checkout", "--quiet", "main")
        for patch in queue.patches:
            plan = plan_patches(_reader(work), [patch]).require(Fit.EXACT)
            for name, content in plan.after.items():
                put(work / name, content)
            git.run("add", "--all", ".")
            message = f"{patch.header_text}{TRAILER}: {patch.path}\n"
            _commit(git, message)
    return len(queue.patches)


def _commit_tree(git: Git, tree: Path, roots: Sequence[str], message: str, tag: str) -> None:
    for name in files_below(git.folder, *roots):
        (git.folder / name).unlink()
    for name, path in files_below(tree, *roots).items():
        put(git.folder / name, path.read_bytes())
    git.run("add", "--all", "--force", *(root for root in roots if (git.folder / root).exists()))
    _commit(git, message)
    git.run("tag", tag)


def _commit(git: Git, message: str) -> None:
    git.run(
        "commit", "--quiet", "--cleanup=verbatim", "--allow-empty", "--no-gpg-sign", "--file=-",
        stdin=message.encode(),
    )  # fmt: skip


def put(path: Path, content: bytes | None) -> None:
    """Write a file and the folders above it; None removes it."""
    if content is None:
        path.unlink()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _reader(root: Path) -> Reader:
    return lambda name: (root / name).read_bytes() if (root / name).is_file() else None
