"""What can be known about the locks without a network. `nox -s lock -- --check` resolves again."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from verl_p40.errors import TreeError
from verl_p40.stack import fetch, lockfile, locking, paths, pins

LOCKS = paths.locks_dir()
NAMES = sorted(path.name for path in LOCKS.glob("*.txt"))


def test_there_is_a_lock_for_each_recipe_and_no_other() -> None:
    assert sorted(recipe.name for recipe in locking.recipes(pins.load())) == NAMES


def test_the_locks_say_what_the_pins_say() -> None:
    assert locking.offline_problems(pins.load(), LOCKS) == []


@pytest.mark.parametrize("name", NAMES)
def test_no_address_and_a_hash_on_every_line(name: str) -> None:
    lines = lockfile.parse(LOCKS / name)
    assert lines
    assert "://" not in (LOCKS / name).read_text()
    assert all(line.hashes for line in lines)


def test_the_cuda_118_stack_differs_in_nothing_else() -> None:
    """Same Python packages in the image and on the CPU: what is proved here holds there."""
    env = fetch.marker_environment("3.10")
    cpu, cuda = (
        {x.name: x.version for x in lockfile.parse(LOCKS / n) if x.applies(env)}
        for n in ("train-cpu.txt", "train-cu118.txt")
    )
    changed = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert changed == {"torch", "triton"}
    assert all(n.startswith("nvidia-") and n.endswith("-cu12") for n in cpu.keys() - cuda.keys())
    assert all(n.startswith("nvidia-") and n.endswith("-cu11") for n in cuda.keys() - cpu.keys())


def test_only_the_two_known_packages_need_building() -> None:
    """A package with no wheel hash would need more than setuptools, or a compiler."""
    allowed = set(pins.load().train.sdist_only.names)
    single = {x.name for x in lockfile.parse(LOCKS / "train-cpu.txt") if len(x.hashes) == 1}
    assert allowed <= single


def test_the_command_runs_at_the_same_versions_inside_the_stack() -> None:
    tool = lockfile.versions(lockfile.parse(LOCKS / "tool.txt"))
    train = lockfile.versions(lockfile.parse(LOCKS / "train-cpu.txt"))
    dev = lockfile.versions(lockfile.parse(LOCKS / "dev.txt"))
    # hatchling's own, and what Windows needs: neither is for running the command here
    built_with = {"hatchling", "editables", "pathspec", "pluggy", "trove-classifiers"}
    built_with |= {"colorama", "pywin32"}
    shared = tool.keys() - built_with
    assert {n: tool[n] for n in shared} == {n: train.get(n) for n in shared}
    assert all(tool[name] <= dev[name] for name in tool)


def test_test_tools_do_not_touch_the_stack() -> None:
    for stack in ("train-cpu.txt", "train-cu118.txt"):
        names = {line.name for line in lockfile.parse(LOCKS / stack)}
        assert not names & {line.name for line in lockfile.parse(LOCKS / "train-test.txt")}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LOCKS, tmp_path / "locks"))


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("torch==2.6.0 ", "torch==2.7.0 ", "torch is not at 2.6.0"),
        ("160a9fe5", "160a9fe6", "verl has another hash"),
        ("# Input: sha256:", "# Input: sha256:0", "made from other pins"),
        ("ray==2.47.1", "roy==2.47.1", "ray is missing"),
    ],
)
def test_an_edited_lock_is_noticed(copied: Path, old: str, new: str, complaint: str) -> None:
    path = copied / "train-cpu.txt"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    problems = locking.offline_problems(pins.load(), copied)
    assert any(complaint in problem for problem in problems), problems


def test_a_changed_pin_is_noticed() -> None:
    loaded = pins.load()
    changed = loaded.model_copy(update={"uv": loaded.uv.model_copy(update={"version": "0.13.8"})})
    problems = locking.offline_problems(changed, LOCKS)
    assert "bootstrap.txt: uv is not at 0.13.8" in problems


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("demo==1.0", "has no hash"),
        (f"demo>=1.0 --hash=sha256:{'a' * 64}", "has no exact version"),
        (f"demo @ http://h/x.whl --hash=sha256:{'a' * 64}", "holds an address"),
        ("--index-url http://h/simple", "is not a requirement"),
    ],
)
def test_a_line_that_is_no_lock(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "bad.txt"
    path.write_text(line + "\n")
    with pytest.raises(TreeError, match=complaint):
        lockfile.parse(path)


def test_the_stand_in_carries_the_recorded_metadata(tmp_path: Path) -> None:
    release = pins.load().release["torch-cu118"]
    with zipfile.ZipFile(locking._stand_in(release, tmp_path)) as archive:
        text = archive.read("torch-2.6.0+cu118.dist-info/METADATA").decode()
    declared = [x.split(": ", 1)[1] for x in text.splitlines() if x.startswith("Requires-Dist")]
    assert declared == release.requires_dist
    locked = lockfile.versions(lockfile.parse(LOCKS / "train-cu118.txt"))
    for line in declared:
        name, _, rest = line.partition("==")
        if name.startswith("nvidia-"):
            assert locked[canonicalize_name(name)] == {rest.split(";")[0]}
