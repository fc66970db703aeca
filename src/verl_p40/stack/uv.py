"""The uv program that belongs to this installation."""

from __future__ import annotations

import os
import shutil
from functools import cache

from verl_p40.errors import MachineError


@cache
def uv_binary() -> str:
    """The path of uv: the one installed beside this interpreter, else the one on PATH.

    Raises:
        MachineError: there is none.
    """
    try:
        from uv import find_uv_bin

        return os.fspath(find_uv_bin())
    except (ImportError, FileNotFoundError):
        found = shutil.which("uv")
    if found is None:
        raise MachineError("uv is not installed", fix="pip install uv")
    return found
