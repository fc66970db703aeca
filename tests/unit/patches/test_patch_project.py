"""A queue on a source tree: what it may touch, its two forms of tree, and the wheel's record."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
from patchkit import REPOSITORY, git_diff, header_text, substitute

from verl_p40.errors import TreeError, UsageError
from verl_p40.patches.gittree import unpack_queue
from verl_p40.patches.lint import lint_queue
from verl_p40.patches.manifest import format_manifest, manifest_of
from verl_p40.patches.marker import MARKER, PRISTINE, read_marker
from verl_p40.patches.project import find_project
from verl_p40.patches.queue import Queue, load_queue
from verl_p40.patches.refresh import refresh_queue
from verl_p40.patches.release import patched_release, unpack_file, unpack_pinned
from verl_p40.patches.tree import apply_queue, revert, tree_state
from verl_p40.patches.verify import status_against, verify_queue

VLLM = find_project("vllm")
LIST, SETUP = "CMakeLists.txt", "setup.py"
WORKER, VERSION = "vllm/worker/worker.py", "vllm/_version.py"
LEFT_OUT = "vllm/distributed/kv_transfer/README.md"


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned sdist, fetched by its hash and unpacked."""
    return unpack_pinned("vllm", tmp_path_factory.mktemp("sdist"))


@pytest.fixture
def source(sdist: Path, tmp_path: Path) -> Path:
    """A few real files of it."""
    tree = tmp_path / "vllm-0.8.5.post1"
    kept = (LIST, SETUP, "PKG-INFO", "cmake/utils.cmake")
    for name in (*kept, "vllm/__init__.py", WORKER, VERSION, LEFT_OUT):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(sdist / name, tree / name)
    return tree


class Maker:
    """Writes patches on vLLM, each a change on what the one before left."""

    def __init__(self, tree: Path, root: Path) -> None:
        self.directory = root / "patches" / "vllm"
        self.directory.mkdir(parents=True)
        self._before, self._after = root / "before", root / "after"
        shutil.copytree(tree, self._before)
        shutil.copytree(tree, self._after)
        manifest = format_manifest(manifest_of(tree, *VLLM.roots))
        (self.directory / "upstream.sha256").write_text(manifest)
        self._entries: list[str] = []

    def add(self, path: str, file: str, old: bytes, new: bytes, **header: str) -> None:
        target = self._after / file
        target.write_bytes(substitute(old, new)(target.read_bytes()))
        diff = git_diff(self._before, self._after)
        shutil.copy2(target, self._before / file)
        patch = self.directory / path
        patch.parent.mkdir(exist_ok=True)
        text = header_text(Applies_To="vllm 0.8.5.post1", **header)
        patch.write_bytes(text.encode() + b"---\n" + diff)
        self._entries.append(path)
        (self.directory / "series").write_text("".join(f"{entry}\n" for entry in self._entries))


@pytest.fixture
def maker(source: Path, tmp_path: Path) -> Maker:
    maker = Maker(source, tmp_path / "queue")
    maker.add("build/0001-archs.patch", LIST, b'ARCHS "7.0;', b'ARCHS "6.1;7.0;')
    maker.add("p40/0101-worker.patch", WORKER, b"import gc\n", b"import gc\n\nHOW = 1\n")
    return maker


@pytest.fixture
def queue(maker: Maker) -> Queue:
    return load_queue(maker.directory)


@pytest.fixture
def installed(source: Path, tmp_path: Path) -> Path:
    """What a wheel of the released sources installs: the package, with what the build wrote."""
    site = tmp_path / "site-packages"
    shutil.copytree(source / "vllm", site / "vllm")
    (site / LEFT_OUT).unlink()  # no package data: setuptools leaves it out
    (site / VERSION).write_text("__version__ = version = '0.8.5.post1+cu118.sm61'\n")
    (site / "vllm" / "_C.abi3.so").write_bytes(b"\x7fELF")
    return site


def test_an_sdist_is_unpacked_without_its_folder_and_without_what_no_build_reads(
    sdist: Path,
) -> None:
    names = {path.name for path in sdist.iterdir()}
    assert names == set(VLLM.roots)
    assert (sdist / "csrc" / "moe" / "moe_wna16.cu").is_file()
    assert not list(sdist.rglob("*.pyc"))


def test_a_source_tree_takes_every_patch(source: Path, queue: Queue) -> None:
    (source / "tests").mkdir()
    (source / "tests" / "mine.py").write_text("")  # no root of the release: left alone
    assert tree_state(source, queue).kind == "pristine"
    report = apply_queue(source, queue)
    assert report.files == (LIST, WORKER)
    assert b"6.1;7.0" in (source / LIST).read_bytes()
    state = tree_state(source, queue)
    assert (state.kind, state.digest) == ("patched", queue.digest)
    assert len(state.patches) == 2
    assert (source / "tests" / "mine.py").is_file()
    assert not apply_queue(source, queue).changed
    assert sorted(path.name for path in source.parent.iterdir() if "p40" in path.name) == []


def test_a_changed_file_beside_the_package_is_no_release(source: Path, queue: Queue) -> None:
    with (source / SETUP).open("a") as file:
        file.write("# mine\n")
    with pytest.raises(TreeError, match=r"setup\.py \(changed\)"):
        apply_queue(source, queue)


def test_revert_gives_the_source_back(source: Path, queue: Queue) -> None:
    before = manifest_of(source, *VLLM.roots)
    apply_queue(source, queue)
    assert revert(source, "vllm").changed
    assert manifest_of(source, *VLLM.roots) == before
    assert not (source / "vllm" / MARKER).exists()


def test_an_installed_package_takes_what_is_inside_it(installed: Path, queue: Queue) -> None:
    assert tree_state(installed, queue).kind == "pristine"
    report = apply_queue(installed, queue)
    assert report.patches == ("p40/0101-worker.patch",)
    assert report.digest == queue.digest
    assert b"HOW = 1" in (installed / WORKER).read_bytes()
    assert [path.name for path in installed.iterdir()] == ["vllm"]
    assert tree_state(installed, queue).kind == "patched"
    revert(installed, "vllm")
    assert tree_state(installed, queue).kind == "pristine"
    assert (installed / "vllm" / "_C.abi3.so").is_file()


def test_the_build_group_cannot_be_chosen_for_an_installed_package(
    installed: Path, queue: Queue
) -> None:
    with pytest.raises(UsageError, match="no group 'build'"):
        apply_queue(installed, queue, groups=["build"])


def test_a_wheel_of_a_patched_tree_knows_its_patches(
    source: Path, queue: Queue, tmp_path: Path
) -> None:
    """It carries the marker of the source tree, which also speaks of files it does not have."""
    apply_queue(source, queue)
    site = tmp_path / "site"
    shutil.copytree(source / "vllm", site / "vllm")
    (site / "vllm" / "_C.abi3.so").write_bytes(b"\x7fELF")
    marker = read_marker(site / "vllm")
    assert marker is not None and LIST in marker.files and (site / "vllm" / PRISTINE).is_file()
    state = tree_state(site, queue)
    assert (state.kind, state.digest) == ("patched", queue.digest)
    assert state.patches == ("p40/0101-worker.patch",)
    assert not apply_queue(site, queue).changed
    revert(site, "vllm")
    assert tree_state(site, queue).kind == "pristine"
    assert (site / WORKER).read_bytes().count(b"HOW = 1") == 0


def test_the_version_of_another_release_is_named(installed: Path, queue: Queue) -> None:
    (installed / WORKER).write_text("# another release\n")
    with pytest.raises(TreeError, match=r"it is vllm 0\.8\.5\.post1\+cu118\.sm61"):
        apply_queue(installed, queue)


def test_status_against_an_installed_release_leaves_the_build_out(
    installed: Path, queue: Queue
) -> None:
    report = status_against(queue, installed, "site-packages")
    assert [fit.patch.path for fit in report.fits] == ["p40/0101-worker.patch"]
    assert report.clean and not report.changed


def test_a_patch_is_on_one_side_of_the_line(maker: Maker) -> None:
    maker.add("build/0002-inside.patch", WORKER, b"import os\n", b"import os\n# x\n")
    maker.add("p40/0102-outside.patch", SETUP, b"import ctypes\n", b"import ctypes\n# x\n")
    maker.add("p40/0103-needs.patch", WORKER, b"HOW = 1", b"HOW = 2", Depends="archs")
    found = [str(finding) for finding in lint_queue(maker.directory, version="0.8.5.post1")]
    for words in (
        f"build/0002-inside.patch: {WORKER} is inside vllm/",
        f"p40/0102-outside.patch: {SETUP} is outside vllm/",
        "p40/0103-needs.patch: Depends names 'archs', which an installed vllm does not have",
    ):
        assert any(line.startswith(words) for line in found), words


def test_what_is_no_root_cannot_be_patched(source: Path, tmp_path: Path) -> None:
    (source / "examples").mkdir()
    (source / "examples" / "x.py").write_text("a\n")
    maker = Maker(source, tmp_path / "other")
    maker.add("build/0001-x.patch", "examples/x.py", b"a\n", b"b\n")
    with pytest.raises(TreeError, match=r"outside vllm/, CMakeLists\.txt"):
        load_queue(maker.directory)


def test_git_and_back_change_no_byte(source: Path, maker: Maker, tmp_path: Path) -> None:
    def content() -> dict[str, bytes]:
        files = (path for path in maker.directory.rglob("*") if path.is_file())
        return {path.relative_to(maker.directory).as_posix(): path.read_bytes() for path in files}

    assert unpack_queue(load_queue(maker.directory), source, tmp_path / "first") == 2
    refresh_queue(maker.directory, tmp_path / "first")  # drops git's own lines of the diff
    before = content()
    assert {"upstream.sha256", "build/0001-archs.patch"} < set(before)
    unpack_queue(load_queue(maker.directory), source, tmp_path / "second")
    assert not refresh_queue(maker.directory, tmp_path / "second").changed
    assert content() == before


def test_the_pinned_release_patched_in_a_new_folder(tmp_path: Path, sdist: Path) -> None:
    """The real queue on the real sdist, and `verify` has nothing to say about it."""
    directory = REPOSITORY / "patches" / "vllm"
    queue = load_queue(directory)
    report = patched_release(queue, tmp_path / "source")
    assert report.tree == tmp_path / "source" and len(report.patches) == len(queue.patches)
    assert tree_state(tmp_path / "source", queue).kind == "patched"
    with pytest.raises(UsageError, match="not an empty folder"):
        patched_release(queue, tmp_path / "source")
    assert verify_queue(directory, sdist, version=queue.version).findings == []


def test_a_damaged_sdist_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "vllm-0.8.5.post1.tar.gz"
    broken.write_bytes(b"\x1f\x8b\x08 torn")
    with pytest.raises(TreeError, match="not an sdist"):
        unpack_file(broken, tmp_path / "a", "vllm")
    (tmp_path / "x").write_text("")
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "x", "other-1/setup.py")
    with pytest.raises(TreeError, match="no folder vllm in it"):
        unpack_file(tmp_path / "other.tar.gz", tmp_path / "b", "vllm")
