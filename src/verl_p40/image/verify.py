"""Is an image of this engine the one that was published?"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_p40 import __version__
from verl_p40.errors import DataError, NetworkError
from verl_p40.image import contents
from verl_p40.image.engine import asking
from verl_p40.image.names import Reference
from verl_p40.patches.queue import load_queue

if TYPE_CHECKING:
    from docker import DockerClient


@dataclass
class Check:
    """One comparison."""

    name: str
    result: str
    """What was compared, or what was found equal, in words."""
    differences: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.differences


@dataclass
class Verdict:
    """What ``verl-p40 image verify`` found."""

    image: str
    id: str
    digest: str
    """The digest that was asked for or that the registry has now for the tag."""
    checks: list[Check]
    notes: list[str]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {
            "image": self.image,
            "id": self.id,
            "digest": self.digest,
            "ok": self.ok,
            "checks": [{**vars(check), "ok": check.ok} for check in self.checks],
            "notes": self.notes,
        }


def verify(client: DockerClient, image: Reference, *, against: str = "") -> Verdict:
    """Compare the engine's image with what was published under its name.

    Args:
        image: without a digest, the registry is asked which one the tag has now.
        against: a release's ``environment.json``, or another image of this engine.

    Raises:
        DataError: the engine has no such image, or it is none of verl-p40.
        NetworkError: the registry has to be asked and does not answer, or has no such tag.
    """
    local = _local_name(image)
    with asking(image):
        found = client.api.inspect_image(local)
    digest = image.digest or published_digest(client, image)
    environment = contents.read(client, local)
    labels = (found["Config"] or {}).get("Labels") or {}
    asked = "the one asked for" if image.digest else f"what {image.registry} has for {image.tag}"
    checks = [
        _digest_check(image, list(found["RepoDigests"] or ()), digest, asked),
        Check(
            "labels",
            "environment.json says what the labels say",
            contents.label_differences(labels, environment),
        ),
    ]
    notes: list[str] = []
    queue_check = _queue_check(environment, notes)
    if queue_check:
        checks.append(queue_check)
    if against:
        checks.append(_against(client, environment, against))
    return Verdict(str(image), found["Id"], digest, checks, notes)


def published_digest(client: DockerClient, image: Reference) -> str:
    """The digest that the registry has now for a tag; nothing is pulled."""
    try:
        with asking(image):
            answer = client.api.inspect_distribution(str(image))
    except NetworkError as error:
        error.fix += f"; or name the digest that was published: {image}@sha256:..."
        raise
    return str(answer["Descriptor"]["digest"])


def _local_name(image: Reference) -> str:
    """How the engine knows the image: by tag, where a tag is given together with a digest.

    ``name:tag@digest`` asks whether *the tag here* is that digest; looking the digest up instead
    would find the right image although the tag, which is what gets used, names another.
    """
    return f"{image.repository}:{image.tag}" if image.tag else str(image)


def _digest_check(image: Reference, known: list[str], digest: str, asked: str) -> Check:
    here = [item.partition("@")[2] for item in known if item.split("@")[0] == image.repository]
    check = Check("digest", f"{digest} is {asked}")
    if digest in here:
        return check
    if here:
        what = f"the image here is {', '.join(here)}"
    elif known:
        what = f"the image here came from elsewhere: {', '.join(known)}"
    else:
        what = "the image here was built on this machine or loaded from a file: no registry gave it"
    check.differences.append(what)
    return check


def _queue_check(environment: dict[str, Any], notes: list[str]) -> Check | None:
    """The patch queue: comparable when the image and this command are of one version."""
    if environment.get("target") == "monitor":
        notes.append("a monitor image: no verl in it, so no patches")
        return None
    inside = contents.value(environment, "patches.verl.digest")
    version = environment.get("verl_p40")
    if version != __version__:
        notes.append(
            f"the image is of verl-p40 {version}, this is {__version__}: its patches "
            f"({str(inside)[:12]}) belong to another queue and were not compared with this one"
        )
        return None
    queue = load_queue()
    check = Check("patches", f"queue {queue.digest[:12]} of verl-p40 {__version__}")
    if inside != queue.digest:
        check.differences.append(
            f"the image has queue {inside or 'none'}, verl-p40 {__version__} has {queue.digest}"
        )
    paths = [patch.path for patch in queue.patches]
    named = contents.value(environment, "patches.verl.patches")
    inside_paths = list(map(str, named)) if isinstance(named, list) else []
    gone = [path for path in paths if path not in inside_paths]
    more = [path for path in inside_paths if path not in paths]
    check.differences += [f"patch {path} is not in the image" for path in gone]
    check.differences += [f"the image has patch {path}, which the queue has not" for path in more]
    if not gone and not more and paths != inside_paths:
        check.differences.append("the image has the patches in another order")
    return check


def _against(client: DockerClient, environment: dict[str, Any], against: str) -> Check:
    path = Path(against)
    if path.is_file():
        document = contents.parse(path.read_bytes(), against)
    elif against.endswith(".json") or "\\" in against:
        raise DataError(f"{against} does not exist", fix="name a file, or an image of this engine")
    else:
        document = contents.read(client, against)
    check = Check("environment.json", f"the same as {against}")
    check.differences += contents.differences(environment, document)
    return check
