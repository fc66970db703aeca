"""The model and the data: head size against 48 KB, dtype, the rows of the parquet files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from verl_p40.doctor.checks import stack
from verl_p40.doctor.checks.network import default_model
from verl_p40.doctor.machine import Machine
from verl_p40.doctor.model import Outcome, check, failure, na, note, ok, warning
from verl_p40.errors import DataError
from verl_p40.hardware.p40 import P40
from verl_p40.health import CHECKS
from verl_p40.plan import shapes
from verl_p40.stack import paths

PREFIX_BYTES = {64: 81_920, 128: 131_072}
"""Shared memory of vLLM 0.8.5's ``prefix_prefill._fwd_kernel`` as released, in FP32, by head size:
compiled for sm_61 with Triton 3.2 (docs/kernels.md)."""


@check("model", "Model against the card", replayable=False)
def model(machine: Machine) -> Outcome:
    """Its head size decides what vLLM's prefix kernel wants of a block's 48 KB."""
    name = default_model(machine)
    try:
        shape = shapes.find(name)
    except DataError as error:
        return na(error.message, "verl-p40 doctor --model FOLDER")
    limit = P40.shared_memory_per_block
    dtype = _dtype(name)
    text = f"{name}: {shape.parameters / 1e6:,.0f}M parameters, head size {shape.head_dim}"
    if dtype not in {"", "float32"}:
        text += f", saved as {dtype} (loaded as FP32 by the presets)"
    need = PREFIX_BYTES.get(shape.head_dim)
    facts: dict[str, Any] = {
        "parameters": shape.parameters,
        "head_size": shape.head_dim,
        "prefix_bytes": need,
    }
    if need is None:
        return note(
            f"{text}: what vLLM's prefix kernel takes at this head size is not known here",
            "verl-p40 kernels triton prefix_prefill   # matters with rollout.name=vllm only",
            **facts,
        )
    if need > limit:
        return ok(
            f"{text}; the HF rollout needs no Triton; vLLM's prefix kernel as released wants "
            f"{need:,} of {limit:,} bytes: patched, or prefix caching off",
            details=("docs/vllm.md, docs/kernels.md",),
            **facts,
        )
    return ok(text, **facts)


def _dtype(name: str) -> str:
    try:
        raw = json.loads((Path(name).expanduser() / "config.json").read_text(encoding="utf-8"))
        return str(raw.get("torch_dtype", "")).removeprefix("torch.")
    except (OSError, ValueError, AttributeError):
        return ""


@check("data", "Data sets", limit=90, fast=False, replayable=False)
def data(machine: Machine) -> Outcome:
    """Every row of the parquet files, read by the stack's own pyarrow."""
    home = paths.data_home()
    named = [Path(name) for name in machine.subject.data]
    files = named or sorted(home.glob("*/*.parquet")) if named or home.is_dir() else []
    if not files:
        return na("none is prepared: the first run does it", "verl-p40 data gsm8k")
    found = stack.ready()
    if found is None:
        return stack.absent()
    rows, told = 0, []
    for file in files[:6]:
        try:
            done = found.run_module(
                "verl_p40.data.schema", [str(file), "--json"], capture=True, timeout=60
            )
            answer = json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            return warning(f"{file.name} takes longer than a minute to read", f"ls -l {file}")
        except (ValueError, IndexError):
            return warning(f"{file.name} could not be checked", f"verl-p40 data check {file}")
        if not answer["ok"]:
            return failure(answer["message"], answer.get("fix") or "verl-p40 data gsm8k")
        rows += answer["rows"]
        told.append(f"{file.parent.name}/{file.stem} {answer['rows']:,}")
    return ok(f"{rows:,} rows, every one as verl wants it ({', '.join(told)})")


@check("training", "Training that runs now", replayable=False)
def training(machine: Machine) -> Outcome:
    """A run that is under way takes the card, or stands still."""
    runs = paths.runs_home()
    if not runs.is_dir():
        return na("no run has been started here")
    health = CHECKS["train"](str(runs))
    state = health.facts.get("state")
    if state in {"training", "preparing"} or (health.ok and "finished" not in health.why):
        return note(f"{health.why}: it has the card", "verl-p40 monitor")
    return ok(f"none ({health.why})")
