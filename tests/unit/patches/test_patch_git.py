"""unpack, edit with git, refresh: the way a pin is bumped."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from patchkit import DEVICE, GSM8K, REPOSITORY, TRACKING, QueueMaker, entries, substitute

from verl_p40.errors import TreeError, UsageError
from verl_p40.patches.gittree import unpack_queue
from verl_p40.patches.queue import load_queue
from verl_p40.patches.refresh import refresh_queue
from verl_p40.patches.verify import verify_queue

HOSTILE = """[user]
name = someone
email = someone@example.org
[diff]
noprefix = true
mnemonicPrefix = true
algorithm = patience
context = 1
renames = copies
suppressBlankEmpty = true
[core]
autocrlf = true
[commit]
gpgsign = true
[color]
ui = always
"""


@pytest.fixture(autouse=True)
def user_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose git is set up to break everything that relies on defaults."""
    (tmp_path / "gitconfig").write_text(HOSTILE)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))


def git(folder: Path, *args: str) -> str:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_EDITOR": "true"}
    env.pop("GIT_DIR", None)
    identity = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    done = subprocess.run(
        ["git", *identity, "-C", str(folder), *args], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def files(queue: Path) -> dict[str, bytes]:
    return {
        p.relative_to(queue).as_posix(): p.read_bytes() for p in queue.rglob("*") if p.is_file()
    }


@pytest.fixture
def queue(maker: QueueMaker, small: Path, tmp_path: Path) -> Path:
    """The test queue as refresh writes it: its first export normalises git's own lines."""
    unpack_queue(maker.load(), small, tmp_path / "first")
    refresh_queue(maker.directory, tmp_path / "first")
    return maker.directory


def test_the_real_queue_goes_round_byte_for_byte(release: Path, tmp_path: Path) -> None:
    original = REPOSITORY / "patches" / "verl"
    shutil.copytree(original, tmp_path / "verl")
    loaded = load_queue(original)
    assert unpack_queue(loaded, release, tmp_path / "work") == len(loaded.patches)
    report = refresh_queue(tmp_path / "verl", tmp_path / "work")
    assert (report.added, report.changed, report.removed) == ((), (), ())
    assert files(tmp_path / "verl") == files(original)
    subjects = git(tmp_path / "work", "log", "--reverse", "--format=%s").splitlines()
    assert subjects[0] == "verl 0.4.1"
    # git folds a message without an empty line into one subject: the summary starts it
    assert subjects[1].startswith(f"Description: {loaded.patches[0].header.summary}")


def test_round_trip_with_empty_new_and_deleted_files(
    queue: Path, small: Path, tmp_path: Path
) -> None:
    before = files(queue)
    assert verify_queue(queue, small, version="0.4.1").findings == []
    unpack_queue(load_queue(queue), small, tmp_path / "again")
    report = refresh_queue(queue, tmp_path / "again")
    assert (report.added, report.changed, report.removed) == ((), (), ())
    assert files(queue) == before
    assert entries(queue.parent) == ["verl"]
    assert not any(
        line.startswith(b"index ") for line in before["fix/0001-score.patch"].split(b"\n")
    )


def test_unpacking_is_reproducible(queue: Path, small: Path, tmp_path: Path) -> None:
    heads = set()
    for name in ("one", "two"):
        unpack_queue(load_queue(queue), small, tmp_path / name)
        heads.add(git(tmp_path / name, "rev-parse", "HEAD"))
    assert len(heads) == 1


def test_a_new_patch_in_the_middle_renumbers_its_group(
    queue: Path, small: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    (queue / "series").write_text("# all of it\n\n" + (queue / "series").read_text())
    before = files(queue)
    unpack_queue(load_queue(queue), small, work)
    tip = git(work, "rev-parse", "main")
    git(work, "checkout", "--quiet", "main~1")  # before p40/0202
    file = work / TRACKING
    file.write_bytes(file.read_bytes().replace(b"import", b"import  ", 1))
    git(work, "commit", "--all", "--message", "p40: Two blanks, really\n\nA body\n\nof two.")
    git(work, "cherry-pick", tip)
    report = refresh_queue(queue, work)
    assert report.added == ("p40/0202-two-blanks-really.patch", "p40/0203-less.patch")
    assert report.removed == ("p40/0202-less.patch",)
    text = (queue / "p40" / "0202-two-blanks-really.patch").read_text()
    assert text.startswith("Description: Two blanks, really\n A body\n .\n of two.\n---\n")
    series = (queue / "series").read_text()
    assert series == (
        "# all of it\n\nfix/0001-score.patch\nfix/0002-new-file.patch\n\n"
        "p40/0201-more-score.patch\np40/0202-two-blanks-really.patch\np40/0203-less.patch\n"
    )
    assert before["p40/0202-less.patch"] == (queue / "p40" / "0203-less.patch").read_bytes()
    findings = [item.what for item in verify_queue(queue, small, version="0.4.1").findings]
    assert "header has no Proved-By" in findings  # what a person still has to write
    assert not [what for what in findings if "does not apply" in what or "lines off" in what]


def test_rebase_onto_another_release(queue: Path, small: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    shutil.copytree(small, later)
    score = later / GSM8K
    score.write_bytes(b"# later\n" + score.read_bytes())
    (later / "verl" / "version" / "version").write_text("0.5.0\n")
    work = tmp_path / "work"
    unpack_queue(load_queue(queue), small, work, onto=later, onto_label="verl 0.5.0")
    git(work, "rebase", "--quiet", "--onto", "upstream-next", "upstream", "main")
    report = refresh_queue(queue, work)
    assert report.base.endswith("verl 0.5.0")
    assert report.changed == ("fix/0001-score.patch", "p40/0201-more-score.patch")
    findings = verify_queue(queue, later, version="0.4.1").findings
    assert [str(item) for item in findings] == []  # manifest and hunks follow the new release


def test_what_refresh_refuses_leaves_the_queue_alone(
    queue: Path, small: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    unpack_queue(load_queue(queue), small, work)
    before = files(queue)

    def refused(words: str) -> None:
        with pytest.raises((UsageError, TreeError), match=words):
            refresh_queue(queue, work)
        assert files(queue) == before
        assert entries(queue.parent) == ["verl"]

    (work / "notes").write_text("x")
    refused("uncommitted changes")
    git(work, "add", ".")
    git(work, "commit", "--quiet", "--message", "Patch-Name: p40/notes")
    refused("outside verl/|not a path below")
    git(work, "reset", "--quiet", "--hard", "HEAD~1")
    (work / GSM8K).write_text("x = 1\n")
    git(work, "commit", "--quiet", "--all", "--message", "Some words")
    refused("does not say its file name")
    git(
        work,
        "commit",
        "--quiet",
        "--amend",
        "--message",
        "x\n\nPatch-Name: p40/0201-more-score.patch",
    )
    refused("is called more-score as one before it")
    git(work, "commit", "--quiet", "--amend", "--message", "x\n\nPatch-Name: ../../x")
    refused("does not say its file name")
    git(work, "reset", "--quiet", "--hard", "HEAD~1")
    git(work, "commit", "--quiet", "--allow-empty", "--message", "p40: nothing")
    refused("changes nothing")
    git(work, "reset", "--quiet", "--hard", "upstream")
    refused("no commit after the release")
    with pytest.raises(UsageError, match="not a git work tree"):
        refresh_queue(queue, tmp_path)


def test_pulled_apart_groups_are_refused(queue: Path, small: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    unpack_queue(load_queue(queue), small, work)
    (work / TRACKING).write_text("x = 1\n")
    git(work, "commit", "--quiet", "--all", "--message", "fix: one more")
    with pytest.raises(UsageError, match="stands apart from its group fix"):
        refresh_queue(queue, work)


def test_unpack_wants_an_empty_folder_and_cleans_up(
    queue: Path, small: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").write_text("x")
    with pytest.raises(UsageError, match="not an empty folder"):
        unpack_queue(load_queue(queue), small, target)
    (target / "mine").unlink()
    (small / GSM8K).write_bytes(
        substitute(b"import re\n", b"import os\n")((small / GSM8K).read_bytes())
    )
    before = entries(tmp_path)
    with pytest.raises(TreeError, match=r"0001-score\.patch does not fit"):
        unpack_queue(load_queue(queue), small, target)
    assert entries(tmp_path) == before
    assert entries(target) == []


def test_the_first_commit_is_the_base_where_no_tag_says_so(
    queue: Path, small: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    unpack_queue(load_queue(queue), small, work)
    before = files(queue)
    git(work, "tag", "-d", "upstream")
    assert len(refresh_queue(queue, work).patches) == 4
    assert files(queue) == before
    with pytest.raises(UsageError, match="no commit is called 'nowhere'"):
        refresh_queue(queue, work, "nowhere")
    assert (work / DEVICE).exists() is False
