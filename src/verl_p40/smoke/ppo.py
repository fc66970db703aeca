"""One real PPO step under the tripwire, and the step after it from the checkpoint.

``verl.trainer.main_ppo`` through ``verl_p40.train.launch``, as ``verl-p40 train`` starts it: Ray,
FSDP, actor, critic, reference, HF rollout, verl's GSM8K scorer. Only the batch is smaller.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from verl_p40.errors import TrainingError, TripwireError
from verl_p40.smoke.model import Context, Device, Failed, Finding
from verl_p40.train import checkpoints, launch
from verl_p40.train.folder import RunFolder
from verl_p40.train.metrics import StepRow
from verl_p40.train.runspec import Request
from verl_p40.train.view import PlainView

RUN = "ppo"
WATCH = "watch"
WATCH_VARIABLE = "VERL_P40_SMOKE_WATCH"
_WATCH_MODULE = "verl_p40.smoke.watch"
_BATCH = 16

_COMMON = (
    f"data.train_batch_size={_BATCH}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={_BATCH}",
    f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={_BATCH}",
    f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={_BATCH}",
    f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={_BATCH}",
    f"critic.ppo_micro_batch_size_per_gpu={_BATCH}",
    f"actor_rollout_ref.model.external_lib={_WATCH_MODULE}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
)
_CUDA = (
    # What p40-ppo has on top of the demo: offloads, checkpointing, entropy in chunks.
    "trainer.device=cuda",
    "actor_rollout_ref.model.enable_gradient_checkpointing=true",
    "actor_rollout_ref.actor.fsdp_config.param_offload=false",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
    "critic.model.enable_gradient_checkpointing=true",
    "critic.model.fsdp_config.param_offload=true",
    "critic.model.fsdp_config.optimizer_offload=true",
)


def request(device: Device, steps: int, runs: Path) -> Request:
    """The run up to step ``steps``; two of them mean the same run folder."""
    overrides = (*_COMMON, *(_CUDA if device == "cuda" else ()))
    overrides += (f"trainer.total_training_steps={steps}",)
    return Request("cpu-demo", overrides, run=RUN, runs_dir=runs, tripwire=True)


def run_folder(scratch: Path) -> RunFolder:
    return RunFolder(scratch / "runs" / RUN)


def check_step(context: Context) -> Finding:
    """Step 1, saved. Raises Failed with the trainer's own error."""
    summary = _train(context, 1)
    row = _last_row(summary, 1)
    folder = run_folder(context.scratch)
    if checkpoints.newest(folder.checkpoints, critic=True) != 1:
        raise Failed("step 1 was trained, and there is no whole checkpoint of it")
    document = summary.document()
    operators = int(document["tripwire_operators"])
    return Finding(
        f"step 1 in {row.seconds or 0:.1f} s, KL {row.kl:.4f}, entropy {row.entropy:.2f}; "
        f"{operators:,} operators, none in half precision",
        context.category,
        {
            "step_seconds": row.seconds,
            "reward": row.reward,
            "kl": row.kl,
            "entropy": row.entropy,
            "value_loss": row.value_loss,
            "tripwire_operators": operators,
            "batch": _BATCH,
        },
    )


def check_resume(context: Context) -> Finding:
    """Step 2 from the checkpoint of step 1, with the state it loads compared by content."""
    summary = _train(context, 2)
    row = _last_row(summary, 2)
    if (summary.spec.action, summary.spec.step) != ("resume", 1):
        raise Failed(f"the run did not resume from step 1: {summary.spec.action}")
    folder = context.scratch / WATCH
    sizes = {role: compare(folder, role) for role in ("actor", "critic")}
    total = sum(sizes.values())
    return Finding(
        f"actor and critic: weights, optimizer and generators loaded as saved ({total:,} bytes); "
        f"step 2 in {row.seconds or 0:.1f} s",
        context.category,
        {"bytes": sizes, "step_seconds": row.seconds},
    )


def compare(folder: Path, role: str) -> int:
    """Compare what was loaded with what was saved; returns the bytes of state behind it.

    Raises:
        Failed: a part differs, was never saved or loaded, or had not changed since the start
            (then loading it would prove nothing).
    """
    saved = _read(folder / f"saved-global_step_1-{role}-0.json", f"{role}: nothing was saved")
    loaded = _read(folder / f"loaded-global_step_1-{role}-0.json", f"{role}: nothing was loaded")
    for part in ("model", "optimizer", "rng"):
        if saved[part] != loaded[part]:
            raise Failed(f"{role}: the {part} state loaded is not the one saved")
    if loaded["before"]["model"] == loaded["model"]:
        raise Failed(f"{role}: the weights before loading were the saved ones already")
    return int(loaded["bytes"])


def _read(path: Path, otherwise: str) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Failed(otherwise) from error
    return document


def _train(context: Context, steps: int) -> launch.Summary:
    watch = context.scratch / WATCH
    watch.mkdir(exist_ok=True)
    # Ray's workers inherit the trainer's environment, which inherits ours.
    os.environ[WATCH_VARIABLE] = str(watch)
    view = PlainView(Console(file=sys.stdout, width=160, soft_wrap=True))
    try:
        summary = launch.train(request(context.device, steps, context.scratch / "runs"), view)
    except (TrainingError, TripwireError) as error:
        print(error.message)
        raise Failed(error.message.splitlines()[0]) from error
    finally:
        view.close()
    if summary.outcome is None or summary.outcome.status != "finished":
        status = summary.outcome.status if summary.outcome else "finished before it began"
        raise Failed(f"the run was {status}")
    return summary


def _last_row(summary: launch.Summary, step: int) -> StepRow:
    """The row of ``step``, every figure of it finite."""
    row = summary.rows[-1] if summary.rows else None
    if row is None or row.step != step:
        raise Failed(f"verl reported no metrics of step {step}")
    for name in ("reward", "kl", "entropy", "value_loss", "seconds"):
        value = getattr(row, name)
        if value is None or not math.isfinite(value):
            raise Failed(f"step {step}: {name} is {value}")
    return row
