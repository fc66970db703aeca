"""Applying to trees: what changes, what does not, what is refused."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patchkit import (
    DEVICE,
    GSM8K,
    NEW,
    REPOSITORY,
    TRACKING,
    QueueMaker,
    contents,
    entries,
    substitute,
)

from verl_p40.errors import BusyError, DiskError, TreeError, UsageError
from verl_p40.patches.marker import MARKER, PRISTINE
from verl_p40.patches.queue import load_queue
from verl_p40.patches.swap import exclusive, next_folder
from verl_p40.patches.tree import apply_queue, revert, tree_state


def test_the_real_queue_gives_what_git_apply_gives(release: Path, tmp_path: Path) -> None:
    queue = load_queue(REPOSITORY / "patches" / "verl")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    shutil.copytree(release / "verl", ours / "verl")
    shutil.copytree(release / "verl", theirs / "verl")
    for patch in queue.patches:
        file = tmp_path / "one.patch"
        file.write_bytes(patch.data)
        subprocess.run(
            ["git", "apply", "--whitespace=nowarn", str(file)], cwd=theirs, check=True,
            env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)},
        )  # fmt: skip
    report = apply_queue(ours, queue)
    assert report.changed
    assert report.shifted == ()
    assert contents(ours) == contents(theirs)
    assert len(report.patches) == len(queue.patches) > 0
    state = tree_state(ours, queue)
    assert (state.kind, state.digest, state.patches) == ("patched", queue.digest, report.patches)


def stamps(tree: Path) -> dict[Path, tuple[int, int, int]]:
    """What a write to a file or its folder would change; reading changes none of it."""
    stats = {path: path.stat() for path in [tree, *tree.rglob("*")]}
    return {path: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for path, s in stats.items()}


def test_applying_twice_touches_nothing(small: Path, maker: QueueMaker) -> None:
    queue = maker.load()
    assert apply_queue(small, queue).changed
    assert contents(small) == contents(maker.result)
    before = stamps(small)
    report = apply_queue(small, queue)
    assert not report.changed
    assert report.files == tuple(
        sorted([DEVICE, GSM8K, NEW, TRACKING, NEW.replace("new", "empty")])
    )
    assert stamps(small) == before


def test_the_marker_says_what_was_done(small: Path, maker: QueueMaker) -> None:
    queue = maker.load()
    apply_queue(small, queue)
    marker = json.loads((small / "verl" / MARKER).read_text())
    assert marker["project"] == "verl"
    assert marker["version"] == "0.4.1"
    assert marker["digest"] == queue.digest
    assert marker["patches"] == [patch.path for patch in queue.patches]
    assert set(marker["files"]) == {patch for item in queue.patches for patch in item.touches}
    assert marker["files"][GSM8K]["before"] == queue.manifest[GSM8K]
    assert marker["files"][NEW]["before"] is None
    assert marker["files"][DEVICE] == {"before": queue.manifest[DEVICE], "after": None}


def test_the_cache_behind_hard_links_stays_as_it_is(
    small: Path, maker: QueueMaker, tmp_path: Path
) -> None:
    installed = tmp_path / "installed"
    shutil.copytree(small, installed, copy_function=os.link)
    original = contents(small)
    apply_queue(installed, maker.load())
    assert contents(small) == original
    inodes = {path.stat().st_ino for path in small.rglob("*") if path.is_file()}
    assert not inodes.intersection(path.stat().st_ino for path in installed.rglob("*"))


def test_a_tree_that_is_not_the_release_is_refused_with_every_file_named(
    small: Path, maker: QueueMaker
) -> None:
    (small / GSM8K).write_bytes((small / GSM8K).read_bytes() + b"# mine\n")
    (small / TRACKING).unlink()
    (small / "verl" / "utils" / "mine.py").write_text("")
    (small / "verl" / "utils" / "fast.so").write_bytes(b"")
    before = contents(small)
    with pytest.raises(TreeError) as caught:
        apply_queue(small, maker.load())
    for words in (f"{GSM8K} (changed)", f"{TRACKING} (missing)", "utils/mine.py (unknown)"):
        assert words in caught.value.message
    assert "fast.so (unknown)" in caught.value.message
    assert "verl==0.4.1" in caught.value.fix
    assert contents(small) == before
    assert entries(small) == ["verl"]
    state = tree_state(small, maker.load())
    assert (state.kind, state.repairable, len(state.files)) == ("foreign", False, 4)


def test_another_version_is_named(small: Path, maker: QueueMaker) -> None:
    (small / "verl" / "version" / "version").write_text("0.5.0\n")
    with pytest.raises(TreeError, match=r"it is verl 0\.5\.0"):
        apply_queue(small, maker.load())


def test_bytecode_and_data_do_not_count_and_data_stays(small: Path, maker: QueueMaker) -> None:
    data = small / "verl" / "utils" / "notes.yaml"
    data.write_text("a: 1\n")
    (small / "verl" / "utils" / "old.pyc").write_bytes(b"")
    apply_queue(small, maker.load())
    assert data.read_text() == "a: 1\n"
    revert(small)
    assert data.read_text() == "a: 1\n"


def test_bytecode_of_changed_files_goes_and_the_rest_stays(small: Path, maker: QueueMaker) -> None:
    changed = Path(py_compile.compile(str(small / GSM8K), doraise=True) or "")
    kept = Path(py_compile.compile(str(small / "verl" / "utils" / "__init__.py")) or "")
    apply_queue(small, maker.load())
    assert not changed.exists()
    assert kept.exists()
    again = Path(py_compile.compile(str(small / GSM8K), doraise=True) or "")
    revert(small)
    assert not again.exists()
    assert kept.exists()


def test_revert_gives_the_release_back_offline(small: Path, maker: QueueMaker) -> None:
    released = contents(small)
    apply_queue(small, maker.load())
    shutil.rmtree(maker.directory)
    report = revert(small)
    assert report.changed
    assert contents(small) == released
    assert not (small / "verl" / "utils" / "added").exists()  # no namespace package left
    assert not [path for path in (small / "verl").iterdir() if path.name.startswith(".")]
    assert not revert(small).changed


def test_revert_does_not_throw_edits_away(small: Path, maker: QueueMaker) -> None:
    apply_queue(small, maker.load())
    (small / GSM8K).write_text("# mine\n")
    with pytest.raises(TreeError, match=r"edited since.*gsm8k\.py"):
        revert(small)
    assert (small / GSM8K).read_text() == "# mine\n"


def test_a_newer_queue_replaces_the_older_one(
    small: Path, maker: QueueMaker, tmp_path: Path
) -> None:
    fresh = tmp_path / "fresh"
    shutil.copytree(small, fresh)
    apply_queue(small, maker.load())
    other = QueueMaker(fresh, tmp_path / "other")
    other.add("fix/0001-else.patch", {GSM8K: substitute(b"import re\n", b"import re as re\n")})
    assert apply_queue(small, other.load()).changed
    apply_queue(fresh, other.load())
    assert contents(small) == contents(fresh) == contents(other.result)
    assert (small / "verl" / PRISTINE).read_bytes() == (fresh / "verl" / PRISTINE).read_bytes()
    assert (small / "verl" / MARKER).read_bytes() == (fresh / "verl" / MARKER).read_bytes()


def test_groups_and_leaving_out(small: Path, maker: QueueMaker) -> None:
    queue = maker.load()
    released = contents(small)
    report = apply_queue(small, queue, groups=["fix"])
    assert [path[:3] for path in report.patches] == ["fix", "fix"]
    assert b"# no newline" not in (small / GSM8K).read_bytes()
    report = apply_queue(small, queue, without=["score"])
    assert report.left_out == ("fix/0001-score.patch",)
    assert report.shifted == (f"{GSM8K}: hunk 1 -2 lines off",)
    assert (small / GSM8K).read_bytes() == released[GSM8K] + b"# no newline"
    report = apply_queue(small, queue, without=["0002-new-file"])
    assert report.left_out == ("fix/0002-new-file.patch", "p40/0202-less.patch")
    assert contents(small)[DEVICE] == released[DEVICE]
    assert tree_state(small, queue).patches == report.patches
    report = apply_queue(small, queue, without=["score", "new-file", "more-score"])
    assert report.changed
    assert contents(small) == released
    assert tree_state(small, queue).kind == "pristine"


def test_wrong_choices(small: Path, maker: QueueMaker) -> None:
    queue = maker.load()
    with pytest.raises(UsageError, match="no group 'vllm'") as caught:
        apply_queue(small, queue, groups=["vllm"])
    assert "fix, p40" in caught.value.fix
    with pytest.raises(UsageError, match="no patch is called 'scores'"):
        apply_queue(small, queue, without=["scores"])
    with pytest.raises(UsageError, match="depends on new-file, which is not selected"):
        apply_queue(small, queue, groups=["p40"])


def test_a_queue_that_does_not_fit_changes_nothing(small: Path, maker: QueueMaker) -> None:
    patch = maker.directory / "p40" / "0201-more-score.patch"
    patch.write_bytes(patch.read_bytes().replace(b"@@ -", b"@@ -1", 1))
    before = contents(small)
    with pytest.raises(TreeError, match=r"0201-more-score\.patch does not fit: .*lines off"):
        apply_queue(small, maker.load())
    assert contents(small) == before
    assert entries(small) == ["verl"]


def test_reinstalled_over_a_patched_tree(small: Path, maker: QueueMaker, tmp_path: Path) -> None:
    released = tmp_path / "released"
    shutil.copytree(small, released)
    queue = maker.load()
    apply_queue(small, queue)
    # pip replaces the files it knows; what a patch added, and our marker, stay behind
    shutil.copytree(released, small, dirs_exist_ok=True)
    state = tree_state(small, queue)
    assert (state.kind, state.repairable) == ("foreign", True)
    assert apply_queue(small, queue).changed
    assert contents(small) == contents(maker.result)
    shutil.copytree(released, small, dirs_exist_ok=True)
    revert(small)
    assert contents(small) == contents(released)


def test_damaged_pristine_copies_are_named(small: Path, maker: QueueMaker) -> None:
    queue = maker.load()
    apply_queue(small, queue)
    (small / "verl" / PRISTINE).write_bytes(b"PK\x03\x04 torn")
    with pytest.raises(TreeError, match=r"verl-p40-pristine\.zip: the pristine copies") as caught:
        apply_queue(small, queue, groups=["fix"])
    assert "reinstall verl" in caught.value.fix
    assert contents(small) == contents(maker.result)


def test_no_package_and_a_link_are_refused(small: Path, maker: QueueMaker, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert tree_state(empty, maker.load()).kind == "missing"
    for call in (lambda: apply_queue(empty, maker.load()), lambda: revert(empty)):
        with pytest.raises(TreeError, match="no folder verl in it"):
            call()
    (empty / "verl").symlink_to(small / "verl")
    for call in (lambda: apply_queue(empty, maker.load()), lambda: revert(empty)):
        with pytest.raises(TreeError, match="is a symbolic link"):
            call()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB, where this process may mount one."""
    folder = tmp_path / "full"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(command, check=False).returncode:
        pytest.skip("may not mount a small file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_the_old_tree(full_disk: Path, small: Path, maker: QueueMaker) -> None:
    shutil.copytree(small, full_disk / "tree")
    free = shutil.disk_usage(full_disk).free
    (full_disk / "filler").write_bytes(b"x" * max(free - (8 << 10), 0))
    before = contents(full_disk / "tree")
    with pytest.raises(DiskError, match="no space left"):
        apply_queue(full_disk / "tree", maker.load())
    assert contents(full_disk / "tree") == before
    assert entries(full_disk / "tree") == ["verl"]


def test_one_at_a_time(small: Path, maker: QueueMaker) -> None:
    script = (
        "import sys, pathlib; from verl_p40.patches.swap import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(small / "verl")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(BusyError, match="another verl-p40 process"):
        apply_queue(small, maker.load())
    holder.kill()  # a crash releases the lock
    holder.wait()
    assert apply_queue(small, maker.load()).changed


def test_an_error_while_writing_leaves_nothing_behind(small: Path) -> None:
    with pytest.raises(RuntimeError), exclusive(small / "verl"):
        next_folder(small / "verl").mkdir()
        raise RuntimeError
    assert entries(small) == ["verl"]
