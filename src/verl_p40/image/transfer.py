"""Push and pull, told layer by layer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from verl_p40.errors import NetworkError, UsageError
from verl_p40.image.engine import asking
from verl_p40.image.names import IMAGE, PUBLISHED, VARIABLES, Reference
from verl_p40.image.problems import explain

if TYPE_CHECKING:
    from docker import DockerClient

_PULLED = re.compile(r"Digest: (sha256:[0-9a-f]{64})")
_PUSHED = re.compile(r"digest: (sha256:[0-9a-f]{64})")


class Report(Protocol):
    """What a transfer tells while it runs."""

    def layer(self, name: str, status: str, current: int, total: int) -> None:
        """A layer's state in the engine's words; bytes so far and in all, 0 when not known."""

    def say(self, text: str) -> None:
        """A line about the whole."""


class Silent:
    """Tells nothing (``--json``)."""

    def layer(self, name: str, status: str, current: int, total: int) -> None:
        pass

    def say(self, text: str) -> None:
        pass


@dataclass(frozen=True)
class Moved:
    """A transfer that succeeded."""

    image: Reference
    digest: str
    """``sha256:...`` of the manifest in the registry."""
    status: str
    """The engine's closing words (``Downloaded newer image for ...``), empty for a push."""
    seconds: float

    @property
    def pinned(self) -> str:
        """The name that will always mean these bytes."""
        return f"{self.image.repository}@{self.digest}"

    def as_json(self) -> dict[str, Any]:
        return {
            "image": str(self.image),
            "digest": self.digest,
            "pinned": self.pinned,
            "status": self.status,
            "seconds": round(self.seconds, 2),
        }


def pull(client: DockerClient, image: Reference, report: Report) -> Moved:
    """Fetch ``image`` into the engine.

    Raises:
        NetworkError: the registry does not have it, does not give it, or does not answer.
        DiskError: the engine has no room for it.
    """
    started = time.monotonic()
    try:
        with asking(image):
            events = client.api.pull(image.repository, tag=image.version, stream=True, decode=True)
            digest, status = follow(events, image, report)
            digest = digest or _known_digest(client, image)
    except NetworkError as error:
        if image.repository == IMAGE and not PUBLISHED:
            # A registry that has no such repository asks for a login instead of saying so.
            error.fix = (
                "no release is published there yet: verl-p40 image build makes the image of a "
                f"clone; {VARIABLES['train']} names another"
            )
        raise
    return Moved(image, digest, status, time.monotonic() - started)


def push(client: DockerClient, image: Reference, report: Report) -> Moved:
    """Send ``image`` to its registry, with the credentials of the docker configuration.

    Raises:
        UsageError: the name has a digest; what is pushed is a tag.
        DataError: the engine has no such image.
        NetworkError: the registry refuses it or does not answer.
    """
    if image.digest:
        raise UsageError(f"{image} names a digest; push a tag", fix=f"{image.repository}:TAG")
    started = time.monotonic()
    with asking(image):
        client.api.inspect_image(str(image))
        events = client.api.push(image.repository, tag=image.tag, stream=True, decode=True)
        digest, _ = follow(events, image, report)
    if not digest:
        raise NetworkError(
            f"{image.registry} took {image} without naming its digest", fix="push it again"
        )
    return Moved(image, digest, "", time.monotonic() - started)


def follow(
    events: Iterable[Mapping[str, Any]], image: Reference, report: Report
) -> tuple[str, str]:
    """Tell ``report`` what the engine streams; digest and closing status at the end.

    Raises:
        VerlP40Error: the stream ends in an error (the HTTP status was 200 long before).
    """
    digest = closing = ""
    for event in events:
        if "error" in event or "errorDetail" in event:
            detail = event.get("errorDetail") or {}
            raise explain(str(detail.get("message") or event.get("error")), image)
        status = str(event.get("status") or "")
        aux = event.get("aux") or {}
        digest = str(aux.get("Digest") or digest)
        if found := _PULLED.match(status) or _PUSHED.search(status):
            digest = found.group(1)
        elif status.startswith("Status: "):
            closing = status.removeprefix("Status: ")
        elif event.get("id") and not status.startswith("Pulling from"):
            progress = event.get("progressDetail") or {}
            report.layer(
                str(event["id"]),
                status,
                int(progress.get("current") or 0),
                int(progress.get("total") or 0),
            )
        elif status and not event.get("id"):
            report.say(status)
    return digest, closing


def _known_digest(client: DockerClient, image: Reference) -> str:
    for known in client.api.inspect_image(str(image))["RepoDigests"] or ():
        repository, _, digest = str(known).partition("@")
        if repository == image.repository:
            return digest
    return image.digest
