"""Seconds a sample: the public recipe and our presets, in one go, under the same cap.

    python benchmarks/throughput.py --case cpu               # in the training stack, minutes
    python benchmarks/throughput.py --case gpu --json FILE   # any NVIDIA GPU, capped to 22,912 MiB
    python benchmarks/throughput.py --case gpu --sides recipe,p40-ppo

Every side is `verl-p40 train`: the patched verl with Ray, its own timers, a step's time from its
metrics.jsonl. The first step, which warms up, and a step that validates or saves are left out.
`cpu` is the demo (a small model, its own data) at batch 1 and as the preset has it; `gpu` is a
model of Qwen2.5-0.5B's shape with random weights, prompts near the limit, responses of full
length; its side `vllm` is left out where there is no vLLM. Printed: seconds a step and a sample (medians), the share of each phase, the peak of
allocated and reserved memory, and the ratio of each side to the first, which is the recipe.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

PHASES = {
    "gen": "rollout",
    "old_log_prob": "old log-prob",
    "ref": "reference",
    "values": "values",
    "adv": "advantage",
    "update_critic": "critic update",
    "update_actor": "actor update",
}
"""verl's names of its timers (timing_s/NAME), and ours of the phases."""

_ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
_ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Side:
    """One command. ``samples`` is how many responses a step trains on."""

    key: str
    name: str
    preset: str
    samples: int
    overrides: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


def _micro(update: int, log_prob: int) -> tuple[str, ...]:
    return (
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu={update}",
        f"critic.ppo_micro_batch_size_per_gpu={update}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={log_prob}",
        f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={log_prob}",
        f"critic.forward_micro_batch_size_per_gpu={log_prob}",
    )


_ONE = ("data.train_batch_size=1", f"{_ACTOR}.ppo_mini_batch_size=1", *_micro(1, 1))
_SDPA = (f"{_ATTENTION}=sdpa",)
_CHUNKED = (f"{_ACTOR}.entropy_from_logits_with_chunking=true",)
_EXPANDABLE = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
UTILIZATION = "actor_rollout_ref.rollout.gpu_memory_utilization={utilization}"
"""vLLM takes a share of the whole card; the cap's share of it is filled in."""

CASES = {
    "cpu": (
        Side("one", "batch 1, eager", "cpu-demo", 1, (*_ONE, "critic.ppo_mini_batch_size=1")),
        Side("demo", "cpu-demo, eager", "cpu-demo", 64),
        Side("sdpa", "cpu-demo, sdpa", "cpu-demo", 64, _SDPA),
    ),
    "gpu": (
        Side("recipe", "p40-recipe", "p40-recipe", 1),
        Side("p40-ppo", "p40-ppo", "p40-ppo", 32),
        Side("sdpa", "p40-ppo, sdpa", "p40-ppo", 32, _SDPA),
        Side("expandable", "p40-ppo, expandable segments", "p40-ppo", 32, env=_EXPANDABLE),
        Side(
            "log-prob",
            "p40-ppo, sdpa, log-prob in 8s, chunked entropy",
            "p40-ppo",
            32,
            (*_SDPA, *_CHUNKED, *_micro(4, 8)),
        ),
        Side(
            "batch-64",
            "p40-ppo, sdpa, batch 64",
            "p40-ppo",
            64,
            (*_SDPA, "data.train_batch_size=64", f"{_ACTOR}.ppo_mini_batch_size=64"),
        ),
        Side("vllm", "p40-ppo-vllm", "p40-ppo-vllm", 32, (UTILIZATION,)),
        Side(
            "vllm-sdpa",
            "p40-ppo-vllm, sdpa, log-prob in 8s, chunked entropy",
            "p40-ppo-vllm",
            32,
            (UTILIZATION, *_SDPA, *_CHUNKED, *_micro(4, 8)),
        ),
    ),
}


@dataclass
class Timed:
    """Medians over the steps that count. Seconds and GB (as verl reports them)."""

    name: str
    steps: int
    step: float
    sample: float
    shares: dict[str, float] = field(default_factory=dict)
    allocated: float | None = None
    reserved: float | None = None


def run_side(
    side: Side, steps: int, common: tuple[str, ...], home: Path, env: Any, utilization: float
) -> Timed:
    """Train ``steps`` + 1 steps and read the clock of all but the first.

    ``utilization``: the share of this card that is the preset's share of a P40.

    Raises:
        RuntimeError: the command failed.
    """
    words = (
        *(word.format(utilization=utilization) for word in side.overrides),
        f"trainer.total_training_steps={steps + 1}",
        "trainer.total_epochs=1000",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *common,
    )
    command = [sys.executable, "-m", "verl_p40.cli.main", "train", side.preset]
    done = subprocess.run(
        [*command, "--run", side.key, "--retries", "0", *words],
        cwd=home,
        env={**env, **dict(side.env)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"{side.name}: exit code {done.returncode}\n{done.stdout[-3000:]}")
    lines = (home / "runs" / side.key / "metrics.jsonl").read_text().splitlines()
    data = [json.loads(line)["data"] for line in lines]
    # The last step is followed by verl's closing validation.
    return summarise(side, data[1:-1] if len(data) > 2 else data[1:])


def summarise(side: Side, data: list[dict[str, float]]) -> Timed:
    step = statistics.median(d["timing_s/step"] for d in data)
    shares = {
        label: statistics.median(d.get(f"timing_s/{timer}", 0.0) for d in data) / step
        for timer, label in PHASES.items()
    }
    shares["other"] = 1 - sum(shares.values())
    memory = {
        key: max((d[f"perf/max_memory_{key}_gb"] for d in data if d.get(f"perf/max_memory_{key}_gb")),
                 default=None)
        for key in ("allocated", "reserved")
    }  # fmt: skip
    return Timed(
        side.name, len(data), step, step / side.samples, shares,
        memory["allocated"], memory["reserved"],
    )  # fmt: skip


def table(timed: list[Timed]) -> str:
    """Markdown: a row a side, the first being what the others are compared with."""
    phases = list(timed[0].shares)
    head = ["side", "s a step", "s a sample", "ratio", *phases, "allocated / reserved (GB)"]
    rows = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one in timed:
        memory = f"{one.allocated:.1f} / {one.reserved:.1f}" if one.reserved else "-"
        cells = [
            one.name,
            f"{one.step:.2f}",
            f"{one.sample:.4g}",
            f"{timed[0].sample / one.sample:.1f}",
            *(f"{100 * one.shares[phase]:.0f} %" for phase in phases),
            memory,
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def gpu_files(home: Path) -> tuple[str, ...]:
    """Model, prompts and cap of the GPU case; the overrides that name them."""
    import memory
    import pyarrow as pa
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    case = memory.Case("0.5B", "p40-ppo", "Qwen/Qwen2.5-0.5B")
    memory.build_model(case, home / "model", "cuda")
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(home / "model")
    row = {
        "data_source": "openai/gsm8k",
        # A token a byte; GSM8K's prompts go up to about 200 tokens.
        "prompt": [{"role": "user", "content": "x" * 195}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0},
    }
    for name, rows in (("train", 512), ("test", 4)):
        pq.write_table(pa.Table.from_pylist([row] * rows), home / f"{name}.parquet")
    (home / "capped.py").write_text(
        "import torch\n"
        "total = torch.cuda.get_device_properties(0).total_memory\n"
        f"torch.cuda.set_per_process_memory_fraction(min(1.0, {memory.CAP_MIB} * 2**20 / total))\n"
    )
    return (
        f"actor_rollout_ref.model.path={home}/model",
        "actor_rollout_ref.model.external_lib=capped",
        f"data.train_files={home}/train.parquet",
        f"data.val_files={home}/test.parquet",
    )


def chosen_sides(case: str, wanted: str) -> list[Side]:
    """The sides named in ``wanted``, or all that can run here.

    Raises:
        ValueError: naming one that there is not.
    """
    sides = {side.key: side for side in CASES[case]}
    if wanted:
        names = wanted.split(",")
        unknown = [name for name in names if name not in sides]
        if unknown:
            raise ValueError(f"no side {unknown[0]!r}: {', '.join(sides)}")
        return [sides[name] for name in names]
    has_vllm = importlib.util.find_spec("vllm") is not None
    return [s for s in sides.values() if has_vllm or not s.preset.endswith("-vllm")]


def cap_share() -> float:
    """What a P40 has, as a share of this card's memory."""
    import memory
    import torch

    return min(1.0, memory.CAP_MIB * 2**20 / torch.cuda.get_device_properties(0).total_memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed, each side")
    parser.add_argument("--sides", default="", help="some of them, by name; the first is the base")
    parser.add_argument("--json", type=Path, help="write the figures there")
    asked = parser.parse_args()
    if asked.steps < 2:
        parser.error("--steps: at least 2, for the last is left out")
    try:
        sides = chosen_sides(asked.case, asked.sides)
    except ValueError as error:
        parser.error(f"--sides: {error}")
    timed: list[Timed] = []
    with tempfile.TemporaryDirectory(prefix="vp40-throughput-") as scratch:
        home = Path(scratch)
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(home)]),
            "VERL_P40_RUNS": str(home / "runs"),
        }
        common = gpu_files(home) if asked.case == "gpu" else ()
        utilization = round(0.3 * cap_share(), 4) if asked.case == "gpu" else 0.3
        for side in sides:
            print(f"{time.strftime('%X')} {side.name}", file=sys.stderr, flush=True)
            try:
                timed.append(run_side(side, asked.steps, common, home, env, utilization))
            except RuntimeError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            if asked.json:
                asked.json.write_text(json.dumps([asdict(t) for t in timed], indent=2) + "\n")
    print(table(timed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
