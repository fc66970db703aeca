"""What may be given as PATH, and what is said about the rest."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from verl_p40.audit.trees import open_trees
from verl_p40.errors import TreeError, UsageError


def _package(folder: Path, name: str = "verl") -> Path:
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("X = 'bf16'\n")
    (package / "notes.txt").write_text("bf16")
    return package


def test_site_packages_with_both(tmp_path: Path) -> None:
    _package(tmp_path)
    _package(tmp_path, "vllm")
    (tmp_path / "vllm-0.8.5.post1.dist-info").mkdir()
    trees = open_trees(tmp_path)
    assert [(t.package, t.version) for t in trees] == [("verl", "unknown"), ("vllm", "0.8.5.post1")]
    assert list(trees[0]) == ["verl/__init__.py"]


def test_virtual_environment(tmp_path: Path) -> None:
    package = _package(tmp_path / "env" / "lib" / "python3.10" / "site-packages")
    assert open_trees(tmp_path / "env")[0].origin == str(package)


def test_version_from_the_tree_wins(tmp_path: Path) -> None:
    package = _package(tmp_path)
    (package / "version").mkdir()
    (package / "version" / "version").write_text("0.4.1\n")
    (tmp_path / "verl-9.9.dist-info").mkdir()
    assert open_trees(package)[0].version == "0.4.1"


def test_archives(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm-0.8.5-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "X = 'bf16'\n")
        archive.writestr("vllm-0.8.5.dist-info/METADATA", "Version: 0.8.5\n")
    assert [(t.package, t.version, list(t)) for t in open_trees(wheel)] == [
        ("vllm", "0.8.5", ["vllm/__init__.py"])
    ]
    sdist = tmp_path / "verl-0.4.1.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name, text in {
            "verl-0.4.1/verl/__init__.py": b"A = 1\n",
            "verl-0.4.1/verl/version/version": b"0.4.1",
            "verl-0.4.1/tests/verl/__init__.py": b"",
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    tree = open_trees(sdist)[0]
    assert (tree.version, list(tree)) == ("0.4.1", ["verl/__init__.py"])
    assert tree.read("verl/__init__.py") == b"A = 1\n"


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("missing", None, UsageError),
        ("empty.whl", b"", TreeError),
        ("broken.tar.gz", b"not an archive", TreeError),
        ("cut.whl", b"PK\x03\x04" + b"\0" * 30, TreeError),
        ("file.md", b"text", UsageError),
    ],
)
def test_bad_paths(tmp_path: Path, name: str, content: bytes | None, error: type) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error) as caught:
        open_trees(path)
    assert name in caught.value.message
    assert caught.value.fix


def test_folder_and_archive_without_the_packages(tmp_path: Path) -> None:
    with pytest.raises(TreeError, match="no verl or vllm package"):
        open_trees(tmp_path)
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(TreeError, match="no verl or vllm package"):
        open_trees(other)
