"""Whether a run fits a card, and the cheapest changes that make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from verl_p40.hardware.p40 import P40
from verl_p40.plan import setup as settings
from verl_p40.plan.host import Disk, plan_disk, plan_host
from verl_p40.plan.phases import Parts, Phase, plan_phases
from verl_p40.plan.setup import Setup
from verl_p40.plan.shapes import ModelShape

MIB = 2**20

CONTEXT = 600 * MIB
"""CUDA context, cuBLAS and NCCL, outside of torch's allocator. An estimate for a P40 (nothing of
it has been measured there; the H200 of the capped runs takes 1.3 GiB)."""

FRAGMENTATION = 0.05
"""Share of the allocator's memory that cannot be used when a card is full. The capped runs that
ran out had 0.7 to 1.3 GiB (3.4 to 6%) reserved and not allocated."""


@dataclass(frozen=True)
class Plan:
    """What a config needs. Bytes; ``phases`` are of one card."""

    setup: Setup
    card: int
    phases: tuple[Phase, ...]
    host: Parts
    disk: Disk

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.allocated)

    @property
    def context(self) -> int:
        return CONTEXT if self.setup.device == "cuda" else 0

    def needed(self, phase: Phase) -> int:
        """With the context, and what fragmentation takes."""
        share = FRAGMENTATION if self.setup.device == "cuda" else 0.0
        return int(phase.allocated * (1 + share)) + self.context

    @property
    def margin(self) -> int:
        """Bytes left at the peak; negative: it does not fit."""
        return self.card - self.needed(self.peak)

    @property
    def fits(self) -> bool:
        return self.margin >= 0


@dataclass(frozen=True)
class Change:
    """A change of settings, what it costs, and the overrides to paste."""

    what: str
    cost: str
    overrides: tuple[str, ...]
    resumable: bool = True
    """False: checkpoints written before it cannot be loaded after it."""


Compose = Callable[[Sequence[str]], dict[str, Any]]
"""From overrides, on top of the user's, to a resolved config."""


def default_card() -> int:
    """Bytes of a P40 with ECC on, its default, under the drivers that give the least."""
    return P40.memory_mib_ecc_on[0] * MIB


def make_plan(config: dict[str, Any], card: int, model: ModelShape | None = None) -> Plan:
    """Plan a resolved config.

    Raises:
        DataError, UsageError: the model or a setting has no memory model.
    """
    setup = settings.read(config, model)
    phases = tuple(plan_phases(setup, card))
    return Plan(setup, card, phases, plan_host(setup), plan_disk(setup, config))


def changes(plan: Plan, compose: Compose, model: ModelShape | None = None) -> list[Change] | None:
    """The cheapest changes that make it fit, in order of speed lost; None: none do.

    Every candidate is planned again. They are added up in order of what they cost, a candidate
    that frees nothing is left out, and one that turns out not to be needed is taken back.
    """
    if plan.fits:
        return []
    taken: list[Change] = []
    current = plan
    for candidate in candidates(plan.setup):
        trial = _replan(compose, [*taken, candidate], plan.card, model)
        if trial.margin <= current.margin:
            continue
        taken, current = [*taken, candidate], trial
        if current.fits:
            return _needed(taken, compose, plan.card, model)
    return None


def _replan(compose: Compose, taken: Sequence[Change], card: int, model: ModelShape | None) -> Plan:
    overrides = later_wins([text for change in taken for text in change.overrides])
    return make_plan(compose(overrides), card, model)


def later_wins(overrides: Sequence[str]) -> list[str]:
    """The last word on each key: hydra refuses an added key (``+``) that is named twice."""
    return list({text.split("=")[0].lstrip("+~"): text for text in overrides}.values())


def _needed(
    taken: list[Change], compose: Compose, card: int, model: ModelShape | None
) -> list[Change]:
    for change in list(taken[:-1]):
        without = [c for c in taken if c is not change]
        if _replan(compose, without, card, model).fits:
            taken = without
    return taken


def candidates(setup: Setup) -> Iterator[Change]:
    """What can be changed about a run to lower its memory, in order of speed lost."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    if setup.actor.eager:
        yield Change(
            "SDPA instead of eager attention",
            "none: it is faster",
            ("actor_rollout_ref.model.override_config.attn_implementation=sdpa",),
        )
    if not setup.entropy_chunked:
        yield Change(
            "the entropy of one response at a time",
            "none to speak of",
            (f"{actor}.entropy_from_logits_with_chunking=true",),
        )
    for micro in _halves(setup.log_prob_micro):
        yield Change(
            f"log-probabilities of {micro} samples at a time",
            "a few percent of a step",
            (f"{rollout}.log_prob_micro_batch_size_per_gpu={micro}",),
        )
    if setup.reference is not None:
        for micro in _halves(setup.reference_micro):
            yield Change(
                f"reference log-probabilities of {micro} samples at a time",
                "a few percent of a step",
                (f"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu={micro}",),
            )
    if setup.validation_batch > 1:
        for size in _halves(setup.validation_batch):
            yield Change(
                f"validation in batches of {size}",
                "a longer validation",
                (f"data.val_batch_size={size * setup.world}",),
            )
    if not setup.actor.optimizer_offload and not setup.actor.cpu_policy:
        yield Change(
            "the actor's Adam moments on the host between updates",
            "a copy each way a step, about a second a GB",
            (f"{actor}.fsdp_config.optimizer_offload=true",),
        )
    critic = setup.critic
    if critic is not None and not critic.optimizer_offload:
        yield Change(
            "the critic's Adam moments on the host between updates",
            "a copy each way a step, about a second a GB",
            ("critic.model.fsdp_config.optimizer_offload=true",),
        )
    if critic is not None and not critic.param_offload and not critic.unsharded:
        yield Change(
            "the critic's weights on the host between its phases",
            "two copies each way a step",
            ("critic.model.fsdp_config.param_offload=true",),
        )
    for micro in _halves(setup.actor_micro):
        yield Change(
            f"actor updates of {micro} samples at a time",
            "10 to 20% of the update for each halving",
            (f"{actor}.ppo_micro_batch_size_per_gpu={micro}",),
        )
    if critic is not None:
        for micro in _halves(setup.critic_micro):
            yield Change(
                f"critic updates of {micro} samples at a time",
                "10 to 20% of the update for each halving",
                (
                    f"critic.ppo_micro_batch_size_per_gpu={micro}",
                    f"critic.forward_micro_batch_size_per_gpu={micro}",
                ),
            )
    for model, key in ((setup.actor, "actor_rollout_ref"), (critic, "critic")):
        if model is not None and not model.checkpointing:
            yield Change(
                f"the {model.role}'s activations recomputed",
                "about a third of its update",
                (f"{key}.model.enable_gradient_checkpointing=true",),
            )
    if setup.rollout_name == "hf":
        prompts = setup.rollout_batch
        for size in _halves(prompts):
            yield Change(
                f"rollouts of {size} prompts at a time",
                "the rollout takes longer by the number of its parts",
                (f"+{rollout}.micro_batch_size={size}",),
            )
    if not setup.actor.cpu_policy and setup.device == "cuda":
        yield Change(
            "the actor's weights, gradients and AdamW on the host (fsdp2)",
            "much: weights cross PCIe in every forward pass, AdamW runs on the CPU",
            (
                f"{actor}.strategy=fsdp2",
                f"{actor}.fsdp_config.offload_policy=true",
            ),
            resumable=False,
        )
    if critic is not None and not critic.cpu_policy and setup.device == "cuda":
        yield Change(
            "the critic's weights, gradients and AdamW on the host (fsdp2)",
            "much: weights cross PCIe in every forward pass, AdamW runs on the CPU",
            ("critic.strategy=fsdp2", "critic.model.fsdp_config.offload_policy=true"),
            resumable=False,
        )


def _halves(size: int) -> Iterator[int]:
    while size > 1:
        size //= 2
        yield size
