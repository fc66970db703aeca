"""What an application of the queue leaves inside the package: the marker and the pristine copies."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from verl_p40.errors import TreeError

MARKER = ".verl-p40.json"
PRISTINE = ".verl-p40-pristine.zip"

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time a zip can hold: the same queue gives the same bytes."""


class ChangedFile(BaseModel):
    """sha256 of a file before and after the patches; None where there is no file."""

    model_config = ConfigDict(frozen=True)

    before: str | None
    after: str | None


class Marker(BaseModel):
    """The content of ``<package>/.verl-p40.json``."""

    model_config = ConfigDict(frozen=True)

    project: str
    version: str
    digest: str = Field(description="sha256 of the whole queue, whatever was selected from it")
    patches: tuple[str, ...] = Field(description="paths of the applied patches, in order")
    files: dict[str, ChangedFile]


def read_marker(package: Path) -> Marker | None:
    """The marker inside ``package``; None if there is none or it is not readable as one."""
    try:
        return Marker.model_validate_json((package / MARKER).read_bytes())
    except (OSError, ValidationError):
        return None


def write_marker(package: Path, marker: Marker, pristine: Mapping[str, bytes]) -> None:
    """Write marker and pristine copies into a package folder that is not in use yet."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(pristine):
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), pristine[name], zipfile.ZIP_DEFLATED)
    (package / PRISTINE).write_bytes(buffer.getvalue())
    (package / MARKER).write_text(marker.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_pristine(package: Path) -> dict[str, bytes]:
    """The pristine copies by path relative to the tree.

    Raises:
        TreeError: they are missing or damaged.
    """
    path = package / PRISTINE
    try:
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile, EOFError) as error:
        raise TreeError(
            f"{path}: the pristine copies of the patched files cannot be read ({error})",
            fix=f"reinstall {package.name}, then run verl-p40 patches apply",
        ) from None
