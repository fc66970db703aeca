"""An unattended run that is killed at random points, again and again, and gets to its end.

    python benchmarks/faults.py --points 30 --steps 1000 [--seed 1] [--json FILE]

A real run of the real verl on the CPU (a model of 30,000 weights) is trained by `verl-p40 train`;
at random moments one of its processes gets SIGKILL: the trainer, its task runner, a worker, Ray's
raylet or its GCS. A point is good when

- no committed checkpoint is lost: the newest whole one is at least as new as before the kill, and
  the run goes on from it;
- the supervisor notices within --limit seconds (the step limit of health is set to that);
- the failure is named: `failure` in events.jsonl has an error that is not "the log names no error".

Half of the points are in the loop, spread evenly over the steps, half in an attempt's start. After
the last the run is left to itself; at its end every step has to be in metrics.jsonl once. Printed
are the counts by victim and a timeline.

Wants the training stack (`verl-p40 stack install`, or VERL_P40_ENV). A point takes as long as a
start of verl: about a minute on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
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
from datetime import datetime
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
    minute: float = 0.0
    """Since the run was begun."""


class Faults:
    """The run, and the hand that kills."""

    def __init__(self, home: Path, seed: int, limit: float, points: int, steps: int) -> None:
        self.home, self.dice, self.limit, self.steps = home, random.Random(seed), limit, steps
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self.began = time.monotonic()
        # Where the points of the loop are, and None for those of the start; in random order.
        inside = points // 2
        rest: list[int | None] = [None] * (points - inside)
        places = sorted(self.dice.sample(range(points), inside))
        targets = [round((n + self.dice.random()) * steps * 0.9 / inside) for n in range(inside)]
        for place, target in zip(places, targets, strict=True):
            rest.insert(place, target)
        self.targets = rest

    def start(self) -> None:
        source = str(ROOT / "src")
        env = {**os.environ, "PYTHONPATH": source, "VERL_P40_RUNS": str(self.home / "runs"),
               "VERL_P40_HEALTH_STEP": str(self.limit)}  # fmt: skip
        words = [str(self.home / "tiny.yaml"), "--run", "faults", "--retries", "50",
                 f"trainer.total_training_steps={self.steps}", "trainer.total_epochs=20000",
                 "trainer.save_freq=5", "trainer.test_freq=100"]  # fmt: skip
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

    def point(self, target: int | None) -> Point:
        """Wait for step ``target``, or some time into an attempt, kill, and see what follows."""
        begun = self.wait(lambda: len(self.events("start", "resume")), "an attempt")
        if target is not None:
            self.wait(
                lambda: self.beat().get("stepping") and self.beat().get("step", 0) >= target,
                f"step {target}",
            )
            time.sleep(self.dice.uniform(0, 2))
        else:
            time.sleep(self.dice.uniform(0, 30))
        name = self.dice.choice(list(VICTIMS))
        process = self.wait(lambda: self._find(name), f"a {name}")
        beat = self.beat()
        point = Point(name, str(beat.get("phase")), int(beat.get("step") or 0), self.newest())
        point.minute = round((time.monotonic() - self.began) / 60, 1)
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
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return None
        for child in children:
            # Those of an earlier attempt may be going, or be dead and not yet waited for.
            with contextlib.suppress(psutil.Error):
                line = " ".join(child.cmdline())
                if VICTIMS[name] in line and "verl_p40.train.guard" not in line:
                    return child
        return None

    def finish(self) -> list[str]:
        """Let the run come to its end; what is wrong with it."""
        assert self.process is not None
        code = self.process.wait(timeout=3 * PATIENCE)
        lines = self.run.metrics.read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines]
        wrong = [f"exit code {code}"] if code else []
        if steps != list(range(1, self.steps + 1)):
            wrong.append(f"{len(steps)} lines of metrics, {len(set(steps))} steps")
        if self.newest() != self.steps:
            wrong.append(f"the newest checkpoint is of step {self.newest()}")
        return wrong

    def timeline(self) -> str:
        """One line an event of the run."""
        first = datetime.fromisoformat(self.run.read_events()[0]["time"])
        lines = []
        for event in self.run.read_events():
            minutes = (datetime.fromisoformat(event["time"]) - first).total_seconds() / 60
            what = event.get("cause") or event.get("error") or ""
            lines.append(
                f"{minutes:6.1f} min  {event['event']:<8} step {event['step']:>5}  {what[:70]}"
            )
        return "\n".join(lines)

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
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a step may take")
    parser.add_argument("--json", type=Path, help="write every point there")
    asked = parser.parse_args()
    if asked.points < 1 or asked.steps < 1:
        parser.error("--points and --steps: at least 1")
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
        faults = Faults(home, asked.seed, asked.limit, asked.points, asked.steps)
        faults.start()
        wrong = ["it was not left to its end"]
        try:
            for target in faults.targets:
                points.append(faults.point(target))
                print(json.dumps(asdict(points[-1])), flush=True)
            wrong = faults.finish()
        finally:
            faults.stop()
            minutes = (time.monotonic() - faults.began) / 60
            timeline = faults.timeline()
            if asked.json:
                document = {
                    "points": [asdict(p) for p in points],
                    "commands": faults.starts,
                    "minutes": minutes,
                    "wrong": wrong,
                    "events": faults.run.read_events(),
                }
                asked.json.write_text(json.dumps(document, indent=2) + "\n")
    print(timeline)
    print(table(points))
    print(
        f"{len(points)} points, {asked.steps} steps, {faults.starts} command(s), "
        f"{minutes:.0f} min: {'; '.join(wrong) or 'every step once'}"
    )
    return int(bool(wrong) or any(p.problem for p in points))


if __name__ == "__main__":
    raise SystemExit(main())
