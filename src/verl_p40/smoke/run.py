"""Runs the checks one after the other; what cannot or must not run here is skipped, and says why."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import psutil

from verl_p40.errors import DataError, MachineError
from verl_p40.smoke import gpu
from verl_p40.smoke.model import Check, Context, Device, Result
from verl_p40.smoke.process import run_check
from verl_p40.stack import paths
from verl_p40.stack.env import StackEnv
from verl_p40.train.checks import cuda_devices
from verl_p40.train.compose import select
from verl_p40.train.folder import RunFolder

IDLE_MIB = 2048
"""GPU memory in MiB that may be in use (a desktop, the driver's own) on a card taken to be idle."""
_PATIENCE = 5.0
"""Seconds that a card has to become idle: memory of a process that has ended goes a moment later."""

TRAINS = ("ppo", "checkpoint")
"""Checks whose story is in a run's ``train.log``."""

_MIB = 2**20


class Listener(Protocol):
    """Told what happens."""

    def begin(self, check: Check) -> None: ...

    def tick(self, check: Check, seconds: float) -> None: ...

    def end(self, result: Result) -> None: ...


@dataclass(frozen=True)
class Where:
    """The device of the checks. ``why`` says why it is the CPU."""

    device: Device
    seen: gpu.Seen
    why: str = ""


def choose_device(asked: Literal["auto", "cpu", "cuda"]) -> Where:
    """The GPU where there is one and nobody said otherwise.

    A card that the driver lists and CUDA does not open is chosen too: the checks are to say so.

    Raises:
        MachineError: CUDA was asked for and there is no card.
    """
    seen = gpu.look()
    if asked == "cpu":
        return Where("cpu", seen, "--device cpu")
    if not gpu.visible():
        why = "CUDA_VISIBLE_DEVICES hides every GPU"
    elif seen.gpus or cuda_devices():
        return Where("cuda", seen)
    else:
        why = f"no GPU: {seen.problem or 'none found'}"
    if asked == "cuda":
        raise MachineError(
            f"--device cuda, and {why}",
            fix="verl-p40 smoke --device cpu; in a container, start it with the NVIDIA runtime "
            "(docker run --gpus all)",
        )
    return Where("cpu", seen, why)


@dataclass
class Smoke:
    """One smoke test. ``look`` and ``available_mib`` are asked before each check."""

    stack: StackEnv
    where: Where
    scratch: Path
    listener: Listener
    look: Callable[[], gpu.Seen] = gpu.look
    available_mib: Callable[[], int] = lambda: psutil.virtual_memory().available // _MIB
    patience: float = _PATIENCE
    results: dict[str, Result] = field(default_factory=dict)

    def run(self, checks: Sequence[Check]) -> list[Result]:
        """Run ``checks`` in order; every one has a result, whatever became of the others."""
        for check in checks:
            self.listener.begin(check)
            reason = self._obstacle(check)
            if reason:
                result = Result(check, "skipped", reason)
            else:
                card = self.where.seen.first() if self.where.device == "cuda" else None
                name = card.name if card else "a GPU"
                context = Context(self.where.device, self.scratch, check.gpu_mib, name)
                tick = functools.partial(self.listener.tick, check)
                result = run_check(check, context, self.stack, self.log(check), tick)
            self.results[check.name] = result
            self.listener.end(result)
        return list(self.results.values())

    def log(self, check: Check) -> Path:
        """Where a check's process writes."""
        return self.scratch / f"{check.name}.log"

    def logs(self, check: Check) -> list[Path]:
        """All there is to read of a check: its process's output, and a run's own log."""
        runs = sorted(self.scratch.glob("runs/*/train.log")) if check.name in TRAINS else []
        return [self.log(check), *runs]

    def _obstacle(self, check: Check) -> str:
        """Why ``check`` is not run; empty when it is."""
        for need in check.needs:
            before = self.results.get(need)
            if before is None:
                return f"needs {need}, which was left out"
            if before.verdict != "ok":
                return f"needs {need}, which {'failed' if before.verdict == 'failed' else 'was skipped'}"
        if check.gpu == "only" and self.where.device == "cpu":
            return self.where.why
        available = self.available_mib()
        if available < check.ram_mib:
            return f"{available:,} MiB of memory available, and it needs {check.ram_mib:,} MiB"
        if check.gpu != "none" and self.where.device == "cuda":
            return self._busy(check)
        return ""

    def _busy(self, check: Check) -> str:
        """Why the GPU is left alone: smoke beside a training run must never end that run."""
        training = training_run(paths.runs_home())
        if training:
            return f"the run {training} is training on the GPU"
        deadline = time.monotonic() + self.patience
        while True:
            reason = busy(self.look(), check)
            if not reason or time.monotonic() >= deadline:
                return reason
            time.sleep(0.5)


def busy(seen: gpu.Seen, check: Check) -> str:
    """Why ``check`` must not use the card; empty when it may.

    A run that computes may still take the whole card, so that free memory alone says too little.
    """
    card = seen.first()
    if card is None:
        return f"cannot tell how much GPU memory is free ({seen.problem or 'no such card'})"
    state = f"{card.free_mib:,} MiB free of {card.total_mib:,}, and it needs {check.gpu_mib:,} MiB"
    if card.computing or card.used_mib > IDLE_MIB:
        return f"another process uses the GPU, and may yet take all of it: {state} of an idle card"
    if card.free_mib < check.gpu_mib:
        return f"too little GPU memory: {state}"
    return ""


def training_run(home: Path) -> str:
    """The name of a run in ``home`` that is training on a GPU now; empty when there is none."""
    for config in sorted(home.glob("*/config.yaml")):
        run = RunFolder(config.parent)
        try:
            if run.holder() is not None and select(run.read_config(), "trainer.device") == "cuda":
                return run.name
        except (OSError, DataError):
            continue
    return ""
