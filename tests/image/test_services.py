"""The compose project as a user runs it, on the CPU overlay, in a real engine."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from composekit import Project, alarms, wait_for

from verl_p40.errors import ExitCode

UNKNOWN_UID = "4711"
STEPS = 40
"""Of the demo's 60: the curve has risen by then."""


def test_up_train_with_monitor_and_smoke_beside_it(project: Project, tmp_path: Path) -> None:
    """The headline: a reward that rises, watched and checked meanwhile, as an unknown uid."""
    project.set(
        VERL_P40_UID=UNKNOWN_UID, VERL_P40_OVERRIDES=f"trainer.total_training_steps={STEPS}"
    )
    log = tmp_path / "up.log"
    up = project.start("up", "train", log=log)
    wait_for("train's container", lambda: project.containers("train"), seconds=60)
    seen = {"train": set(), "monitor": set()}  # type: dict[str, set[str]]

    def first_step() -> bool:
        assert up.poll() is None, log.read_text()[-3000:]
        for service, states in seen.items():
            if project.containers(service):
                states.add(project.health(service))
        return bool(project.steps())

    wait_for("the first step", first_step, seconds=420, every=2)
    # The same checks as `docker compose run --rm smoke`, while the training goes on.
    smoke = project.compose("run", "--rm", "smoke", check=False, timeout=600)
    assert smoke.returncode == 0, smoke.stdout + smoke.stderr
    for service, states in seen.items():
        states.add(project.health(service))
    assert up.wait(600) == 0, log.read_text()[-3000:]

    # In the foreground: a line a step, and what came of it.
    shown = log.read_text()
    assert shown.count("train-1  | ") > STEPS
    assert "greedy acc" in shown or "accuracy" in shown
    assert "monitor-1  |" not in shown
    rows = metrics(project)
    assert [row["step"] for row in rows if "actor/lr" in row["data"]] == list(range(1, STEPS + 1))
    reward = [
        row["data"]["critic/score/mean"] for row in rows if "critic/score/mean" in row["data"]
    ]
    assert sum(reward[-5:]) / 5 > sum(reward[:5]) / 5 + 0.15
    accuracy = [
        value for row in rows for key, value in row["data"].items() if key.startswith("val-core/")
    ]
    assert accuracy[-1] > accuracy[0] + 0.3

    assert "starting" in seen["train"] | seen["monitor"]
    assert "healthy" in seen["train"] and "healthy" in seen["monitor"]
    assert "unhealthy" not in seen["train"] | seen["monitor"]

    # Everything belongs to the uid that was asked for, and nothing ran as root.
    owners = project.exec("monitor", "find", "/runs", "-printf", "%U\n").split()
    assert set(owners) <= {UNKNOWN_UID, "1000"}  # the volume's own folder is the image's
    assert owners.count(UNKNOWN_UID) > 20
    host = project.read("/runs", "host.csv", "monitor").splitlines()
    assert len(host) > 30
    header = host[0].split(",")
    processes = [row.split(",")[header.index("process_count")] for row in host[1:]]
    assert max(int(count or 0) for count in processes) > 5  # Ray's, seen from another container

    report = json.loads(project.exec("monitor", "sh", "-c", "cat /runs/smoke/*.json"))
    verdicts = {check["name"]: check["verdict"] for check in report["checks"]}
    assert "failed" not in verdicts.values() and list(verdicts.values()).count("ok") >= 5

    for service in ("train", "monitor"):
        assert not alarms(project.logs(service)), service
    assert not alarms(smoke.stdout + smoke.stderr)


def metrics(project: Project) -> list[dict]:  # type: ignore[type-arg]
    text = project.read("/runs", "metrics.jsonl", "monitor")
    return [json.loads(line) for line in text.splitlines()]


def test_stop_saves_and_up_resumes_and_a_hung_trainer_is_unhealthy(
    project: Project, tmp_path: Path
) -> None:
    project.set(
        VERL_P40_OVERRIDES="trainer.total_training_steps=400 trainer.test_freq=-1 "
        "trainer.val_before_train=false trainer.save_freq=1000",
        VERL_P40_HEALTH_STEP="20",
    )
    project.compose("up", "-d", "train")
    wait_for("step 5", lambda: len(project.steps()) >= 5, seconds=420, every=1)
    wait_for("healthy", lambda: project.health("train") == "healthy", seconds=60)

    # `docker compose stop`: the step ends, a checkpoint is written, the container is gone.
    began = time.monotonic()
    project.compose("stop", "train", timeout=200)
    took = time.monotonic() - began
    assert took < 120, took
    container = project.container("train")
    assert container.attrs["State"]["ExitCode"] == ExitCode.INTERRUPTED
    saved = [e for e in events(project) if e["event"] == "checkpoint"]
    last = steps(project)[-1]
    assert saved and saved[-1]["step"] == last
    assert not alarms(container.logs().decode())

    # `kill -9` of everything, and the same command: on from the last checkpoint.
    project.compose("up", "-d", "train")
    wait_for("another step", lambda: steps(project)[-1] > last, seconds=420, every=1)
    resumed = [e for e in events(project) if e["event"] == "resume"]
    assert [e["step"] for e in resumed] == [last]
    project.compose("kill", "-s", "SIGKILL", "train")
    wait_for("gone", lambda: project.container("train").status == "exited", seconds=30)
    project.compose("up", "-d", "train")
    before = len(resumed)
    wait_for(
        "a second resume",
        lambda: len([e for e in events(project) if e["event"] == "resume"]) > before,
        seconds=300,
        every=1,
    )
    at = steps(project)[-1]
    wait_for("a step after kill -9", lambda: steps(project)[-1] > at, seconds=420, every=1)
    seen = steps(project)  # read once: it is still training
    assert seen == sorted(set(seen))

    # A trainer that hangs: alive, and not healthy.
    wait_for("healthy", lambda: project.health("train") == "healthy", seconds=60)
    # The brackets keep this very command line from matching.
    stop = "grep -qa -e '^ray::' -e 'main_pp[o]' $p/cmdline && kill -STOP ${p#/proc/}"
    project.container("train").exec_run(["bash", "-c", f"for p in /proc/[0-9]*; do {stop}; done"])
    wait_for("unhealthy", lambda: project.health("train") == "unhealthy", seconds=180, every=2)
    state = project.container("train").attrs["State"]
    assert state["Running"]
    assert "step" in state["Health"]["Log"][-1]["Output"]


def events(project: Project) -> list[dict]:  # type: ignore[type-arg]
    return project.events("monitor")


def steps(project: Project) -> list[int]:
    return project.steps("monitor")


def test_two_prepare_at_once_and_read_only_data_is_used(project: Project, tmp_path: Path) -> None:
    # Network and volumes first: Compose itself does not create them safely twice.
    project.compose("create", "train")
    prepare = ("run", "--rm", "--no-deps", "train", "verl-p40", "data", "demo")
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    both = [project.start(*prepare, log=log) for log in logs]
    assert [process.wait(400) for process in both] == [0, 0], [log.read_text() for log in logs]
    said = [log.read_text() for log in logs]
    assert (
        sum("another process is preparing /data/demo: waiting for it" in text for text in said) == 1
    )

    project.set(VERL_P40_DATA_MODE="ro", VERL_P40_OVERRIDES="trainer.total_training_steps=1")
    done = project.compose("run", "--rm", "--no-deps", "train", check=False)
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown
    assert "/data is read-only: the data in it is used as it is" in shown
    assert not alarms(shown)


def test_read_only_and_empty_data_is_refused_before_anything_starts(project: Project) -> None:
    project.set(VERL_P40_DATA_MODE="ro")
    done = project.compose("run", "--rm", "--no-deps", "train", check=False)
    said = done.stdout + done.stderr
    assert done.returncode == ExitCode.ENVIRONMENT, said
    assert "/data" in said and "VERL_P40_DATA_MODE=rw" in said


def test_an_unset_variable_is_named(project: Project) -> None:
    done = project.compose(
        *("run", "--rm", "--no-deps", "-e", "VERL_P40_RUNS=", "train"), check=False
    )
    assert done.returncode == ExitCode.USAGE
    assert "VERL_P40_RUNS is not set" in done.stdout + done.stderr


def test_a_folder_of_someone_else_is_named(project: Project, tmp_path: Path) -> None:
    """A bind folder that Docker made as root: whose it is, who we are, what to do."""
    runs = tmp_path / "runs"
    runs.mkdir(mode=0o755)
    os.chown(runs, 1234, 1234)
    project.set(VERL_P40_RUNS=str(runs))
    done = project.compose("run", "--rm", "--no-deps", "train", check=False)
    said = done.stdout + done.stderr
    assert done.returncode == ExitCode.ENVIRONMENT, said
    assert "/runs" in said and "1234" in said and "1000" in said
    assert "VERL_P40_UID=1234" in said
    assert not list(runs.iterdir())

    project.set(VERL_P40_UID="1234")
    done = project.compose(
        *("run", "--rm", "--no-deps", "train", "service", "train", "--dry-run"), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_full_disk_is_said_before_anything_starts(project: Project, tmp_path: Path) -> None:
    runs = tmp_path / "small"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=1777", "tmpfs", runs], check=True)
    try:
        (runs / "filler").write_bytes(b"x" * 65536)
        project.set(VERL_P40_RUNS=str(runs))
        done = project.compose("run", "--rm", "--no-deps", "train", check=False)
        said = done.stdout + done.stderr
        assert done.returncode == ExitCode.DISK, said
        assert "/runs" in said
    finally:
        project.compose("down", "--volumes", check=False)
        subprocess.run(["umount", runs], check=True)


def test_the_gpu_file_without_the_nvidia_runtime_fails_as_documented(project: Project) -> None:
    """What a user sees before our code can speak; the README says what it means."""
    project.files = project.files[:1]
    done = project.compose("up", "-d", "train", check=False)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    quoted = 'could not select device driver "nvidia"'
    assert quoted in said
    root = Path(__file__).resolve().parents[2]
    assert quoted in (root / "README.md").read_text()
    assert quoted in (root / "docs" / "docker.md").read_text()
