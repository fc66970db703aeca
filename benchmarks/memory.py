"""What each phase of training really allocates, beside what ``verl-p40 plan`` says.

verl's own workers run every phase of a step, with random weights of a real model's shape, and the
allocator is asked for its peak: ``torch.cuda.max_memory_allocated`` on a GPU (any NVIDIA card; the
process is capped to what a P40 has), torch's memory profiler on the CPU.

    python benchmarks/memory.py --case cpu            # in the training stack, about two minutes
    python benchmarks/memory.py --case cpu-whole      # 0.5B, 1.5B and 3B: 24 GB of memory, minutes
    python benchmarks/memory.py --case gpu --json OUT # every GPU case
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CAP_MIB = 22_912
"""Usable memory of a P40 with ECC on, its default, under older drivers: the smallest figure."""


@dataclass(frozen=True)
class Case:
    """One config to measure. ``model`` is a known id, ``layers`` cuts it down for a CPU."""

    name: str
    preset: str
    model: str
    overrides: tuple[str, ...] = ()
    layers: int | None = None
    prompts: int = 8


_ACTOR = "actor_rollout_ref.actor"
_MICRO = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={0}",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={0}",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={0}",
    "critic.ppo_micro_batch_size_per_gpu={0}",
)
_SDPA = ("actor_rollout_ref.model.override_config.attn_implementation=sdpa",)
_PLAIN = (
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "critic.model.enable_gradient_checkpointing=false",
)


def _batch(size: int, micro: int) -> tuple[str, ...]:
    return (
        f"data.train_batch_size={size}",
        f"{_ACTOR}.ppo_mini_batch_size={size}",
        *(text.format(micro) for text in _MICRO),
    )


_LENGTHS = ("data.max_prompt_length=48", "data.max_response_length=16")
_HALF, _ONE, _THREE = "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B"
_ALL_OFF = (
    f"{_ACTOR}.fsdp_config.optimizer_offload=false",
    "critic.model.fsdp_config.param_offload=false",
    "critic.model.fsdp_config.optimizer_offload=false",
)
_PAIR = ("actor_rollout_ref.rollout.n=2",)
_SHORT = ("data.max_response_length=64",)

CASES = {
    "cpu": (
        Case("0.5B-2", "p40-ppo", _HALF, (*_batch(4, 2), *_LENGTHS), layers=2, prompts=4),
        Case(
            "0.5B-2 sdpa, no checkpointing",
            "p40-ppo",
            _HALF,
            (*_batch(4, 2), *_LENGTHS, *_SDPA, *_PLAIN),
            layers=2,
            prompts=4,
        ),
    ),
    # Whole models: a host with 24 GB of memory, and minutes of two cores for each.
    "cpu-whole": (
        Case("whole 0.5B PPO", "p40-ppo", _HALF, (*_batch(2, 2), *_LENGTHS), prompts=2),
        Case("whole 1.5B LoRA", "p40-lora", _ONE, (*_batch(2, 2), *_LENGTHS, *_PAIR), prompts=2),
        Case("whole 3B LoRA", "p40-lora", _THREE, (*_batch(2, 2), *_LENGTHS, *_PAIR), prompts=2),
    ),
    "gpu": (
        Case("p40-lora 1.5B", "p40-lora", _ONE, prompts=8),
        Case("p40-ppo micro 4 eager", "p40-ppo", _HALF, _batch(8, 4)),
        Case("p40-grpo", "p40-grpo", _HALF, prompts=8),
        Case("0.5B batch 1, no offload", "p40-ppo", _HALF, (*_batch(1, 1), *_ALL_OFF), prompts=1),
        Case("0.5B micro 8 sdpa", "p40-ppo", _HALF, (*_batch(16, 8), *_SDPA), prompts=16),
        Case(
            "0.5B micro 2 no checkpointing", "p40-ppo", _HALF, (*_batch(4, 2), *_PLAIN), prompts=4
        ),
        Case("p40-lora 3B", "p40-lora", _THREE, _SHORT, prompts=8),
        Case("p40-grpo-1.5b", "p40-grpo-1.5b", _ONE, _SHORT, prompts=8),
    ),
}


@dataclass
class Measured:
    """Bytes of one phase: before, at its peak, after; and what the allocator held at the peak."""

    before: int
    peak: int
    after: int
    reserved: int | None
    seconds: float


@dataclass
class Result:
    case: str
    device: str
    phases: dict[str, Measured] = field(default_factory=dict)
    predicted: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def live_bytes() -> int:
    """Bytes of all live CPU tensors that Python can reach, each storage once."""
    import torch

    seen: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


@contextmanager
def cpu_meter(into: dict[str, Measured], name: str) -> Iterator[None]:
    """torch's memory profiler: every allocation and release of the CPU allocator, summed up."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()
    before, started = live_bytes(), time.monotonic()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield
    seconds = time.monotonic() - started
    events = profiler.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    now = peak = before
    for _, change in changes:
        now += change
        peak = max(peak, now)
    into[name] = Measured(before, peak, now, None, seconds)


_backward_peaks: list[int] = []
"""Peaks until each optimizer step of the phase being measured."""


@contextmanager
def cuda_meter(into: dict[str, Measured], name: str) -> Iterator[None]:
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    _backward_peaks.clear()
    before, started = torch.cuda.memory_allocated(), time.monotonic()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        last = torch.cuda.max_memory_allocated()
        seconds = time.monotonic() - started
        after, reserved = torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()
        backward = max(_backward_peaks, default=0)
        into[name] = Measured(before, max(last, backward), after, reserved, seconds)
        if _backward_peaks:
            into[name + ": backward"] = Measured(before, backward, after, reserved, seconds)
            into[name + ": step"] = Measured(before, last, after, reserved, seconds)


def split_at_step(trainer: Any) -> None:
    """Note the peak of forward and backward before the optimizer step hides it."""
    import torch

    step = trainer._optimizer_step

    def noted() -> Any:
        torch.cuda.synchronize()
        _backward_peaks.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return step()

    trainer._optimizer_step = noted


def one_rank() -> None:
    """The environment that verl's Ray worker group gives a single worker."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(names, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HF_HUB_OFFLINE="1")


def build_model(case: Case, folder: Path, device: str) -> None:
    """Random weights of the case's shape, and a byte-level tokenizer, saved to ``folder``."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from verl_p40.plan.shapes import known_config

    raw = dict(known_config(case.model))
    if case.layers:
        raw.update(num_hidden_layers=case.layers, max_window_layers=case.layers)
    # never sampled but by chance, so that every response has its full length
    raw.update(bos_token_id=None, eos_token_id=raw["vocab_size"] - 1, pad_token_id=0)
    kind = raw.pop("model_type")
    config = AutoConfig.for_model(kind, **raw)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)
    # safetensors copies a file before it writes it, and what was read lives until its file is done
    model.save_pretrained(folder, max_shard_size="250MB")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)


def compose_case(case: Case, folder: Path, device: str) -> dict[str, Any]:
    import verl

    from verl_p40.train.compose import compose

    overrides = (
        *case.overrides,
        f"actor_rollout_ref.model.path={folder}",
        f"trainer.device={device}",
    )
    config_folder = Path(verl.__file__).parent / "trainer" / "config"
    return compose(case.preset, overrides, config_folder).config


def prompts_of(config: dict[str, Any], count: int) -> Any:
    """Prompts of full length, none of them padded: the most that they can take."""
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    length = config["data"]["max_prompt_length"]
    ids = torch.randint(3, 200, (count, length))
    mask = torch.ones_like(ids)
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1}
    return DataProto(batch=TensorDict(tensors, batch_size=count))


NAMES = {"log_prob": "log-prob", "ref": "reference"}
"""verl's words for phases, and the plan's."""


def compare(case: str, phases: dict[str, Measured], predicted: dict[str, int]) -> list[str]:
    """Lines of predicted against measured, in GB; the three models' loading is one phase."""
    peaks: dict[str, int] = {}
    for name, phase in phases.items():
        key = "load" if name.startswith("load ") else NAMES.get(name, name)
        if key in predicted:
            peaks[key] = max(peaks.get(key, 0), phase.peak)
    return [
        f"{case:<32} {name:<14} {predicted[name] / 1e9:7.3f} {peak / 1e9:7.3f} "
        f"{100 * (predicted[name] / peak - 1):+6.1f} %"
        for name, peak in peaks.items()
    ]


def run_case(case: Case, device: str, say: Callable[[str], None]) -> Result:
    """Run every phase of ``case`` once to warm up where that matters, and measure it."""
    import torch
    from omegaconf import OmegaConf

    from verl_p40.plan.fit import make_plan
    from verl_p40.plan.shapes import find

    result = Result(case.name, torch.cuda.get_device_name() if device == "cuda" else "cpu")
    meter = cuda_meter if device == "cuda" else cpu_meter
    folder = Path(tempfile.mkdtemp(prefix="verl-p40-memory-"))
    try:
        say(f"{time.strftime('%X')} {case.name}: building the model")
        build_model(case, folder, device)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        plain = compose_case(case, folder, device)
        # the batch that is really handed over, which the benchmark may cut down
        plain["data"]["train_batch_size"] = case.prompts
        planned = make_plan(plain, CAP_MIB * 2**20, find(str(folder)))
        result.predicted = {phase.name: phase.allocated for phase in planned.phases}
        config = OmegaConf.create(plain)

        @contextmanager
        def measure(name: str) -> Iterator[None]:
            with meter(result.phases, name):
                yield

        try:
            _run_phases(case, config, measure, say)
        except Exception as error:  # one case must not cost the others
            result.error = f"{type(error).__name__}: {error}"[:600]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _run_phases(
    case: Case, config: Any, measure: Callable[[str], Any], say: Callable[[str], None]
) -> None:
    import torch
    from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

    gae = config.algorithm.adv_estimator == "gae"
    lora = config.actor_rollout_ref.model.lora_rank > 0
    say(f"{case.name}: load")
    actor_config = config.copy().actor_rollout_ref
    critic = reference = None
    if gae:
        critic = CriticWorker(config.critic)
        with measure("load critic"):
            critic.init_model()
    if not lora:
        reference = ActorRolloutRefWorker(config.copy().actor_rollout_ref, role="ref")
        with measure("load reference"):
            reference.init_model()
    actor = ActorRolloutRefWorker(actor_config, role="actor_rollout")
    with measure("load actor"):
        actor.init_model()
    if config.trainer.device == "cuda":
        split_at_step(actor.actor)
        if critic is not None:
            split_at_step(critic.critic)
    for turn in ("first ", ""):
        batch = batch_of(config, case.prompts * config.actor_rollout_ref.rollout.n)
        if not turn:
            # random weights end a response early only by chance, one in 151,936 a token
            with measure("rollout"):
                batch = actor.generate_sequences(prompts_of(config, case.prompts))
        batch.meta_info["temperature"] = 1.0
        with measure(turn + "log_prob"):
            old = actor.compute_log_prob(batch).batch["old_log_probs"]
        with measure(turn + "ref"):
            (actor if lora else reference).compute_ref_log_prob(batch)
        batch = batch.to("cpu")
        count, length = batch.batch["input_ids"].shape
        batch.meta_info.update(global_token_num=[length] * count, temperature=1.0)
        if critic is not None:
            with measure(turn + "values"):
                values = critic.compute_values(batch).batch["values"]
            batch.batch["values"], batch.batch["returns"] = values, values + 1
            with measure(turn + "critic update"):
                critic.update_critic(batch)
        batch.batch["old_log_probs"] = old
        batch.batch["advantages"] = torch.ones_like(old)
        if config.actor_rollout_ref.actor.use_kl_loss:
            batch.batch["ref_log_prob"] = old
        with measure(turn + "actor update"):
            actor.update_actor(batch)
    if critic is not None:
        say(f"{case.name}: checkpoint")
        place = tempfile.mkdtemp(prefix="verl-p40-memory-")
        try:
            with measure("checkpoint"):
                actor.save_checkpoint(f"{place}/actor", global_step=1)
                if critic is not None:
                    critic.save_checkpoint(f"{place}/critic", global_step=1)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def batch_of(config: dict[str, Any], count: int) -> Any:
    """What a rollout returns, every prompt and response of full length."""
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    prompt, response = config["data"]["max_prompt_length"], config["data"]["max_response_length"]
    ids = torch.randint(3, 200, (count, prompt + response))
    mask = torch.ones_like(ids)
    tensors = {
        "input_ids": ids,
        "responses": ids[:, prompt:],
        "attention_mask": mask,
        "position_ids": mask.cumsum(-1) - 1,
    }
    return DataProto(batch=TensorDict(tensors, batch_size=count))


def measure_one(name: str, device: str) -> Result:
    import torch

    one_rank()
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_MIB * 2**20 / total))
    (case,) = [case for group in CASES.values() for case in group if case.name == name]
    return run_case(case, device, lambda text: print(text, file=sys.stderr))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--case", choices=sorted(CASES), default="cpu")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--json", type=Path, help="write the measurements to this file too")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda" if options.case == "gpu" else "cpu"
    if options.inner:
        options.json.write_text(json.dumps(asdict(measure_one(options.inner, device))))
        return 0
    results, missing = [], 0
    print(f"{'case':<32} {'phase':<14} {'plan':>7} {'real':>7}  (GB, peak of the allocator)")
    for case in CASES[options.case]:
        if options.only not in case.name:
            continue
        # a process each: what one leaves behind is not the next one's
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "result.json"
            command = [sys.executable, __file__, "--case", options.case, "--inner", case.name]
            done = subprocess.run([*command, "--json", str(file)], stdout=subprocess.DEVNULL)
            if done.returncode != 0:
                missing += 1
                print(f"{case.name}: exit code {done.returncode}", flush=True)
                continue
            result = json.loads(file.read_text())
        results.append(result)
        phases = {name: Measured(**phase) for name, phase in result["phases"].items()}
        for line in compare(case.name, phases, result["predicted"]):
            print(line, flush=True)
        if result["error"]:
            missing += 1
            print(f"{case.name}: {result['error']}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
