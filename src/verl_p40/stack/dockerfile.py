"""The ``ARG`` defaults of the Dockerfile that repeat pins: written and checked with the locks.

A label can only come from a build argument, so versions and the queue's digest stand in the
Dockerfile a second time. `nox -s lock` writes them, ``--check`` and the unit tests compare, and
the image build compares the digest with the queue it has applied.
"""

from __future__ import annotations

import re
from pathlib import Path

from verl_p40 import __version__
from verl_p40.patches.queue import load_queue
from verl_p40.stack.pins import Pins

NAME = "Dockerfile"


def arguments(pins: Pins) -> dict[str, str]:
    """Build argument → the default that follows from pins and queue."""
    return {
        "VERSION": __version__,
        "VERL_VERSION": pins.release["verl"].version,
        "TORCH_VERSION": pins.train.packages["torch"].version,
        "TORCH_INDEX": pins.index["pytorch-cu118"].default,
        "HF_ENDPOINT": pins.index["huggingface"].default,
        "PATCHES_DIGEST": load_queue().digest,
    }


def rewritten(text: str, pins: Pins) -> str:
    """The Dockerfile with every such default as it should be.

    Raises:
        ValueError: an argument has no line with a default, or several.
    """
    for name, value in arguments(pins).items():
        text, count = re.subn(rf"^(ARG {name})=.*$", rf"\1={value}", text, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"{NAME}: {count} lines `ARG {name}=...`, expected one")
    return text


def problems(path: Path, pins: Pins) -> list[str]:
    """What `nox -s lock` would change, one line each."""
    text = path.read_text(encoding="utf-8")
    wanted = arguments(pins)
    found = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    return [
        f"{NAME}: ARG {name} is {found.get(name)!r}, and should be {value!r}"
        for name, value in wanted.items()
        if found.get(name) != value
    ]
