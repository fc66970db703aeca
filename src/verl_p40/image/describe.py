"""Everything worth knowing about one image of the engine, for a table or as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from verl_p40.errors import DataError, NetworkError
from verl_p40.image import contents, registry
from verl_p40.image.engine import asking
from verl_p40.image.names import Target, parse

if TYPE_CHECKING:
    from docker import DockerClient


@dataclass(frozen=True)
class Step:
    """A step of the build."""

    instruction: str
    """As in a Dockerfile, on one line, without the builder's additions."""
    size: int
    """Bytes, unpacked, that it added."""
    compressed: int | None
    """Bytes of its layer in the registry; None without a layer or when nobody says."""


@dataclass(frozen=True)
class Description:
    """What ``verl-p40 image inspect`` shows."""

    image: str
    id: str
    tags: list[str]
    digests: list[str]
    created: str
    platform: str
    user: str
    entrypoint: list[str]
    command: list[str]
    size: int
    """Bytes, unpacked."""
    compressed: int | None
    """Bytes to download."""
    compressed_reason: str
    """Why ``compressed`` is not known."""
    labels: dict[str, str]
    steps: list[Step]
    environment: dict[str, Any] | None
    """``environment.json``."""
    environment_reason: str
    """Why ``environment`` is not there."""

    @property
    def patches_digest(self) -> str | None:
        found = contents.value(self.environment or {}, "patches.verl.digest")
        return str(found) if found else None

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        document["patches_digest"] = self.patches_digest
        return document


def describe(client: DockerClient, image: str, *, ask_registry: bool = True) -> Description:
    """Look at ``image``, a name or an id, without running it.

    Args:
        ask_registry: ask the registry that the image came from for the compressed sizes.

    Raises:
        DataError: the engine has no such image.
    """
    with asking(image):
        found = client.api.inspect_image(image)
        history = list(reversed(client.api.history(image)))
    digests = list(found["RepoDigests"] or ())
    stored, reason = _stored(digests, image, found["Architecture"]) if ask_registry else (None, "")
    if not ask_registry:
        reason = "the registry was not asked"
    steps = _steps(history, stored.by_step() if stored else ())
    environment, environment_reason = None, ""
    try:
        environment = contents.read(client, image)
    except DataError as error:
        environment_reason = error.message
    config = found["Config"] or {}
    return Description(
        image=image,
        id=found["Id"],
        tags=list(found["RepoTags"] or ()),
        digests=digests,
        created=found.get("Created") or "",
        platform=f"{found['Os']}/{found['Architecture']}",
        user=config.get("User") or "",
        entrypoint=list(config.get("Entrypoint") or ()),
        command=list(config.get("Cmd") or ()),
        size=int(found["Size"]),
        compressed=stored.size if stored else None,
        compressed_reason=reason,
        labels=dict(sorted((config.get("Labels") or {}).items())),
        steps=steps,
        environment=environment,
        environment_reason=environment_reason,
    )


def target(client: DockerClient, image: str) -> Target:
    """Which of the Dockerfile's targets an image is, by its label."""
    with asking(image):
        labels = (client.api.inspect_image(image)["Config"] or {}).get("Labels") or {}
    return "monitor" if labels.get(f"{contents.OURS}target") == "monitor" else "train"


def _stored(
    digests: Sequence[str], image: str, architecture: str
) -> tuple[registry.Stored | None, str]:
    if not digests:
        return None, "it was built here and never pushed or pulled"
    repository = image.split("@")[0]
    # The registry that the name says, where the image is known under several.
    digest = next((d for d in digests if repository.startswith(d.split("@")[0])), digests[0])
    try:
        return registry.stored(parse(digest), architecture), ""
    except NetworkError as error:
        return None, error.message


def _steps(history: Sequence[dict[str, Any]], compressed: Sequence[int | None]) -> list[Step]:
    known: Sequence[int | None] = (
        compressed if len(compressed) == len(history) else [None] * len(history)
    )
    return [
        Step(instruction(entry.get("CreatedBy") or entry.get("Comment") or ""), entry["Size"], size)
        for entry, size in zip(history, known, strict=True)
    ]


_SHELL = re.compile(r"^(?:RUN )?(?:\|\d+ (?P<args>.*?) )?/bin/(?:ba)?sh (?:-\S+ (?:pipefail )?)+")
_BASE_ONLY = re.compile(r"^/bin/sh -c #\(nop\)\s+")


def instruction(created_by: str) -> str:
    """The Dockerfile instruction behind a history entry.

    BuildKit writes ``RUN |1 A=b /bin/sh -c apt-get update # buildkit``, the older builder
    ``/bin/sh -c #(nop) COPY dir:...``. Build arguments before the command are left out.
    """
    text = " ".join(created_by.split()).removesuffix("# buildkit").strip()
    if nop := _BASE_ONLY.match(text):
        return text[nop.end() :]
    if shell := _SHELL.match(text):
        return f"RUN {text[shell.end() :]}"
    return text
