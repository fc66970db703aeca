"""Getting a release as an unpacked tree: the pinned one by its hash, or another to compare with."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path, PurePosixPath

from packaging.version import InvalidVersion, Version

from verl_p40.errors import NetworkError, TreeError, UsageError
from verl_p40.patches.project import Project, find_project
from verl_p40.patches.queue import Queue
from verl_p40.patches.swap import new_folder
from verl_p40.patches.tree import ApplyReport, apply_queue
from verl_p40.stack.fetch import fetch_pinned
from verl_p40.stack.uv import uv_binary


def unpack_pinned(project: str, into: Path) -> Path:
    """Fetch the pinned file of ``project`` (by sha256, cached) and unpack it.

    Returns:
        ``into``, which now is a tree: the package of a wheel, or what a build reads of an sdist.

    Raises:
        NetworkError: it cannot be downloaded, or has another hash.
    """
    facts = find_project(project)
    return unpack_file(fetch_pinned(facts.pin), into, project)


def patched_release(queue: Queue, folder: Path) -> ApplyReport:
    """Unpack the pinned file of the queue's project into ``folder`` and apply the whole queue.

    Raises:
        UsageError: ``folder`` is not empty.
        NetworkError, TreeError: as :func:`unpack_pinned` and :func:`apply_queue`. Nothing is left.
    """
    with new_folder(folder) as work:
        report = apply_queue(unpack_pinned(queue.project, work), queue)
    return replace(report, tree=folder.absolute())


def unpack_file(path: Path, into: Path, project: str) -> Path:
    """Unpack a wheel or an sdist of ``project``, told by the name of the file.

    Raises:
        TreeError: neither, or it has no such package.
    """
    if path.name.endswith((".tar.gz", ".tgz")):
        return unpack_sdist(path, into, find_project(project))
    return unpack_wheel(path, into, project)


def unpack_sdist(sdist: Path, into: Path, facts: Project) -> Path:
    """Unpack the roots of a project from its source distribution, without the folder around them.

    Raises:
        TreeError: not a readable archive, or it has no such package.
    """
    into.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(sdist) as archive:
            for item in archive:
                path = PurePosixPath(*PurePosixPath(item.name).parts[1:])
                source = archive.extractfile(item) if item.isreg() else None
                if source is None or ".." in path.parts or path.parts[0] not in facts.roots:
                    continue
                if path.suffix in (".pyc", ".pyo"):
                    continue
                target = into / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
                if item.mode & 0o100:  # scripts that CMake runs
                    target.chmod(0o755)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise TreeError(f"{sdist}: not an sdist ({error})", fix="download it again") from None
    if not (into / facts.name).is_dir():
        raise TreeError(
            f"{sdist}: no folder {facts.name} in it", fix=f"name an sdist of {facts.name}"
        )
    return into


def unpack_wheel(wheel: Path, into: Path, package: str) -> Path:
    """Unpack the folder ``package`` of a wheel into the folder ``into``.

    Raises:
        TreeError: not a readable zip file, or it has no such folder.
    """
    into.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            for item in archive.infolist():
                path = PurePosixPath(item.filename)
                if path.parts[:1] != (package,) or ".." in path.parts or item.is_dir():
                    continue
                target = into / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(item) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, EOFError) as error:
        raise TreeError(f"{wheel}: not a wheel ({error})", fix="download it again") from None
    if not (into / package).is_dir():
        raise TreeError(f"{wheel}: no folder {package} in it", fix=f"name a wheel of {package}")
    return into


def obtain(target: str, project: str, scratch: Path) -> tuple[Path, str]:
    """A tree to compare with, and what to call it.

    Args:
        target: the folder of a tree, a wheel file, or a version to download.
        project: the package that is looked for in it.
        scratch: an empty folder for what has to be unpacked.

    Raises:
        UsageError: neither of the three.
        NetworkError: that version cannot be downloaded.
        TreeError: no such package in the tree or wheel.
    """
    path = Path(target).expanduser()
    if path.is_dir():
        if not (path / project).is_dir():
            raise TreeError(
                f"{path}: no folder {project} in it",
                fix=f"name the folder that contains {project}, such as site-packages",
            )
        return path, str(path)
    if path.is_file():
        return unpack_file(path, scratch, project), path.name
    try:
        version = Version(target)
    except InvalidVersion:
        raise UsageError(
            f"{target!r} is neither a folder, nor a wheel, nor a version",
            fix=f"for example: --against 0.5.0, or --against {project}-0.5.0-py2.py3-none-any.whl",
        ) from None
    return _install(f"{project}=={version}", scratch), f"{project} {version}"


def _install(requirement: str, into: Path) -> Path:
    # Through uv, so that the user's index, proxy and certificates count; wheels alone, so that
    # looking at a release runs none of its code.
    done = subprocess.run(
        [uv_binary(), "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--link-mode",
         "copy", "--target", str(into), requirement],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise NetworkError(
            f"cannot get {requirement}: {' '.join(lines)[:300]}",
            fix="check the version and the network, or name a wheel file",
        )
    return into
