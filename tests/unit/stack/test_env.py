"""Real environments, small ones: uv, the real verl wheel and the real patch queue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flaky import Site, sha256, wheel

from verl_p40.errors import DiskError, MachineError, NetworkError
from verl_p40.stack import env, fetch, install, paths, pins
from verl_p40.stack.env import ensure
from verl_p40.stack.progress import Silent

OWN = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(scope="session")
def verl_wheel() -> bytes:
    """The real pinned wheel, from this machine's cache or index."""
    return fetch.fetch_pinned("verl").read_bytes()


@pytest.fixture
def small_stack(
    verl_wheel: bytes, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Site:
    """Locks of two packages (and one for tests), on a local index."""
    release = pins.load().release["verl"]
    demo_name, demo = wheel("demo", "1.0")
    test_name, test = wheel("testtool", "2.0")
    site.publish("verl", release.filename, verl_wheel)
    site.publish("demo", demo_name, demo)
    site.publish("testtool", test_name, test)
    locks = tmp_path / "locks"
    locks.mkdir()
    (locks / "train-cpu.txt").write_text(
        f"verl=={release.version} --hash=sha256:{release.sha256}\n"
        f"demo==1.0 --hash=sha256:{sha256(demo)}\n"
    )
    (locks / "train-test.txt").write_text(f"testtool==2.0 --hash=sha256:{sha256(test)}\n")
    monkeypatch.setattr(paths, "locks_dir", lambda: locks)
    return site


class Told(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_install_patch_reuse_and_add_tests(small_stack: Site, home: Path) -> None:
    told = Told()
    ready = ensure("cpu", report=told)
    assert ready.prefix.parent == home / "envs"
    assert ready.record.python == OWN
    assert "patches applied" in told.lines[-1]
    assert env.state(ready).split(": ")[1].startswith("patched")
    assert ready.run_module("demo", check=True).returncode == 0
    # our own package is importable in there, as `python -m verl_p40...` needs
    found = subprocess.run(
        [str(ready.python), "-c", "import importlib.util as u; print(u.find_spec('verl_p40'))"],
        env=ready.environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(paths.package_dir()) in found.stdout

    asked = len(small_stack.log)
    started = time.monotonic()
    again = ensure("cpu", report=told)
    assert time.monotonic() - started < 0.3 or os.getloadavg()[0] > 2
    assert (again.prefix, len(small_stack.log)) == (ready.prefix, asked)

    assert not again.has_tests
    tested = ensure("cpu", with_test=True)
    assert tested.has_tests
    assert tested.run_module("testtool", check=True).returncode == 0
    assert [path.name for path in home.joinpath("envs").iterdir() if path.is_dir()] == [
        ready.prefix.name
    ]


def test_the_environment_moves_as_a_whole(small_stack: Site, tmp_path: Path) -> None:
    """Built under another name and renamed: nothing in it may remember the first."""
    ready = ensure("cpu")
    for path in (ready.prefix / "bin").iterdir():
        if path.is_file() and not path.is_symlink():
            assert ".build-" not in path.read_text(errors="replace")
    assert ".build-" not in (ready.prefix / "pyvenv.cfg").read_text()


def test_a_reverted_tree_is_patched_again(small_stack: Site) -> None:
    from verl_p40.patches.tree import revert

    ready = ensure("cpu")
    revert(ready.site_packages)
    assert "pristine" in env.state(ready)
    assert "patched" in env.state(ensure("cpu"))


def test_a_broken_download_leaves_no_environment_and_goes_on(
    small_stack: Site, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = pins.load().release["verl"].filename
    small_stack.resources[f"/files/{name}"].statuses = [404]
    with pytest.raises(NetworkError):
        ensure("cpu")
    assert env.installed() == []
    assert [p.name for p in (home / "envs").iterdir() if p.is_dir()] == []
    assert ensure("cpu").prefix.is_dir()


def test_a_package_that_does_not_install_leaves_nothing(
    small_stack: Site, home: Path, tmp_path: Path
) -> None:
    body = b"not a zip file"
    small_stack.publish("broken", "broken-1-py3-none-any.whl", body)
    lock = tmp_path / "locks" / "train-cpu.txt"
    lock.write_text(f"broken==1 --hash=sha256:{sha256(body)}\n")
    with pytest.raises(MachineError, match="uv could not install"):
        ensure("cpu")
    assert [p.name for p in (home / "envs").iterdir() if p.is_dir()] == []


def test_a_build_that_was_killed_is_cleared_away(small_stack: Site, home: Path) -> None:
    prefix = env.prefix_for("cpu", OWN)
    for folder in (prefix, prefix.with_name(f".build-{prefix.name}")):
        (folder / "lib").mkdir(parents=True)
        (folder / "lib" / "half").write_text("")
    ready = ensure("cpu")
    assert not (ready.prefix / "lib" / "half").exists()
    assert not prefix.with_name(f".build-{prefix.name}").exists()


def test_two_at_once_build_one(small_stack: Site, home: Path, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from verl_p40.stack import env, paths\n"
        f"paths.locks_dir = lambda: Path({str(tmp_path / 'locks')!r})\n"
        "print(env.ensure('cpu').record.created)\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    created = {run.communicate(timeout=300)[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0]
    assert len(created) == 1, "both must use the one that was built first"
    assert len(small_stack.asked(f"/files/{wheel('demo', '1.0')[0]}")) == 1


def test_too_little_disk(small_stack: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "INSTALLED_PER_WHEEL_BYTE", 1e13)
    with pytest.raises(DiskError, match=r"the training stack needs .* GB on the disk of"):
        ensure("cpu")


def test_a_python_the_flavor_does_not_support(home: Path) -> None:
    with pytest.raises(MachineError, match=r"the cu118 stack needs Python 3\.10; .* 3\.11 was ask"):
        ensure("cu118", python="3.11")
    with pytest.raises(MachineError, match=r"needs Python 3\.10 or 3\.11; .* 3\.12 was asked for"):
        ensure("cpu", python="3.12")


def test_a_foreign_platform(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.platform, "machine", lambda: "aarch64")
    with pytest.raises(MachineError, match="Linux on x86_64, this is linux on aarch64"):
        ensure("cpu")


def test_the_named_environment_is_used(
    small_stack: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = ensure("cpu")
    elsewhere = ready.prefix.rename(tmp_path / "image")
    monkeypatch.setenv("VERL_P40_ENV", str(elsewhere))
    assert ensure("cpu").prefix == elsewhere
    monkeypatch.setenv("VERL_P40_ENV", str(tmp_path))
    with pytest.raises(MachineError, match="is not a verl-p40 environment"):
        ensure("cpu")


def test_an_environment_without_its_python_does_not_count(small_stack: Site) -> None:
    ready = ensure("cpu")
    (ready.prefix / "bin" / "python").unlink()
    assert env.read_env(ready.prefix) is None


def test_records_of_the_future_or_of_nobody_are_ignored(tmp_path: Path) -> None:
    assert env.read_env(tmp_path) is None
    (tmp_path / "verl-p40-env.json").write_text(json.dumps({"flavor": "tpu"}))
    assert env.read_env(tmp_path) is None


def test_module_runs_get_a_clean_environment(
    small_stack: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = ensure("cpu")
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    made = ready.environ({"EXTRA": "1"})
    assert "PYTHONHOME" not in made
    assert "PYTHONDONTWRITEBYTECODE" not in made
    assert made["PYTHONPATH"].split(os.pathsep) == [str(ready.pythonpath), "/mine"]
    assert (made["VERL_P40_ENV"], made["EXTRA"]) == (str(ready.prefix), "1")
    process = ready.popen_module("demo", stdout=subprocess.PIPE)
    assert process.wait(60) == 0
