"""The settings of a resolved config that decide its memory, read as verl's workers read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_p40.errors import UsageError
from verl_p40.plan import shapes
from verl_p40.plan.shapes import ModelShape
from verl_p40.train.checks import uses_critic, uses_reference
from verl_p40.train.compose import select

_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "half": 2, "bf16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Model:
    """One model of a run: policy, reference or value model, and how FSDP holds it."""

    role: str
    shape: ModelShape
    parameters: int
    trained: int
    """Parameters with a gradient: all of them, LoRA's, or none."""
    strategy: str
    wrapped: bool
    """Every decoder layer is a unit of its own; False: one flat parameter for the whole model."""
    world: int
    param_offload: bool
    optimizer_offload: bool
    cpu_policy: bool
    """fsdp2's ``offload_policy``: weights, gradients and Adam live on the host."""
    cuda: bool
    checkpointing: bool
    eager: bool

    @property
    def root(self) -> int:
        """Parameters of the unit that holds what is in no decoder layer."""
        return self.parameters - self.shape.layers * self.layer

    @property
    def layer(self) -> int:
        """Parameters of one unit below the root, its adapters included; 0 when there is none."""
        if not self.wrapped:
            return 0
        adapters = self.trained if self.lora else 0
        return self.shape.layer + adapters // self.shape.layers

    @property
    def lora(self) -> bool:
        return 0 < self.trained < self.parameters

    @property
    def unsharded(self) -> bool:
        """fsdp (1) on one card is NO_SHARD: the flat parameter is the storage of the weights."""
        return self.strategy == "fsdp" and self.world == 1


@dataclass(frozen=True)
class Setup:
    """A run, in numbers. Batch sizes are samples on one card."""

    actor: Model
    reference: Model | None
    critic: Model | None
    device: str
    world: int
    prompt: int
    response: int
    rollout_name: str
    rollout_batch: int
    rollout_bytes: int
    """Bytes of an element of vLLM's weights and cache."""
    validation_batch: int
    vllm_utilization: float
    lora_rank: int
    log_prob_micro: int
    reference_micro: int
    values_micro: int
    actor_micro: int
    critic_micro: int
    actor_micros: int
    """Micro batches that one optimizer step sums up."""
    critic_micros: int
    entropy_in_update: bool
    entropy_chunked: bool
    """Of the log-prob; with a bonus in the loss, autograd keeps every chunk of an update."""

    @property
    def sequence(self) -> int:
        return self.prompt + self.response


def read(config: Mapping[str, Any], model: ModelShape | None = None) -> Setup:
    """Read a resolved config.

    Args:
        model: sizes of the policy; default: those of ``actor_rollout_ref.model.path``.

    Raises:
        DataError: the model is not known.
        UsageError: a setting that no memory is known for.
    """
    policy = model or shapes.find(str(select(config, "actor_rollout_ref.model.path")))
    world = int(select(config, "trainer.n_gpus_per_node")) * int(select(config, "trainer.nnodes"))
    device = str(select(config, "trainer.device"))
    rollout = str(select(config, "actor_rollout_ref.rollout.name"))
    if rollout not in ("hf", "vllm"):
        raise UsageError(
            f"no memory model for actor_rollout_ref.rollout.name={rollout}", fix="hf or vllm"
        )
    rank = int(select(config, "actor_rollout_ref.model.lora_rank") or 0)
    # For the HF rollout verl makes the actor one unit, unless LoRA (fix/0009) forbids that.
    wrapped = rollout != "hf" or rank > 0
    actor = _model(config, "actor", policy, world, device, rank=rank, wrapped=wrapped)
    reference = None
    if uses_reference(config) and not rank:
        # With LoRA the reference is the actor with its adapter switched off.
        reference = _model(config, "reference", policy, world, device)
    critic = None
    if uses_critic(config):
        path = str(select(config, "critic.model.path"))
        same = model is not None or path == select(config, "actor_rollout_ref.model.path")
        critic = _model(
            config,
            "critic",
            policy if same else shapes.find(path),
            world,
            device,
            rank=int(select(config, "critic.model.lora_rank") or 0),
        )
    samples = int(select(config, "actor_rollout_ref.rollout.n"))
    batch = int(select(config, "data.train_batch_size"))
    chunk = select(config, "actor_rollout_ref.rollout.micro_batch_size")
    dtype = str(select(config, "actor_rollout_ref.rollout.dtype"))
    mini = {
        name: max(int(select(config, f"{name}.ppo_mini_batch_size") or batch) * samples // world, 1)
        for name in ("actor_rollout_ref.actor", "critic")
    }
    prompt = int(select(config, "data.max_prompt_length"))
    response = int(select(config, "data.max_response_length"))
    actor_micro = _micro(config, "actor_rollout_ref.actor", "ppo", world, prompt + response)
    critic_micro = _micro(config, "critic", "ppo", world, prompt + response)
    return Setup(
        actor=actor,
        reference=reference,
        critic=critic,
        device=device,
        world=world,
        prompt=prompt,
        response=response,
        rollout_name=rollout,
        rollout_batch=_chunked(-(-batch // world), chunk) * samples,
        rollout_bytes=_BYTES.get(dtype, 4),
        validation_batch=_validation_batch(config, world, chunk),
        vllm_utilization=float(select(config, "actor_rollout_ref.rollout.gpu_memory_utilization")),
        lora_rank=rank,
        log_prob_micro=_micro(
            config, "actor_rollout_ref.rollout", "log_prob", world, prompt + response
        ),
        reference_micro=_micro(
            config, "actor_rollout_ref.ref", "log_prob", world, prompt + response
        ),
        values_micro=_micro(config, "critic", "forward", world, prompt + response),
        actor_micro=actor_micro,
        critic_micro=critic_micro,
        actor_micros=-(-mini["actor_rollout_ref.actor"] // actor_micro),
        critic_micros=-(-mini["critic"] // critic_micro),
        entropy_in_update=bool(select(config, "actor_rollout_ref.actor.entropy_coeff")),
        entropy_chunked=bool(
            select(config, "actor_rollout_ref.actor.entropy_from_logits_with_chunking")
        ),
    )


def _model(
    config: Mapping[str, Any],
    role: str,
    shape: ModelShape,
    world: int,
    device: str,
    *,
    rank: int = 0,
    wrapped: bool = True,
) -> Model:
    section = "critic" if role == "critic" else "actor_rollout_ref"
    holder = "critic.model" if role == "critic" else "actor_rollout_ref.actor"
    strategy = str(select(config, "critic.strategy" if role == "critic" else f"{holder}.strategy"))
    if strategy not in ("fsdp", "fsdp2"):
        raise UsageError(f"no memory model for strategy={strategy}", fix="fsdp or fsdp2")
    base = shape.value_parameters if role == "critic" else shape.parameters
    adapter = rank * shape.layers * shape.linear_inputs_and_outputs
    fsdp = f"{holder}.fsdp_config"
    policy = strategy == "fsdp2" and (
        role == "reference" or bool(select(config, f"{fsdp}.offload_policy"))
    )
    return Model(
        role=role,
        shape=shape,
        parameters=base + adapter,
        trained=0 if role == "reference" else (adapter or base),
        strategy=strategy,
        wrapped=wrapped or strategy == "fsdp2",
        world=world,
        param_offload=role == "reference" or bool(select(config, f"{fsdp}.param_offload")),
        optimizer_offload=bool(select(config, f"{fsdp}.optimizer_offload")),
        cpu_policy=policy and device == "cuda",
        cuda=device == "cuda",
        checkpointing=bool(select(config, f"{section}.model.enable_gradient_checkpointing")),
        eager=select(config, f"{section}.model.override_config.attn_implementation") != "sdpa",
    )


def _micro(config: Mapping[str, Any], section: str, kind: str, world: int, tokens: int) -> int:
    """Samples of a micro batch: fixed, or as many as a token budget holds (dynamic batches)."""
    dynamic = "log_prob_use_dynamic_bsz" if kind == "log_prob" else "use_dynamic_bsz"
    if select(config, f"{section}.{dynamic}"):
        budget = select(config, f"{section}.{kind}_max_token_len_per_gpu")
        return max(int(budget or tokens) // tokens, 1)
    name = f"{section}.{kind}_micro_batch_size"
    each = select(config, f"{name}_per_gpu")
    if each is not None:
        return int(each)
    whole = select(config, name)
    return max(int(whole) // world, 1) if whole is not None else 1


def _chunked(batch: int, chunk: Any) -> int:
    """Prompts that one ``generate`` call of the HF rollout gets.

    ``HFRollout.generate_sequences`` cuts a batch into ``batch // micro_batch_size`` chunks.
    """
    if not chunk:
        return batch
    return -(-batch // max(batch // int(chunk), 1))


def _validation_batch(config: Mapping[str, Any], world: int, chunk: Any) -> int:
    """Samples a card generates for at once; 0 when the config does not say (the whole set)."""
    if int(select(config, "trainer.test_freq") or -1) <= 0:
        return 0
    size = select(config, "data.val_batch_size")
    if size is None:
        return 0
    samples = int(select(config, "actor_rollout_ref.rollout.val_kwargs.n") or 1)
    return _chunked(-(-int(size) * samples // world), chunk)
