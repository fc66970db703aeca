"""What can be known to be wrong before anything heavy starts: batch sizes, devices, disk.

The rules of verl are its own assertions (``RayPPOTrainer._validate_config`` and the
``normalize config`` blocks of ``ActorRolloutRefWorker`` and ``CriticWorker`` in 0.4.1), which
would otherwise fail minutes later, inside a worker, without saying which setting to change.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_p40.errors import DiskError, MachineError, UsageError
from verl_p40.hardware.cards import cards
from verl_p40.health.check import LIMITS, LimitError, limit
from verl_p40.train.compose import select

BYTES_PER_PARAMETER = 12
"""FP32 weights (4) and Adam's two FP32 moments (8): what verl saves of one trained model."""

_SPARE = 500_000_000
"""Bytes left for logs, Ray's session and everyone else."""


def uses_critic(config: Mapping[str, Any]) -> bool:
    """verl 0.4.1 trains a critic with GAE only."""
    return bool(select(config, "algorithm.adv_estimator") == "gae")


def uses_reference(config: Mapping[str, Any]) -> bool:
    return bool(
        select(config, "algorithm.use_kl_in_reward")
        or select(config, "actor_rollout_ref.actor.use_kl_loss")
    )


def check_batches(config: Mapping[str, Any]) -> list[str]:
    """Check the batch sizes against one another, as verl will.

    Returns:
        Warnings: what verl accepts but hardly anyone means.

    Raises:
        UsageError: naming both settings and a value that fits.
    """
    workers = _positive(config, "trainer.n_gpus_per_node") * _positive(config, "trainer.nnodes")
    batch = _positive(config, "data.train_batch_size")
    samples = _positive(config, "actor_rollout_ref.rollout.n")
    if batch * samples % workers:
        raise UsageError(
            f"data.train_batch_size x rollout.n is {batch * samples}, which does not divide "
            f"among {workers} workers",
            fix=f"data.train_batch_size={_up(batch, workers)}",
        )
    parallel = _positive(config, "actor_rollout_ref.rollout.tensor_model_parallel_size")
    if workers % parallel:
        raise UsageError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size ({parallel}) does not divide "
            f"the number of workers ({workers})",
            fix="actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        )
    warnings = _check_model(config, "actor_rollout_ref.actor", batch, samples, workers)
    _check_micro_set(config, "actor_rollout_ref.rollout", "log_prob_micro_batch_size")
    if uses_reference(config):
        _check_micro_set(config, "actor_rollout_ref.ref", "log_prob_micro_batch_size")
    if uses_critic(config):
        warnings += _check_model(config, "critic", batch, samples, workers)
    if select(config, "reward_model.enable"):
        _check_micro_set(config, "reward_model", "micro_batch_size", dynamic="use_dynamic_bsz")
    return list(dict.fromkeys(warnings))


def _check_model(
    config: Mapping[str, Any], section: str, batch: int, samples: int, workers: int
) -> list[str]:
    mini_key = f"{section}.ppo_mini_batch_size"
    if select(config, f"{section}.use_dynamic_bsz"):
        return []
    mini = _positive(config, mini_key)
    micro_key, micro = _check_micro_set(config, section, "ppo_micro_batch_size")
    if mini > batch:
        raise UsageError(
            f"{mini_key} ({mini}) is larger than data.train_batch_size ({batch})",
            fix=f"{mini_key}={batch}",
        )
    # verl divides the mini batch among the workers; a deprecated whole-batch micro size too.
    per_worker = mini * samples // workers
    if not micro_key.endswith("_per_gpu"):
        micro = max(micro // workers, 1)
    if per_worker == 0 or per_worker % micro:
        fits = [m for m in range(1, max(per_worker, 1) + 1) if per_worker and per_worker % m == 0]
        nearest = min(fits, key=lambda m: abs(m - micro), default=1)
        raise UsageError(
            f"{micro_key} ({micro}) does not divide the mini batch of {per_worker} samples "
            f"a worker ({mini_key} {mini} x rollout.n {samples} / {workers} workers)",
            fix=f"{micro_key}={nearest}" if per_worker else f"{mini_key}={workers}",
        )
    if batch % mini:
        return [
            f"data.train_batch_size ({batch}) is not a multiple of {mini_key} ({mini}): "
            "the last mini batch of each step is smaller, and its gradient scaled down"
        ]
    return []


def _check_micro_set(
    config: Mapping[str, Any],
    section: str,
    name: str,
    dynamic: str = "log_prob_use_dynamic_bsz",
) -> tuple[str, int]:
    """The micro batch setting of a section: verl wants one of the two spellings, not both."""
    whole, each = f"{section}.{name}", f"{section}.{name}_per_gpu"
    has_whole, has_each = select(config, whole) is not None, select(config, each) is not None
    if has_whole and has_each:
        raise UsageError(
            f"{whole} and {each} are both set, and verl takes only one",
            fix=f"{whole}=null",
        )
    if not has_whole and not has_each:
        if select(config, f"{section}.{dynamic}"):
            return each, 1
        raise UsageError(f"{each} is not set", fix=f"{each}=1")
    key = each if has_each else whole
    return key, _positive(config, key)


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = select(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{key} is {value!r}, and must be a whole number of at least 1")
    number: int = value
    return number


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def check_limits() -> None:
    """Refuse limits of health (a trainer that exceeds them by far is ended) that are no seconds.

    Raises:
        UsageError: naming the variable.
    """
    try:
        for variable in LIMITS:
            limit(variable)
    except LimitError as error:
        raise UsageError(str(error), fix="seconds, as docs/services.md lists them") from error


def check_device(config: Mapping[str, Any], preset: str) -> None:
    """Refuse a GPU config on a machine without CUDA, and too few GPUs.

    Raises:
        MachineError, UsageError.
    """
    device = select(config, "trainer.device")
    if device == "cpu":
        return
    if device != "cuda":
        raise UsageError(f"trainer.device is {device!r}", fix="trainer.device=cuda or cpu")
    wanted = int(select(config, "trainer.n_gpus_per_node") or 1)
    found = cuda_devices()
    if found == 0:
        raise MachineError(
            f"preset {preset} trains on a GPU and this machine has no CUDA device",
            fix="train on the CPU: verl-p40 train cpu-demo; in a container, start it with the "
            "NVIDIA runtime (docker run --gpus all)",
        )
    if found < wanted:
        raise MachineError(
            f"trainer.n_gpus_per_node is {wanted} and this machine has {found} CUDA device(s)",
            fix=f"trainer.n_gpus_per_node={found}",
        )


def cuda_devices() -> int:
    """How many CUDA devices the driver shows; 0 without a driver."""
    return len(cards())


def planned_steps(config: Mapping[str, Any], rows: int) -> int:
    """How many steps verl will count up to: the set number, or whole batches times epochs."""
    fixed = select(config, "trainer.total_training_steps")
    return int(fixed) if fixed is not None else available_steps(config, rows)


def available_steps(config: Mapping[str, Any], rows: int) -> int:
    """Steps the data is enough for: whole batches an epoch, times epochs."""
    batch = int(select(config, "data.gen_batch_size") or select(config, "data.train_batch_size"))
    return rows // batch * int(select(config, "trainer.total_epochs"))


def check_steps(config: Mapping[str, Any], rows: int) -> None:
    """Refuse a number of steps that the data ends before: verl would stop without a word.

    Raises:
        UsageError: naming the epochs that would be enough.
    """
    batch = int(select(config, "data.gen_batch_size") or select(config, "data.train_batch_size"))
    each = rows // batch
    if each == 0:
        raise UsageError(
            f"data.train_batch_size is {batch} and the training set has {rows} usable rows",
            fix=f"data.train_batch_size={max(rows, 1)} or less",
        )
    wanted = planned_steps(config, rows)
    if wanted > available_steps(config, rows):
        epochs = -(-wanted // each)
        raise UsageError(
            f"trainer.total_training_steps is {wanted}, and the data ends at step "
            f"{available_steps(config, rows)} ({each} steps an epoch)",
            fix=f"trainer.total_epochs={epochs}",
        )


def count_parameters(model: Path) -> int | None:
    """Parameters of a local model folder, read from its safetensors headers; None if unknown.

    The header is a little-endian 64-bit length followed by that much JSON
    (https://github.com/huggingface/safetensors#format).
    """
    total = 0
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            size = 1
            for dimension in tensor["shape"]:
                size *= dimension
            total += size
    return total or None


def checkpoint_bytes(config: Mapping[str, Any], parameters: int) -> int:
    """Estimated size of one checkpoint: what each trained model's save_contents hold."""
    sections = ["actor_rollout_ref.actor", *(["critic"] if uses_critic(config) else [])]
    total = 0
    for section in sections:
        contents = select(config, f"{section}.checkpoint.save_contents") or []
        each = 4 * ("model" in contents) + 8 * ("optimizer" in contents)
        total += parameters * (each + 4 * ("hf_model" in contents))
    return total


def check_disk(config: Mapping[str, Any], folder: Path, steps: int, already: int = 0) -> int:
    """Check that the checkpoints to come fit on the disk of ``folder``.

    Args:
        steps: how many steps are still to be trained.
        already: bytes of checkpoints that verl will have deleted by then.

    Returns:
        The bytes needed; 0 when nothing is saved or the model's size is unknown.

    Raises:
        DiskError: with the need, what is free, and the settings that lower it.
    """
    frequency = int(select(config, "trainer.save_freq") or -1)
    model = Path(str(select(config, "actor_rollout_ref.model.path")))
    parameters = count_parameters(model) if model.is_dir() else None
    if frequency <= 0 or parameters is None or steps <= 0:
        return 0
    kept = -(-steps // frequency)
    limits = [
        select(config, f"trainer.max_{name}_ckpt_to_keep")
        for name in ("actor", *(["critic"] if uses_critic(config) else []))
    ]
    if all(limits):
        # One more: an older one goes when the new one is whole.
        kept = min(kept, max(int(limit) for limit in limits) + 1)
    need = kept * checkpoint_bytes(config, parameters) - already + _SPARE
    place = next(p for p in [folder, *folder.parents] if p.exists())
    free = shutil.disk_usage(place).free
    if free < need:
        raise DiskError(
            f"{kept} checkpoint(s) need about {_gb(need)} and {place} has {_gb(free)} free",
            fix="choose another disk with --runs-dir, or keep fewer: "
            "trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=1",
        )
    return need


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
