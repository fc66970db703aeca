"""What the image is called: the one default, and references as Docker reads them.

The grammar is the one of the distribution project (``reference/regexp.go``): an optional registry
(a first part with a dot, a colon, or ``localhost``), a lower-case path, ``:tag``, ``@digest``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from verl_p40 import __version__
from verl_p40.errors import UsageError

IMAGE = "ghcr.io/verl-p40/verl-p40"
"""Repository of the published images."""

PUBLISHED = False
"""Whether a release has been published there: not yet."""

Target = Literal["train", "monitor"]
VARIABLES: dict[Target, str] = {"train": "VERL_P40_IMAGE", "monitor": "VERL_P40_MONITOR_IMAGE"}
"""Each names the image that docker-compose.yml and ``verl-p40 image`` use instead of the default."""

DOCKER_HUB = "docker.io"

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*")
_REGISTRY = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::\d+)?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """``registry/path[:tag][@digest]``, with Docker Hub's short forms spelled out."""

    registry: str
    path: str
    tag: str = ""
    digest: str = ""

    @property
    def repository(self) -> str:
        """Registry and path as the engine writes them: short for Docker Hub."""
        if self.registry != DOCKER_HUB:
            return f"{self.registry}/{self.path}"
        return self.path.removeprefix("library/")

    @property
    def version(self) -> str:
        """What picks the image within its repository: the digest, else the tag."""
        return self.digest or self.tag

    def __str__(self) -> str:
        text = self.repository
        if self.tag:
            text += f":{self.tag}"
        return f"{text}@{self.digest}" if self.digest else text


def parse(text: str) -> Reference:
    """Read a reference; without tag and digest the tag is ``latest``, as Docker has it.

    Raises:
        UsageError: it is not one.
    """
    rest, _, digest = text.partition("@")
    if "@" in text and not _DIGEST.fullmatch(digest):
        raise UsageError(
            f"`{text}`: a digest is sha256: and 64 hexadecimal digits", fix="copy it whole"
        )
    head, slash, tail = rest.partition("/")
    if slash and (head == "localhost" or "." in head or ":" in head):
        registry = head
    else:
        registry, tail = DOCKER_HUB, rest
    path, colon, tag = tail.partition(":")
    if registry == DOCKER_HUB and "/" not in path:
        path = f"library/{path}"
    if not _REGISTRY.fullmatch(registry) or not _PATH.fullmatch(path):
        raise UsageError(
            f"`{text}` is not an image name",
            fix="[registry/]name[:tag][@sha256:...], the name in lower case",
        )
    if colon and not _TAG.fullmatch(tag):
        raise UsageError(
            f"`{text}`: `{tag}` is not a tag",
            fix="up to 128 letters, digits, dots, underscores and hyphens",
        )
    return Reference(registry, path, tag or ("" if digest else "latest"), digest)


def default(target: Target = "train", flavor: str = "cu118") -> str:
    """The name of this version's image: the variable of ``target``, else the default repository.

    The CPU flavor and the monitor have a suffix to the tag: ``0.1.0``, ``0.1.0-cpu``,
    ``0.1.0-monitor``. The monitor holds no torch, so its flavor does not matter.
    """
    named = os.environ.get(VARIABLES[target], "").strip()
    if named:
        parse(named)
        return named
    suffix = "-monitor" if target == "monitor" else "" if flavor == "cu118" else f"-{flavor}"
    return f"{IMAGE}:{__version__}{suffix}"


def compose_needs(target: Target, tags: Sequence[str]) -> str:
    """What docker-compose.yml has to be told to use an image that is called ``tags``.

    ``VERL_P40_IMAGE=name``, for ``.env`` or the environment; empty when it uses one of them anyway.
    """
    used = default(target)
    return "" if used in tags else f"{VARIABLES[target]}={tags[0]}"
