"""The git clone that code may lie in."""

from __future__ import annotations

import subprocess
from pathlib import Path


def revision(root: Path) -> str | None:
    """The commit of a clone, with ``+`` when tracked files differ from it; None without git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments],
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if not (root / ".git").exists():
        return None
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changed else commit
