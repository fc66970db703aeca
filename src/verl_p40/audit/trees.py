"""Where the files to audit come from: a folder, a wheel or a source archive. Read only."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from verl_p40.errors import TreeError, UsageError
from verl_p40.patches.marker import read_marker, read_pristine

KNOWN = ("verl", "vllm")
"""Packages that are looked for inside a site-packages folder or an archive."""

SUFFIXES = frozenset({".py", ".pyi", ".yaml", ".yml", ".json", ".sh", ".bash"})


@dataclass
class Tree:
    """The auditable files of one package, by path relative to the folder above the package."""

    package: str
    version: str
    origin: str
    files: dict[str, Callable[[], bytes]]
    pristine: dict[str, bytes] = field(default_factory=dict)
    """Original content of the files that the patch queue changed; empty for an unpatched tree."""
    patched: bool = False

    def read(self, path: str) -> bytes:
        return self.files[path]()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.files))


def open_trees(path: Path) -> list[Tree]:
    """The packages found at ``path``.

    Raises:
        UsageError: nothing is there, or it is no folder, wheel or source archive.
        TreeError: it is one, but holds neither verl nor vLLM, or cannot be read.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist", fix="give a package folder, a wheel or an sdist")
    if path.is_dir():
        return _open_folder(path)
    try:
        if path.suffix in {".whl", ".zip"}:
            return _open_archive(path, _zip_members(path))
        if path.name.endswith((".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz")):
            return _open_archive(path, _tar_members(path))
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        raise TreeError(
            f"{path} cannot be read as an archive: {error}", fix="download it again"
        ) from error
    raise UsageError(
        f"{path} is not a folder, a wheel, a source archive or a shell script",
        fix="give a package folder, site-packages, *.whl, *.tar.gz or *.sh",
    )


def _open_folder(path: Path) -> list[Tree]:
    path = path.resolve()
    if (path / "__init__.py").is_file():
        return [_folder_tree(path.parent, path.name)]
    candidates = [path, *sorted(path.glob("lib/python3*/site-packages")), path / "src"]
    for folder in candidates:
        found = [name for name in KNOWN if (folder / name / "__init__.py").is_file()]
        if found:
            return [_folder_tree(folder, name) for name in found]
    raise TreeError(
        f"no verl or vllm package in {path}",
        fix="give the folder that has verl/ or vllm/ in it, or the package folder itself",
    )


def _folder_tree(parent: Path, package: str) -> Tree:
    root = parent / package
    files: dict[str, Callable[[], bytes]] = {}
    for file in root.rglob("*"):
        if file.suffix in SUFFIXES and file.is_file():
            files[file.relative_to(parent).as_posix()] = file.read_bytes
    marker = read_marker(root)
    pristine = read_pristine(root) if marker else {}
    return Tree(
        package=package,
        version=_version_of(
            package, lambda name: _read_if(parent / name), _dist_info(parent, package)
        ),
        origin=str(root),
        files=files,
        pristine=pristine,
        patched=marker is not None,
    )


def _read_if(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _dist_info(parent: Path, package: str) -> str | None:
    for folder in parent.glob("*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        if name.lower().replace("-", "_") == package:
            return version
    return None


def _version_of(package: str, read: Callable[[str], bytes | None], distribution: str | None) -> str:
    """The version that the tree itself states, else its installer's, else ``unknown``."""
    stated = read(f"{package}/version/version")  # verl
    if stated:
        return stated.decode("utf-8", "replace").strip()
    generated = read(f"{package}/_version.py")  # setuptools-scm: vllm
    if generated:
        match = re.search(rb"""version\s*=\s*(?:version\s*=\s*)?['"]([^'"]+)['"]""", generated)
        if match:
            return match.group(1).decode()
    return distribution or "unknown"


def _zip_members(path: Path) -> dict[str, Callable[[], bytes]]:
    archive = zipfile.ZipFile(path)

    def reader(name: str) -> Callable[[], bytes]:
        return lambda: archive.read(name)

    return {name: reader(name) for name in archive.namelist() if not name.endswith("/")}


def _tar_members(path: Path) -> dict[str, Callable[[], bytes]]:
    # A compressed tar cannot be read out of order cheaply: take the small wanted files at once.
    members: dict[str, Callable[[], bytes]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            wanted = name.suffix in SUFFIXES or name.name in {"version", "PKG-INFO"}
            if member.isfile() and wanted and (stream := archive.extractfile(member)):
                data = io.BytesIO(stream.read()).getvalue()
                members[member.name.removeprefix("./")] = lambda data=data: data  # type: ignore[misc]
    return members


def _open_archive(path: Path, members: dict[str, Callable[[], bytes]]) -> list[Tree]:
    trees = []
    for package in KNOWN:
        prefixes = {
            name[: -len(f"{package}/__init__.py")]
            for name in members
            if re.fullmatch(rf"(?:[^/]+/)?(?:src/)?{package}/__init__\.py", name)
        }
        if not prefixes:
            continue
        prefix = min(prefixes, key=len)
        files = {
            name[len(prefix) :]: read
            for name, read in members.items()
            if name.startswith(f"{prefix}{package}/") and PurePosixPath(name).suffix in SUFFIXES
        }

        def stated(name: str, prefix: str = prefix) -> bytes | None:
            read = members.get(prefix + name)
            return read() if read else None

        match = re.match(rf"{package}-([^-]+?)(?:-py|-cp|\.tar|\.tgz|\.zip|\.whl)", path.name)
        trees.append(
            Tree(
                package=package,
                version=_version_of(package, stated, match.group(1) if match else None),
                origin=str(path),
                files=files,
            )
        )
    if not trees:
        raise TreeError(f"no verl or vllm package in {path}", fix="give a verl or vllm archive")
    return trees
