"""What a service checks before it becomes the command: real folders, real users, real full disks."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_p40.data import folder as folders
from verl_p40.data import prepare
from verl_p40.data.demo_assets import recipe
from verl_p40.errors import ExitCode, MachineError, UsageError, VerlP40Error
from verl_p40.services import mounts, start, who
from verl_p40.services.mounts import Mount, Refusal
from verl_p40.train import checks
from verl_p40.train.folder import RunFolder, write_whole

NOBODY = 54321
"""A uid that no passwd file has."""

VARIABLES = {
    "VERL_P40_RUNS": "runs",
    "VERL_P40_DATA": "data",
    "VERL_P40_MODELS": "models",
    "VERL_P40_HOME": "cache/verl-p40",
    "HF_HOME": "cache/huggingface",
}


@pytest.fixture(autouse=True)
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The variables of the image, with folders that everybody may write."""
    before = os.umask(0o022)
    for variable, name in VARIABLES.items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name).chmod(0o777)
        monkeypatch.setenv(variable, str(tmp_path / name))
    for folder in [tmp_path, *list(tmp_path.parents)[:3], tmp_path / "cache"]:
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(0o755)
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "cache"))
    for name in ("VERL_P40_PRESET", "VERL_P40_OVERRIDES", "VERL_P40_COMMAND"):
        monkeypatch.delenv(name, raising=False)
    yield
    os.umask(before)


def ready(*argv: str) -> tuple[start.Start, list[str]]:
    said: list[str] = []
    return start.ready(argv, said.append), said


def as_nobody(work: Callable[[], Any], *, uid: int = NOBODY, group: int = NOBODY) -> Any:
    """What ``work`` returns (as JSON) or raises, in a process of another uid where we are root."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(group)
                os.setuid(uid)
            answer = {"result": work()}
        except VerlP40Error as error:
            answer = {"error": error.message, "fix": error.fix, "code": int(error.exit_code)}
        except BaseException as error:
            answer = {"crash": repr(error)}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert "crash" not in answer, answer
    return answer


def closed(folder: Path) -> str:
    """A folder of somebody else's that only its owner may write; the owner's uid."""
    if os.getuid() == 0:
        os.chown(folder, 4321, 4321)
        folder.chmod(0o755)
    else:
        folder.chmod(0o555)
    return str(folder.stat().st_uid)


def test_a_container_as_it_should_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERL_P40_PRESET", "p40-recipe")
    monkeypatch.setenv("VERL_P40_OVERRIDES", "data.train_batch_size=16 'data.val_files=[a, b]'")
    got, _ = ready("train")
    assert got.command == [
        "train", "p40-recipe", "data.train_batch_size=16", "data.val_files=[a, b]",
    ]  # fmt: skip
    assert ready("train", "--run", "x")[0].command == ["train", "--run", "x"]
    assert ready("monitor")[0].command == ["monitor"]
    assert ready("smoke", "--fast")[0].command == ["smoke", "--fast"]
    # Nothing is left of the trials.
    assert [p for p in tmp_path.rglob("*") if not p.is_dir()] == []


def test_the_preset_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_P40_PRESET", " ")
    monkeypatch.setattr(checks, "cuda_devices", lambda: 0)
    got, said = ready("train")
    assert got.command == ["train", "cpu-demo"]
    assert said[0] == "no CUDA device, and VERL_P40_PRESET is not set: cpu-demo"
    monkeypatch.setattr(checks, "cuda_devices", lambda: 1)
    assert ready("train")[0].command == ["train", "p40-ppo"]


def test_overrides_that_are_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_P40_OVERRIDES", "data.val_files='[a")
    with pytest.raises(UsageError, match=r"VERL_P40_OVERRIDES is .*: no closing quotation"):
        ready("train")


@pytest.mark.parametrize("argv", [(), ("trian",)])
def test_no_such_service(argv: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        ready(*argv)
    assert caught.value.fix == start.USAGE


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_that_is_unset_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for empty in (None, "", " "):
        if empty is None:
            monkeypatch.delenv(variable)
        else:
            monkeypatch.setenv(variable, empty)
        with pytest.raises(UsageError, match=f"^{variable} is not set: it names the folder of "):
            ready("train", "cpu-demo")
    monkeypatch.setenv(variable, "relative/path")
    with pytest.raises(
        UsageError, match=f"^{variable} is 'relative/path', and must be an absolute"
    ):
        ready("train", "cpu-demo")


@pytest.mark.parametrize("variable", ["VERL_P40_RUNS", "VERL_P40_HOME", "HF_HOME"])
def test_a_folder_of_somebody_else_s(variable: str, tmp_path: Path) -> None:
    folder = tmp_path / VARIABLES[variable]
    owner = closed(folder)
    answer = as_nobody(lambda: ready("train", "cpu-demo")[0].command)
    assert answer["code"] == 3
    assert f"cannot write {folder}, the folder of " in answer["error"]
    assert f"it belongs to {owner}:" in answer["error"]
    uid = NOBODY if os.getuid() == 0 else os.getuid()
    assert f"this service runs as {uid}:" in answer["error"]
    assert "\n" not in answer["error"]
    if os.getuid() == 0:
        assert "mode 755" in answer["error"]
        assert answer["fix"].startswith("VERL_P40_UID=4321 in .env; or on the host: sudo chown -R ")
    assert f"sudo chown -R {uid} " in answer["fix"]


def test_a_missing_folder_in_a_closed_one(tmp_path: Path) -> None:
    """The cache volume is empty at first: its folders are made, or what is above is to blame."""
    shutil.rmtree(tmp_path / "cache" / "verl-p40")
    closed(tmp_path / "cache")
    os.environ["TMPDIR"] = str(tmp_path / "runs")
    answer = as_nobody(lambda: ready("train", "cpu-demo")[0].command)
    assert answer["code"] == 3
    assert f"cannot write {tmp_path}/cache, the folder of downloads" in answer["error"]


def test_root_is_no_remedy(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to root")
    os.chown(tmp_path / "runs", 0, 0)
    (tmp_path / "runs").chmod(0o755)
    answer = as_nobody(lambda: ready("monitor")[0].command)
    assert answer["fix"].startswith(f"on the host: sudo chown -R {NOBODY} ")


def _demo(data: Path) -> None:
    """A whole demo folder, as far as its record says."""
    demo = data / "demo"
    demo.mkdir()
    (demo / "train.parquet").write_bytes(b"rows")
    folders._write_record(demo, "demo", recipe(1), {"rows": {"train": 1}})


def test_data_that_cannot_be_written_is_used_when_it_is_whole(tmp_path: Path) -> None:
    _demo(tmp_path / "data")
    assert prepare.is_ready("demo")
    closed(tmp_path / "data")
    answer = as_nobody(lambda: ready("train", "cpu-demo")[1])
    assert f"{tmp_path}/data cannot be written: the data in it is used as it is" in answer["result"]
    (tmp_path / "data" / "demo" / "train.parquet").write_bytes(b"torn")
    answer = as_nobody(lambda: ready("train", "cpu-demo")[1])
    assert answer["code"] == 3
    assert "; the demo data is not (whole) in it, and has to be made" in answer["error"]
    # Data of the user's own is none of our business.
    answer = as_nobody(lambda: ready("train", "cpu-demo", "data.train_files=/x.parquet")[1])
    assert "result" in answer


def test_read_only_data_is_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mounts.refusal
    monkeypatch.setattr(
        mounts,
        "refusal",
        lambda folder: Refusal(30, folder) if folder == tmp_path / "data" else real(folder),
    )
    with pytest.raises(MachineError, match="data sets, is mounted read-only; the demo data is not"):
        ready("train", "cpu-demo")
    _demo(tmp_path / "data")
    _, said = ready("train", "cpu-demo")
    assert said[0] == f"{tmp_path}/data is read-only: the data in it is used as it is"


def test_models_may_be_read_only_but_not_unreadable(tmp_path: Path) -> None:
    closed(tmp_path / "models")
    assert "result" in as_nobody(lambda: ready("train", "cpu-demo")[0].command)
    (tmp_path / "models").chmod(0o000)
    answer = as_nobody(lambda: ready("train", "cpu-demo")[0].command)
    assert answer["code"] == 3
    assert f"cannot read {tmp_path}/models, the folder of models" in answer["error"]


MOUNTED = """
import json, sys
from pathlib import Path
from verl_p40.errors import VerlP40Error
from verl_p40.services import mounts, start
try:
    print(json.dumps(["ready", start.ready(["train", "cpu-demo"], lambda text: None).command]))
except VerlP40Error as error:
    print(json.dumps([error.message, error.fix, int(error.exit_code)]))
"""


def _with_mount(folder: Path, options: str) -> list[Any]:
    """The check in a mount namespace of its own, with a small or read-only disk at ``folder``."""
    unshare = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "-r", "--mount"]
    probe = subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", str(folder)], check=False)
    if probe.returncode != 0:
        pytest.skip("no mount namespace may be made here")
    command = f'mount -t tmpfs -o {options} none "$1" && exec "$2" -c "$3"'
    done = subprocess.run(
        [*unshare, "sh", "-c", command, "sh", str(folder), sys.executable, MOUNTED],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_full_disk(tmp_path: Path) -> None:
    message, fix, code = _with_mount(tmp_path / "runs", "size=64k")
    assert code == 7
    assert message.startswith(f"the disk of {tmp_path}/runs, the folder of runs, is full (")
    assert "VERL_P40_RUNS=/folder in .env" in fix


def test_a_read_only_disk(tmp_path: Path) -> None:
    message, fix, code = _with_mount(tmp_path / "runs", "ro")
    assert (message, code) == (f"{tmp_path}/runs, the folder of runs, is mounted read-only", 3)
    assert fix.startswith("mount it writable")
    message, fix, code = _with_mount(tmp_path / "data", "ro")
    assert code == 3
    assert "VERL_P40_DATA_MODE=rw in .env" in fix


def test_a_mount_is_found_where_the_kernel_says(tmp_path: Path) -> None:
    assert mounts.source(tmp_path) is None
    assert mounts._unescaped(r"/my\040runs\134x") == r"/my runs\x"


def test_a_name_and_a_home_for_a_user_that_nobody_knows(tmp_path: Path) -> None:
    """What libraries ask: the user's name, ~, and folders for their caches."""

    def ask() -> Any:
        bare = {"VERL_P40_HOME": os.environ["VERL_P40_HOME"], "HOME": "/"}
        added = who.additions(bare)
        os.environ.clear()
        os.environ.update({**bare, **added})
        return [getpass.getuser(), str(Path.home()), str(Path("~/x").expanduser()), added]

    name, home, inside, added = as_nobody(ask)["result"]
    if os.getuid() == 0:
        assert name == f"uid{NOBODY}"
        assert home == f"{tmp_path}/cache/verl-p40/home-{NOBODY}"
    assert inside == f"{home}/x"
    assert Path(home).stat().st_mode & 0o777 == 0o700
    assert added["TRITON_CACHE_DIR"].startswith(home)


def test_group_0_shares_what_it_writes(tmp_path: Path) -> None:
    """Two uids, one after the other, in the group that the image's folders belong to."""
    if os.getuid() != 0:
        pytest.skip("only root can become two users")

    def write() -> int:
        ready("monitor")
        with RunFolder(tmp_path / "runs" / "r").hold():
            write_whole(RunFolder(tmp_path / "runs" / "r").config, "a: 1")
        return os.getuid()

    first = as_nobody(write, group=0)
    second = as_nobody(write, uid=NOBODY + 1, group=0)
    assert (first["result"], second["result"]) == (NOBODY, NOBODY + 1)


def test_what_is_set_and_works_stays(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "USER": "me", "LOGNAME": "me", "XDG_CACHE_HOME": "/c"}
    added = who.additions(environ)
    assert not {"HOME", "USER", "LOGNAME", "XDG_CACHE_HOME"} & added.keys()


def test_the_script_becomes_the_command(tmp_path: Path) -> None:
    """Same process, so that signals reach verl-p40; its exit code comes through."""
    script = Path(__file__).parents[3] / "scripts" / "service.py"
    # A directory whose python finds the package and whose verl-p40 tells what it was given.
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python3").symlink_to(sys.executable)
    teller = tools / "verl-p40"
    teller.write_text('#!/bin/sh\necho "$$ $VERL_P40_COMMAND" "$@"\nexit 7\n')
    teller.chmod(0o755)
    source = str(Path(start.__file__).parents[2])
    code = (
        f"import sys, runpy; sys.executable = {str(tools / 'python3')!r}; "
        f"sys.argv[0] = 'service.py'; runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "monitor", "--every", "5"],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        text=True,
    )
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 7
    first, second = said.splitlines()
    assert first.endswith(": monitor --every 5")
    assert second == (f"{process.pid} docker compose run --rm monitor service monitor --every 5")


def test_the_script_says_errors_and_help() -> None:
    script = Path(__file__).parents[3] / "scripts" / "service.py"
    env = {**os.environ, "PYTHONPATH": str(Path(start.__file__).parents[2])}

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script), *words],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

    shown = call("--help")
    assert shown.returncode == 0 and "Example: docker compose run" in shown.stdout
    env["VERL_P40_RUNS"] = ""
    failed = call("monitor")
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: VERL_P40_RUNS is not set")


def test_a_mount_needs_no_setting() -> None:
    assert mounts._elsewhere(Mount("X", "things")) == ""


def test_outside_of_the_image_it_says_so() -> None:
    script = Path(__file__).resolve().parents[3] / "scripts" / "service.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script), "train"], capture_output=True, text=True
    )
    assert done.returncode == ExitCode.ENVIRONMENT
    assert done.stderr.startswith("error: verl-p40 is not installed for this Python")
    assert "fix: " in done.stderr and "Traceback" not in done.stderr
