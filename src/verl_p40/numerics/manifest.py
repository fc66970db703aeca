"""What a build leaves beside its PTX: which kernel is in which file, and how it was made."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from verl_p40.errors import DataError, MachineError
from verl_p40.numerics.cases import PREFIX

ARCH = 61
"""Compute capability 6.1: ``compute_61`` for PTX, ``sm_61`` in its ``.target`` line."""

MANIFEST = "manifest.json"
SCHEMA = 2
MARK = "verl-p40-numerics "
"""Begins the lines that the comparing process prints."""

_FIX = "python -m verl_p40.numerics build FOLDER"


def describe(path: Path) -> dict[str, str]:
    """The file of a module, its hash, what its PTX is for and the version of its language.

    Raises:
        MachineError: a compiler wrote something else than PTX.
    """
    content = path.read_bytes()
    text = content.decode()
    target = re.search(r"^\.target\s+(\w+)", text, re.MULTILINE)
    version = re.search(r"^\.version\s+([\d.]+)", text, re.MULTILINE)
    if target is None or version is None:
        raise MachineError(f"{path.name} is no PTX")
    return {
        "file": path.name,
        "sha256": hashlib.sha256(content).hexdigest(),
        "target": target[1],
        "ptx": version[1],
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a build, with every module's file checked: its hash, and that it is PTX
    for 6.1, by its own ``.target`` line.

    Raises:
        DataError: there is none, it is of another version or other cases, or a file is not the
            one that was built.
    """
    try:
        document: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: no readable {MANIFEST} ({error})", fix=_FIX) from None
    built = [launch["case"] for launch in document.get("prefix", ()) if "case" in launch]
    if document.get("schema") != SCHEMA or built != [repr(case) for case in PREFIX]:
        raise DataError(f"{folder}: built by another version of verl-p40", fix=_FIX)
    for module in document["modules"].values():
        path = folder / module["file"]
        try:
            found = describe(path)
        except (OSError, MachineError, UnicodeDecodeError):
            found = {}
        if found != module:
            raise DataError(f"{path} is not what was built", fix=_FIX)
        if found["target"] != f"sm_{ARCH}":
            raise DataError(f"{path} is PTX for {found['target']}, not sm_{ARCH}", fix=_FIX)
    return document
