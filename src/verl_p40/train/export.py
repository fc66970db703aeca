"""From a run's checkpoint to a folder that transformers loads."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_p40.errors import DataError, DiskError, MachineError, TreeError, UsageError
from verl_p40.stack import env as stack_env
from verl_p40.stack.env import StackEnv
from verl_p40.train import checkpoints, merge, source
from verl_p40.train.compose import Config, select
from verl_p40.train.folder import RunFolder

DTYPES = ("float32", "float16", "bfloat16")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What was written. ``report`` is :mod:`verl_p40.train.merge`'s."""

    run: RunFolder
    step: int
    out: Path
    report: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """The ``--json`` document; sizes in bytes."""
        return {
            "run": str(self.run.path),
            "step": self.step,
            "out": str(self.out),
            **{key: value for key, value in self.report.items() if key != "problem"},
        }


def find_run(name: str, runs: Path) -> RunFolder:
    """The run that a path or a name below ``runs`` means.

    Raises:
        DataError: there is no such run.
    """
    for path in (Path(name).expanduser(), runs / name):
        run = RunFolder(path.resolve())
        if run.started():
            return run
    known = (
        sorted(p.name for p in runs.glob("*") if RunFolder(p).started()) if runs.is_dir() else []
    )
    raise DataError(
        f"{name} is no run folder: there is no {RunFolder(Path(name)).config.name} in it",
        fix=f"one of {', '.join(known)}" if known else f"there is no run in {runs}: --runs-dir",
    )


def export(
    run: RunFolder, out: Path, *, step: int | None, dtype: str | None, prompt: str, say: Say
) -> Exported:
    """Merge the actor's shards into ``out``, which has to be new; load it, and let it answer.

    It is written beside, and gets its name when it is whole.

    Args:
        step: which checkpoint; default: the newest whole one.
        dtype: one of ``DTYPES``; default: that of the weights (FP32).

    Raises:
        UsageError: the dtype, or something is at ``out``.
        DataError: there is no such checkpoint, or it cannot be merged.
        DiskError, MachineError, TreeError, NetworkError.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype is {dtype!r}", fix=f"one of {', '.join(DTYPES)}")
    out = out.expanduser().absolute()
    _check_place(out)
    config = run.read_config()
    step = _step(run, config, step)
    actor = run.checkpoints / f"global_step_{step}" / "actor"
    _check_room(out, actor)
    say("making sure of the training stack")
    stack = _stack(run)
    source.check_tree(stack)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        say(f"merging the checkpoint of step {step}")
        report = _merged(
            stack,
            {
                "actor": str(actor),
                "out": str(temporary),
                "dtype": dtype,
                "lora_alpha": select(config, "actor_rollout_ref.model.lora_alpha") or 16,
                "prompt": prompt,
            },
        )
        temporary.replace(out)
    except OSError as error:
        raise MachineError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(run, step, out, report)


def _check_place(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"{out} exists", fix="name a folder that does not, or remove it")
    if not out.parent.is_dir():
        raise UsageError(f"{out.parent} does not exist", fix=f"mkdir -p {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise MachineError(f"cannot write to {out.parent}", fix="name another place")


def _step(run: RunFolder, config: Config, asked: int | None) -> int:
    """The checkpoint to export: its actor's weights have to be whole, and the run's."""
    every = checkpoints.steps(run.checkpoints)
    known = checkpoints.expected(config)
    wanted = checkpoints.Expected({"actor": ("model",)}, known.models)
    if asked is None:
        found = checkpoints.find(run.checkpoints, wanted)
        if found.step is None:
            why = f": step {found.skipped[0].step}: {found.skipped[0].problem}" if every else ""
            raise DataError(
                f"{run.path} has no whole checkpoint{why}",
                fix="trainer.save_freq says how often one is written",
            )
        asked = found.step
    if asked not in every:
        steps = ", ".join(map(str, every)) or "none"
        raise DataError(f"{run.path} has no checkpoint of step {asked}", fix=f"--step: {steps}")
    problem = checkpoints.problem(run.checkpoints / f"global_step_{asked}", wanted)
    if problem:
        raise DataError(f"the checkpoint of step {asked} cannot be exported: {problem}")
    return asked


def _check_room(out: Path, actor: Path) -> None:
    """The merged weights are as large as the shards, and are there twice while they are cast."""
    size = 2 * sum(path.stat().st_size for path in actor.glob("model_world_size_*.pt"))
    free = shutil.disk_usage(out.parent).free
    if free < size:
        raise DiskError(
            f"the export needs about {size / 1e9:.1f} GB and {out.parent} has {free / 1e9:.1f} GB free"
        )


def _stack(run: RunFolder) -> StackEnv:
    adopted = stack_env.adopted()
    if adopted is not None:
        return adopted
    flavor = (run.read_env().get("stack") or {}).get("flavor")
    return stack_env.ensure("cu118" if flavor == "cu118" else "cpu")


def _merged(stack: StackEnv, order: dict[str, Any]) -> dict[str, Any]:
    """Run :mod:`verl_p40.train.merge` in the stack."""
    with tempfile.TemporaryDirectory(prefix="vp40-export-") as scratch:
        path = Path(scratch) / "order.json"
        path.write_text(json.dumps(order), encoding="utf-8")
        done = stack.run_module(merge.__name__, [str(path)], env=_QUIET, capture=True)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(merge.MARK):
            report: dict[str, Any] = json.loads(line)["verl_p40_export"]
            break
    else:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        if "No module named" in last:
            raise TreeError(f"the training stack is not whole: {last}")
        raise DataError(f"the checkpoint cannot be merged (exit code {done.returncode}): {last}")
    if report["problem"]:
        raise DataError(report["problem"]["message"], fix=report["problem"]["fix"])
    return report


_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "USE_TF": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}
"""On the CPU: a card may be training."""
