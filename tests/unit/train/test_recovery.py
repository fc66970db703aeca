"""What follows a failure: real supervisors over a trainer that fails as verl's have failed."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from verl_p40.errors import UsageError
from verl_p40.train import ladder, process, recovery
from verl_p40.train.attempts import Attempts, Ready, Result
from verl_p40.train.compose import assign
from verl_p40.train.folder import RunFolder
from verl_p40.train.ladder import Rung
from verl_p40.train.runspec import Request, RunSpec, go_on, make_runspec
from verl_p40.train.view import PlainView

TRAINER = """
import json, os, signal, sys, time, zipfile
from pathlib import Path

words = sys.argv[1:]
run = Path(words[words.index("--config-path") + 1])
checkpoints = run / "checkpoints"
faults = Path(os.environ["FAULTS"])
tracker = checkpoints / "latest_checkpointed_iteration.txt"
step = int(tracker.read_text()) if tracker.exists() else 0
with (faults.parent / "started").open("a") as log:
    log.write(json.dumps([step, words]) + "\\n")

def fail(at):
    todo = json.loads(faults.read_text())
    if not todo or todo[0]["step"] != at:
        return
    what = todo.pop(0)["what"]
    faults.write_text(json.dumps(todo))
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(600)
    print((faults.parent / what).read_text(), flush=True)
    sys.exit(1)

def save(step):
    place = checkpoints / f"global_step_{step}"
    for model in ("actor", "critic"):
        (place / model).mkdir(parents=True)
        for what in ("model", "optim", "extra_state"):
            with zipfile.ZipFile(place / model / f"{what}_world_size_1_rank_0.pt", "w") as archive:
                archive.writestr("archive/data.pkl", b"x" * 100)
    with zipfile.ZipFile(place / "data.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    tracker.write_text(str(step))

fail(0)
print("Training Progress:   0%", flush=True)
while step < 8:
    step += 1
    fail(step)
    if step % 2 == 0:
        save(step)
    with open(os.environ["VERL_FILE_LOGGER_PATH"], "a") as log:
        data = {"critic/score/mean": 0.1 * step, "timing_s/step": 0.01}
        log.write(json.dumps({"step": step, "data": data}) + "\\n")
"""

LOGS = {
    "oom": """\
(WorkerDict pid=7) Traceback (most recent call last):
(WorkerDict pid=7)   File "/env/verl/workers/actor/dp_actor.py", line 400, in update_policy
(WorkerDict pid=7)     entropy, log_prob = self._forward_micro_batch(micro_batch=data)
(WorkerDict pid=7)   File "/env/verl/utils/torch_functional.py", line 144, in entropy_from_logits
(WorkerDict pid=7)     pd = torch.nn.functional.softmax(logits, dim=-1)
(WorkerDict pid=7) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has \
a total capacity of 22.38 GiB of which 512.00 MiB is free.
""",
    "full": "OSError: [Errno 28] No space left on device: 'global_step_4/actor/optim.pt'\n",
    "bug": 'Traceback (most recent call last):\n  File "mine.py", line 3, in reward\n'
    "ZeroDivisionError: division by zero\n",
    "gone": "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n",
}


class Supervised:
    """A run of the fake trainer. ``train`` is what one command does after its preparation."""

    def __init__(self, home: Path, spec: RunSpec) -> None:
        self.home, self.spec = home, spec
        package = home / "fake" / "verl" / "trainer"
        package.mkdir(parents=True)
        for folder in (package, package.parent):
            (folder / "__init__.py").touch()
        (package / "main_ppo.py").write_text(TRAINER)
        for name, text in LOGS.items():
            (home / name).write_text(text)

    def train(self, *faults: tuple[int, str], retries: int = 3) -> Result:
        (self.home / "faults").write_text(json.dumps([{"step": s, "what": w} for s, w in faults]))
        stack: Any = SimpleNamespace(
            python=sys.executable,
            prefix=self.home,
            flavor="cpu",
            lock_digest="",
            record=SimpleNamespace(python="3"),
            environ=lambda: {
                **os.environ,
                "PYTHONPATH": str(self.home / "fake"),
                "FAULTS": str(self.home / "faults"),
            },
        )
        self.spec, _ = go_on(self.spec, self.spec.config)
        report = {"versions": {}, "rows": 64}
        ready = Ready(stack=stack, patch_digest="", models={}, report=report, total=8)
        self.screen = io.StringIO()
        view = PlainView(Console(file=self.screen, width=200))
        with process.interruptible() as interrupt, self.spec.run.hold() as lock:
            return Attempts(self.spec, ready, lock, 5.0, view, interrupt).run(retries)

    def started(self) -> list[tuple[int, list[str]]]:
        return [tuple(json.loads(line)) for line in (self.home / "started").open()]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.spec.run.read_events() if event["event"] == kind]

    def steps(self) -> list[int]:
        return [json.loads(line)["step"] for line in self.spec.run.metrics.open()]


@pytest.fixture(scope="module")
def composed(verl_config: Path, tmp_path_factory: pytest.TempPathFactory) -> RunSpec:
    overrides = ("trainer.total_training_steps=8", "trainer.save_freq=2")
    runs = tmp_path_factory.mktemp("runs")
    return make_runspec(Request("cpu-demo", overrides, runs_dir=runs), verl_config)


@pytest.fixture
def supervised(tmp_path: Path, composed: RunSpec, monkeypatch: pytest.MonkeyPatch) -> Supervised:
    monkeypatch.setattr(recovery, "FIRST_WAIT", 0.05)
    run = RunFolder(tmp_path / "runs" / "tried")
    config = copy.deepcopy(composed.config)
    assign(config, "trainer.default_local_dir", str(run.checkpoints))
    return Supervised(tmp_path, dataclasses.replace(composed, run=run, config=config))


def test_a_killed_trainer_goes_on_from_its_checkpoint(supervised: Supervised) -> None:
    result = supervised.train((3, "kill"), (0, "gone"), (6, "kill"))
    assert (result.outcome.status, result.attempts) == ("finished", 4)
    assert [step for step, _ in supervised.started()] == [0, 2, 2, 4]
    assert supervised.steps() == list(range(1, 9))
    assert [e["step"] for e in supervised.events("retry")] == [2, 2, 5]
    causes = [e["cause"] for e in supervised.events("failure")]
    assert causes == ["killed", "sigkill-suspected", "killed"]
    said = supervised.screen.getvalue()
    assert "the trainer was killed by SIGKILL" in said
    assert "trying again in" in said
    assert "from step 4 of 8" in said


def test_out_of_memory_steps_down_and_goes_on(supervised: Supervised) -> None:
    result = supervised.train((3, "oom"), (5, "oom"))
    assert result.outcome.status == "finished"
    micro = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    first, second, third = (words for _, words in supervised.started())
    assert not any(word.startswith(micro) for word in first)
    assert f"{micro}=32" in second
    assert f"{micro}=16" in third and f"{micro}=32" not in third
    assert [rung.overrides for rung in result.rungs] == [(f"{micro}=32",), (f"{micro}=16",)]
    said = supervised.screen.getvalue()
    assert "cause (high confidence): CUDA out of memory in the logits" in said
    assert "going on with less memory: actor updates of 32 samples at a time" in said
    retry, _ = supervised.events("retry")
    assert (retry["cause"], retry["ladder"]["overrides"]) == ("cuda-oom-logits", [f"{micro}=32"])
    assert supervised.events("resume")[-1]["settings"] == [f"{micro}=16"]
    # The run stays the one that it was: its config has the user's settings.
    assert "ppo_micro_batch_size_per_gpu: 64" in supervised.spec.run.config.read_text()


def test_a_later_command_keeps_the_rungs(supervised: Supervised) -> None:
    result = supervised.train((3, "oom"), (4, "bug"), (4, "bug"))
    assert result.outcome.status == "failed"
    assert result.why == "the same failure twice at step 3"
    result = supervised.train()
    assert result.outcome.status == "finished"
    assert "memory ran out before, so: actor updates of 32" in supervised.screen.getvalue()
    words = supervised.started()[-1][1]
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32" in words


def test_a_ladder_ends(supervised: Supervised) -> None:
    small = Rung("", "", ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
                          "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1"))  # fmt: skip
    supervised.spec.config.update(ladder.applied(supervised.spec.config, [small]))
    result = supervised.train(*[(1, "oom")] * 20)
    assert result.outcome.status == "failed"
    assert result.why.startswith("nothing is left that would lower its memory")
    assert 2 <= result.attempts < 6


def test_what_would_come_again_is_not_tried_again(supervised: Supervised) -> None:
    assert supervised.train((0, "bug")).attempts == 1
    assert supervised.train((3, "full")).attempts == 1
    assert supervised.train((4, "kill"), retries=0).attempts == 1


def test_attempts_that_get_no_further_are_bounded(supervised: Supervised) -> None:
    result = supervised.train((0, "gone"), (0, "kill"), (0, "hang"), retries=1)
    assert (result.outcome.status, result.attempts) == ("failed", 2)
    assert result.why == "2 attempts got no further than step 0"


def test_a_trainer_that_hangs_is_ended(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_P40_HEALTH_STEP", "0.5")
    result = supervised.train((3, "hang"))
    assert (result.outcome.status, result.attempts) == ("finished", 2)
    (failure,) = supervised.events("failure")
    assert failure["error"].startswith("the trainer hangs: it has not got on for")
    assert failure["cause"] == "hang"


def test_how_often_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(recovery.RETRIES, raising=False)
    assert recovery.retries(None) == recovery.DEFAULT_RETRIES
    monkeypatch.setenv(recovery.RETRIES, "7")
    assert recovery.retries(None) == 7
    assert recovery.retries(0) == 0
    with pytest.raises(UsageError, match="--retries is -1"):
        recovery.retries(-1)
    monkeypatch.setenv(recovery.RETRIES, "often")
    with pytest.raises(UsageError, match="VERL_P40_RETRIES is 'often'"):
        recovery.retries(None)
