"""``verify`` on the real release, and ``status`` on releases that went on."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
from patchkit import DEVICE, GSM8K, NEW, REPOSITORY, TRACKING, QueueMaker, substitute

from verl_p40.errors import TreeError, UsageError
from verl_p40.patches.hunks import Fit
from verl_p40.patches.queue import load_queue
from verl_p40.patches.release import obtain, unpack_wheel
from verl_p40.patches.tree import apply_queue
from verl_p40.patches.verify import status_against, verify_queue


def test_the_real_queue_on_the_pinned_release(release: Path) -> None:
    report = verify_queue(REPOSITORY / "patches" / "verl", release, version="0.4.1")
    assert [str(finding) for finding in report.findings] == []
    assert report.files == 259
    assert report.compiled >= 253
    assert report.parsed == 5
    assert report.proofs_checked


def found(maker: QueueMaker, tree: Path) -> list[str]:
    return [str(item) for item in verify_queue(maker.directory, tree, version="0.4.1").findings]


def test_a_queue_is_clean_and_each_kind_of_trouble_is_named(maker: QueueMaker, small: Path) -> None:
    assert found(maker, small) == []
    bad = {NEW: b"def broken(:\n", "verl/new.yaml": b"a: [1\n"}
    maker.add("p40/0203-bad.patch", bad, Depends="new-file")
    texts = found(maker, small)
    assert len(texts) == 2
    assert texts[0].startswith("verl/new.yaml: is not YAML")
    assert texts[1].startswith(f"{NEW}: does not compile: ")
    (small / GSM8K).write_bytes(b"import re\n")
    (small / "verl" / "extra.py").write_bytes(b"")
    (small / TRACKING).unlink()
    texts = found(maker, small)
    assert f"{GSM8K}: differs from the manifest" in texts
    assert "verl/extra.py: in the release, but not in the manifest" in texts
    assert f"{TRACKING}: in the manifest, but not in the release" in texts
    assert f"p40/0202-less.patch: {TRACKING}: no such file" in texts


def test_a_patch_that_cannot_be_left_out_is_named(maker: QueueMaker, small: Path) -> None:
    """It changes a line that an earlier one has added, and its header does not say so."""
    change = {GSM8K: substitute(b"HOW = 1\n", b"HOW = 2\n")}
    maker.add("p40/0203-how.patch", change)
    (text,) = found(maker, small)
    assert text.startswith("fix/0001-score.patch: left out, p40/0203-how.patch does not fit: ")
    assert text.endswith("does that one need 'Depends: score'?")
    patch = maker.directory / "p40" / "0203-how.patch"
    patch.write_bytes(patch.read_bytes().replace(b"---\n", b"Depends: score\n---\n", 1))
    assert found(maker, small) == []


def test_an_offset_is_a_finding(maker: QueueMaker, small: Path) -> None:
    patch = maker.directory / "fix" / "0001-score.patch"
    data = patch.read_bytes()
    start = data.index(b"@@ -") + 4
    number = int(data[start : data.index(b",", start)])
    patch.write_bytes(data.replace(b"@@ -%d," % number, b"@@ -%d," % (number + 1)))
    texts = found(maker, small)
    assert texts == [f"fix/0001-score.patch: {GSM8K}: hunk 1 -1 lines off"]


def test_a_queue_that_cannot_be_loaded_is_reported_not_raised(
    maker: QueueMaker, small: Path
) -> None:
    (maker.directory / "fix" / "0001-score.patch").unlink()
    (text,) = found(maker, small)
    assert "0001-score.patch: listed in series, but No such file" in text


def test_status_on_a_release_that_went_on(maker: QueueMaker, small: Path, tmp_path: Path) -> None:
    queue = maker.load()
    fits = status_against(queue, small, "same")
    assert [fit.fit for fit in fits.fits] == [Fit.EXACT] * 4
    assert fits.clean
    assert fits.changed == ()

    later = tmp_path / "later"
    shutil.copytree(small, later)
    score = later / GSM8K
    score.write_bytes(b"# moved\n" + score.read_bytes())
    (later / NEW).parent.mkdir()
    (later / NEW).write_bytes(b"VALUE = 1\n")
    (later / DEVICE).write_bytes(b"other\n")
    report = status_against(queue, later, "later")
    assert [fit.fit for fit in report.fits] == [
        Fit.OFFSET, Fit.PARTLY, Fit.OFFSET, Fit.CONFLICT,
    ]  # fmt: skip
    assert not report.clean
    assert report.fits[0].details == (f"{GSM8K}: hunk 1 +1 lines off",)
    assert report.fits[1].details == (f"{NEW}: already there",)
    assert report.fits[3].details == (f"{DEVICE}: differs from what is deleted",)
    assert report.changed == (NEW, DEVICE, GSM8K)


def test_status_reads_a_patched_tree_as_released(maker: QueueMaker, small: Path) -> None:
    queue = maker.load()
    apply_queue(small, queue)
    report = status_against(queue, small, "patched")
    assert {fit.fit for fit in report.fits} == {Fit.EXACT}
    assert report.changed == ()


def test_what_is_upstream_already(maker: QueueMaker, small: Path) -> None:
    queue = maker.load()
    score = small / GSM8K
    score.write_bytes(substitute(b"import re\n", b"import re\n\nHOW = 1\n")(score.read_bytes()))
    report = status_against(queue, small, "next")
    assert [fit.fit for fit in report.fits][:1] == [Fit.UPSTREAM]
    assert report.fits[0].details == (f"{GSM8K}: hunk 1 already there",)
    assert report.clean


def test_against_takes_a_tree_a_wheel_or_a_version(small: Path, tmp_path: Path) -> None:
    assert obtain(str(small), "verl", tmp_path / "a") == (small, str(small))
    wheel = tmp_path / "verl-9.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("verl/__init__.py", "x = 1\n")
        archive.writestr("verl/../../escaped.py", "x = 1\n")
        archive.writestr("other/__init__.py", "x = 1\n")
    tree, label = obtain(str(wheel), "verl", tmp_path / "b")
    assert label == "verl-9.whl"
    assert [path.relative_to(tree).as_posix() for path in tree.rglob("*.py")] == [
        "verl/__init__.py"
    ]
    assert not list(tmp_path.rglob("escaped.py"))
    with pytest.raises(UsageError, match="neither a folder, nor a wheel, nor a version"):
        obtain("no/such/thing", "verl", tmp_path / "c")
    with pytest.raises(TreeError, match="no folder verl in it"):
        obtain(str(tmp_path), "verl", tmp_path / "c")
    with pytest.raises(TreeError, match="no folder torch in it"):
        unpack_wheel(wheel, tmp_path / "d", "torch")
    wheel.write_bytes(b"PK torn")
    with pytest.raises(TreeError, match="not a wheel"):
        obtain(str(wheel), "verl", tmp_path / "e")


def test_the_queue_is_loaded_with_its_release() -> None:
    queue = load_queue()
    assert (queue.project, queue.version) == ("verl", "0.4.1")
    assert queue.groups[0] == "fix"
