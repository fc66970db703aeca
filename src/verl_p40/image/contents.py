"""What an image says about itself: its labels, and ``environment.json`` read without running it."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from verl_p40.errors import DataError
from verl_p40.image.engine import asking

if TYPE_CHECKING:
    from docker import DockerClient

PATH = "/opt/verl-p40/environment.json"
"""Where the image keeps it; ``verl_p40.stack.contents`` writes it while the image is built."""
LIMIT = 16 * 2**20
"""Bytes that are read of it at most. A whole stack's is 10 kB; another image may hold anything."""
TEMPORARY = "io.verl-p40.temporary"
"""Label of the container that the file is read from, should a crash leave one behind."""

OCI = "org.opencontainers.image."
OURS = "io.verl-p40."


@dataclass(frozen=True)
class Pair:
    """A label and the field of ``environment.json`` that says the same."""

    label: str
    field: str
    targets: tuple[str, ...] = ("train", "monitor")
    required: bool = True


PAIRS = (
    Pair(f"{OCI}version", "verl_p40"),
    Pair(f"{OCI}revision", "revision"),
    Pair(f"{OCI}base.name", "base_image"),
    Pair(f"{OURS}target", "target"),
    Pair(f"{OURS}flavor", "flavor", ("train",)),
    Pair(f"{OURS}verl", "packages.verl", ("train",)),
    Pair(f"{OURS}torch", "packages.torch", ("train",)),
    Pair(f"{OURS}patches-digest", "patches.verl.digest", ("train",)),
    # Only `verl-p40 image build` knows it beforehand; `docker compose build` leaves it out.
    Pair(f"{OURS}lock-digest", "lock.sha256", ("train",), required=False),
)


def read(client: DockerClient, image: str) -> dict[str, Any]:
    """``environment.json`` of an image of this engine.

    A container is created, never started, and removed whatever happens.

    Raises:
        DataError: the image has none, or it is not a JSON object.
    """
    import docker.errors

    with asking(image):
        container = client.api.create_container(
            image, command=["/nothing-runs"], labels={TEMPORARY: "environment.json"}
        )["Id"]
    try:
        with asking(image):
            try:
                stream, _ = client.api.get_archive(container, PATH)
            except docker.errors.NotFound:
                raise DataError(
                    f"{image} has no {PATH}: it is not an image of verl-p40",
                    fix="name another, or make it: verl-p40 image build",
                ) from None
            data = _only_file(stream, image)
    finally:
        with asking(image):
            client.api.remove_container(container, v=True, force=True)
    return parse(data, f"{image}:{PATH}")


def parse(data: bytes, where: str) -> dict[str, Any]:
    """The document in ``data``.

    Raises:
        DataError: it is not a JSON object.
    """
    try:
        document = json.loads(data)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}", fix="the image is damaged") from error
    if not isinstance(document, dict):
        raise DataError(f"{where} is not a JSON object", fix="the image is damaged")
    return document


def _only_file(stream: Iterator[bytes], image: str) -> bytes:
    """The file in the engine's tar stream, of which no more than ``LIMIT`` is taken in."""
    buffer = io.BytesIO()
    for chunk in stream:
        buffer.write(chunk)
        if buffer.tell() > LIMIT:
            raise DataError(f"{image}: {PATH} is larger than {LIMIT} bytes", fix="do not use it")
    buffer.seek(0)
    try:
        with tarfile.open(fileobj=buffer) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    return file.read()
    except tarfile.TarError as error:
        raise DataError(f"{image}: {PATH} cannot be read: {error}") from error
    raise DataError(f"{image}: {PATH} is not a file", fix="the image is damaged")


def value(document: Mapping[str, Any], field: str) -> Any:
    """A field by its dotted name; a list of mappings is looked up by its ``project``."""
    found: Any = document
    for part in field.split("."):
        if isinstance(found, list):
            found = next(
                (x for x in found if isinstance(x, Mapping) and x.get("project") == part), None
            )
        elif isinstance(found, Mapping):
            found = found.get(part)
        else:
            return None
    return found


def label_differences(labels: Mapping[str, str], document: Mapping[str, Any]) -> list[str]:
    """Where labels and ``environment.json`` of one image contradict each other, in words."""
    target = str(document.get("target") or "train")
    found = []
    for pair in PAIRS:
        stated = labels.get(pair.label) or None
        inside = value(document, pair.field) or None
        if target not in pair.targets and stated is None:
            continue
        if stated is None and (inside is None or not pair.required):
            # Neither says it: a fault only where an image of this kind has to.
            if pair.required and pair.field != "revision":
                found.append(f"neither the label {pair.label} nor {pair.field} is set")
            continue
        if not _same(stated, inside):
            found.append(
                f"label {pair.label} is {stated or 'not set'}, "
                f"environment.json has {inside or 'nothing'} ({pair.field})"
            )
    return found


def _same(stated: str | None, inside: Any) -> bool:
    if stated == inside:
        return True
    try:  # the label 2.6.0 fits torch 2.6.0+cu118: one label for every flavor
        left, right = Version(str(stated)), Version(str(inside))
    except InvalidVersion:
        return False
    return not left.local and left.public == right.public


def differences(left: Any, right: Any, where: str = "") -> Iterator[str]:
    """Every place in which two JSON documents differ: ``packages.torch: 2.6.0, not 2.5.1``.

    ``left`` is what the image has, ``right`` what it should have.
    """
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in [*left, *(key for key in right if key not in left)]:
            inner = f"{where}.{key}" if where else str(key)
            if key not in right:
                yield f"{inner}: {_short(left[key])}, which should not be there"
            elif key not in left:
                yield f"{inner}: missing, should be {_short(right[key])}"
            else:
                yield from differences(left[key], right[key], inner)
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif type(left) is not type(right) or left != right:
        yield f"{where or 'the document'}: {_short(left)}, should be {_short(right)}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 80 else f"{text[:77]}..."
