"""Where the Triton kernels of a project are: an installed package, a tree, or the pinned source."""

from __future__ import annotations

import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from verl_p40.errors import TreeError, UsageError
from verl_p40.stack import paths
from verl_p40.stack.env import StackEnv
from verl_p40.stack.fetch import fetch_pinned
from verl_p40.stack.pins import load


@dataclass(frozen=True)
class SourceTree:
    """``root/package`` holds the sources; ``origin`` says for people where they are from."""

    root: Path
    package: str
    origin: str


def given(folder: Path, package: str) -> SourceTree:
    """The tree that a user names: the package's folder, or the one above it.

    Raises:
        TreeError: it holds no such package.
    """
    folder = folder.expanduser().resolve()
    if (folder / package / "__init__.py").is_file():
        return SourceTree(folder, package, str(folder))
    if folder.name == package and (folder / "__init__.py").is_file():
        return SourceTree(folder.parent, package, str(folder))
    raise TreeError(
        f"no package {package} in {folder}", fix=f"name the folder that has {package}/ in it"
    )


def default(package: str, env: StackEnv | None) -> SourceTree:
    """The installed package, or else the source that is pinned by hash (downloaded once).

    Raises:
        NetworkError: the source has to be downloaded and cannot be.
    """
    if env is not None and (env.site_packages / package / "__init__.py").is_file():
        return SourceTree(env.site_packages, package, f"{package} of the training stack")
    pin = load().find_release(f"{package}-sdist")
    root = paths.cache_home() / "trees" / f"{package}-{pin.version}-{pin.sha256[:12]}"
    if not root.is_dir():
        _unpack(fetch_pinned(f"{package}-sdist"), package, root)
    return SourceTree(root, package, f"{pin.filename} as released")


def _unpack(sdist: Path, package: str, root: Path) -> None:
    """The Python files of a package, and nothing else of the archive."""
    root.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".tree-", dir=root.parent))
    try:
        with tarfile.open(sdist) as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts[1:]
                wanted = member.isfile() and parts[:1] == (package,) and parts[-1].endswith(".py")
                if wanted and ".." not in parts and (stream := archive.extractfile(member)):
                    target = building.joinpath(*parts)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("wb") as sink:
                        shutil.copyfileobj(stream, sink)
        if not (building / package).is_dir():
            raise TreeError(f"{sdist.name}: no package {package} in it")
        try:
            building.rename(root)
        except OSError:
            if not root.is_dir():  # else another process was first
                raise
    except (tarfile.TarError, EOFError) as error:
        raise TreeError(f"{sdist}: not a readable archive ({error})") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)


def user_file(path: Path) -> SourceTree:
    """A single file of a user's own, as a module without a package."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"{path} does not exist", fix="name a Python file with a Triton kernel")
    if not path.stem.isidentifier():
        raise UsageError(f"{path.name} cannot be imported", fix="rename it to a Python identifier")
    return SourceTree(path.parent, path.stem, str(path))
