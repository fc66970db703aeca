"""Kill a run at random points, again and again, and count what came of it.

    python benchmarks/faults.py --points 30 [--seed 1] [--json FILE]

A real run of the real verl on the CPU (a model of 30,000 weights) is trained by `verl-p40 train`;
at random moments one of its processes gets SIGKILL: the trainer, its task runner, a worker, Ray's
raylet or its GCS. A point is good when

- no committed checkpoint is lost: the newest whole one is at least as new as before the kill, and
  the run goes on from it;
- the supervisor notices within --limit seconds (the step limit of health is set to that);
- the failure is named: `failure` in events.jsonl has an error that is not "the log names no error".

Wants the training stack (`verl-p40 stack install`, or VERL_P40_ENV). A point takes as long as a
start of verl: about a minute on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "train")]

import tiny  # noqa: E402

from verl_p40.stack import env as stack_env  # noqa: E402
from verl_p40.train import checkpoints  # noqa: E402
from verl_p40.train.folder import RunFolder  # noqa: E402

VICTIMS = {
    "trainer": "-m verl.trainer.main_ppo",
    "task runner": "ray::TaskRunner",
    "worker": "ray::WorkerDict",
    "raylet": "raylet/raylet ",
    "GCS": "gcs/gcs_server",
}
PATIENCE = 600.0


@dataclass
class Point:
    """One kill, and what came of it. Seconds."""

    victim: str
    phase: str
    step: int
    checkpoint: int
    noticed: float = 0.0
    cause: str = ""
    error: str = ""
    resumed: int = -1
    problem: str = ""


class Faults:
    """The run, and the hand that kills."""

    def __init__(self, home: Path, dice: random.Random, limit: float) -> None:
        self.home, self.dice, self.limit = home, dice, limit
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        source = str(ROOT / "src")
        env = {**os.environ, "PYTHONPATH": source, "VERL_P40_RUNS": str(self.home / "runs"),
               "VERL_P40_HEALTH_STEP": str(self.limit)}  # fmt: skip
        words = [str(self.home / "tiny.yaml"), "--run", "faults", "--retries", "50",
                 "trainer.total_training_steps=100000", "trainer.total_epochs=20000"]  # fmt: skip
        command = [sys.executable, "-m", "verl_p40.cli.main", "train", *words]
        with (self.home / "screen.log").open("ab") as screen:
            self.process = subprocess.Popen(
                command, cwd=self.home, env=env, stdout=screen, stderr=subprocess.STDOUT
            )
        self.starts += 1

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.home / "runs" / "faults")

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.run.read_events() if event["event"] in kinds]

    def beat(self) -> dict[str, Any]:
        try:
            beat: dict[str, Any] = json.loads(self.run.heartbeat.read_text())
        except (OSError, ValueError):
            return {}
        return beat

    def newest(self) -> int:
        return checkpoints.newest(self.run.checkpoints, critic=True) or 0

    def wait(self, check: Any, what: str, seconds: float = PATIENCE) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = check()
            if value:
                return value
            time.sleep(0.05)
        raise TimeoutError(f"waited {seconds:.0f} s for {what}")

    def point(self) -> Point:
        """Wait for a random moment of an attempt, kill, and see what follows."""
        begun = self.wait(lambda: len(self.events("start", "resume")), "an attempt")
        # Half of the points in the loop, where a save is due every other step, half in the start.
        if self.dice.random() < 0.5:
            self.wait(lambda: self.beat().get("step", 0) > 0 and self.beat()["stepping"], "a step")
            time.sleep(self.dice.uniform(0, 4))
        else:
            time.sleep(self.dice.uniform(0, 40))
        name = self.dice.choice(list(VICTIMS))
        process = self.wait(lambda: self._find(name), f"a {name}")
        beat = self.beat()
        point = Point(name, str(beat.get("phase")), int(beat.get("step") or 0), self.newest())
        failures = len(self.events("failure"))
        began = time.monotonic()
        process.kill()
        try:
            self.wait(lambda: len(self.events("failure")) > failures, "it to be noticed")
        except TimeoutError as error:
            point.problem = str(error)
            return point
        point.noticed = round(time.monotonic() - began, 1)
        failure = self.events("failure")[-1]
        point.cause, point.error = str(failure.get("cause") or ""), str(failure.get("error"))
        self._next_attempt(begun, point)
        if point.noticed > self.limit + 60:
            point.problem = "noticed too late"
        if not point.error or point.error == "the log names no error":
            point.problem = point.problem or "no cause is named"
        if point.resumed < point.checkpoint:
            point.problem = "a checkpoint is lost"
        return point

    def _next_attempt(self, begun: int, point: Point) -> None:
        """Its own, or that of the next command where the supervisor has given up."""
        assert self.process is not None

        def goes_on() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                self.start()
            return len(self.events("start", "resume")) > begun

        self.wait(goes_on, "the next attempt")
        point.resumed = int(self.events("start", "resume")[-1]["step"])

    def _find(self, name: str) -> psutil.Process | None:
        assert self.process is not None
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                line = " ".join(child.cmdline())
                if VICTIMS[name] in line and "verl_p40.train.guard" not in line:
                    return child
        except psutil.Error:
            return None
        return None

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(timeout=300)


def table(points: list[Point]) -> str:
    """Counts by victim, in Markdown."""
    lines = ["| killed | points | noticed in s (median, longest) | resumed | named | problems |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name in VICTIMS:
        of = [p for p in points if p.victim == name]
        if not of:
            continue
        seconds = sorted(p.noticed for p in of)
        causes = Counter(p.cause or p.error.split(":")[0][:40] for p in of)
        lines.append(
            f"| {name} | {len(of)} | {seconds[len(seconds) // 2]:.1f}, {seconds[-1]:.1f} "
            f"| {sum(p.resumed >= p.checkpoint for p in of)} "
            f"| {', '.join(f'{n} {c}' for n, c in causes.most_common())} "
            f"| {sum(bool(p.problem) for p in of)} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--points", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a step may take")
    parser.add_argument("--json", type=Path, help="write every point there")
    asked = parser.parse_args()
    points: list[Point] = []
    stack = stack_env.adopted() or stack_env.ensure("cpu")
    with tempfile.TemporaryDirectory(prefix="vp40-faults-") as scratch:
        home = Path(scratch)
        subprocess.run(
            [stack.python, ROOT / "tests" / "train" / "tiny.py", home / "assets"],
            env=stack.environ(),
            check=True,
        )
        (home / "tiny.yaml").write_text(tiny.PRESET.format(assets=home / "assets"))
        faults = Faults(home, random.Random(asked.seed), asked.limit)
        faults.start()
        try:
            while len(points) < asked.points:
                points.append(faults.point())
                print(json.dumps(asdict(points[-1])), flush=True)
        finally:
            faults.stop()
            if asked.json:
                document = {"points": [asdict(p) for p in points], "commands": faults.starts}
                asked.json.write_text(json.dumps(document, indent=2) + "\n")
    print(table(points))
    print(f"{len(points)} points, {faults.starts} commands")
    return int(any(p.problem for p in points))


if __name__ == "__main__":
    raise SystemExit(main())
