"""A user that the image does not know: any uid may run it, and libraries ask for name and home.

``getpass.getuser()`` (PyTorch's caches, wandb) raises for a uid without a passwd entry unless a
variable names the user; ``Path.home()`` and ``~`` (Hugging Face, Triton, Ray) fail or point at a
folder that cannot be written, for Docker gives such a user the home ``/``.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import Mapping
from pathlib import Path


def known_name() -> str | None:
    """The user's name in the passwd file; None for a uid that it does not have."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None


def additions(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that make libraries work as this user; what is set and usable stays."""
    added: dict[str, str] = {}
    name = known_name() or f"uid{os.getuid()}"
    for variable in ("USER", "LOGNAME"):
        if not environ.get(variable):
            added[variable] = name
    home = environ.get("HOME", "")
    if not _usable(home):
        added["HOME"] = home = str(_own_home(environ))
    # Each of them defaults to a folder that another user may have made first, or below the home
    # as the passwd file has it.
    defaults = {
        "XDG_CACHE_HOME": Path(home) / ".cache",
        "TRITON_CACHE_DIR": Path(home) / ".triton",
        "TORCHINDUCTOR_CACHE_DIR": Path(home) / ".cache" / "torchinductor",
    }
    return added | {key: str(path) for key, path in defaults.items() if not environ.get(key)}


def _usable(home: str) -> bool:
    return home not in ("", "/") and os.access(home, os.W_OK | os.X_OK)


def _own_home(environ: Mapping[str, str]) -> Path:
    """A home that lasts, in the cache folder; else one as long as the container."""
    for base in (environ.get("VERL_P40_HOME"), tempfile.gettempdir()):
        if not base:
            continue
        home = Path(base) / f"home-{os.getuid()}"
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if _usable(str(home)):
            return home
    return Path("/")
