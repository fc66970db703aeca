"""The memory of every phase of a step on one card, by part, at the moment it is largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_p40.plan import models_memory as held
from verl_p40.plan import tensors
from verl_p40.plan.setup import Model, Setup
from verl_p40.plan.tensors import FP32

Parts = dict[str, int]

WEIGHTS = "weights"
MOMENTS = "Adam moments"
GRADIENTS = "gradients"
TEMPORARIES = "optimizer temporaries"
GATHERED = "copied or gathered weights"
ACTIVATIONS = "activations"
LOGITS = "logits"
CACHE = "KV cache"
VLLM = "vLLM"
WORKSPACE = "cuBLAS workspace"

PARTS = (
    WEIGHTS,
    MOMENTS,
    GRADIENTS,
    TEMPORARIES,
    GATHERED,
    ACTIVATIONS,
    LOGITS,
    CACHE,
    VLLM,
    WORKSPACE,
)

_WORKSPACE = 8_519_680
"""torch's cuBLAS workspace on cards before Hopper, ``:4096:2:16:8`` KiB
(``aten/src/ATen/cuda/CublasHandlePool.cpp``); 32 MiB on Hopper."""


@dataclass(frozen=True)
class Phase:
    """One phase: bytes that torch's allocator holds on a card at its peak, by part."""

    name: str
    parts: Parts
    moments: tuple[Parts, ...] = ()
    """Every moment that was looked at; ``parts`` is the largest."""

    @property
    def allocated(self) -> int:
        return sum(self.parts.values())


def plan_phases(setup: Setup, card: int) -> list[Phase]:
    """Every phase, in the order in which they run.

    Args:
        card: bytes of the card, of which vLLM takes its share.
    """
    base = _base(setup)
    phases = [_load(setup, base), _rollout(setup, base, "rollout", setup.rollout_batch, card)]
    phases.append(_log_prob(setup, setup.actor, base, "log-prob", setup.log_prob_micro, True))
    if setup.reference is not None:
        phases.append(
            _log_prob(setup, setup.reference, base, "reference", setup.reference_micro, False)
        )
    elif setup.lora_rank:
        # compute_ref_log_prob is compute_log_prob with the adapter off
        phases.append(_log_prob(setup, setup.actor, base, "reference", setup.log_prob_micro, True))
    if setup.critic is not None:
        phases.append(_values(setup, setup.critic, base))
        phases.append(_update(setup, setup.critic, base, setup.critic_micro, setup.critic_micros))
    phases.append(_update(setup, setup.actor, base, setup.actor_micro, setup.actor_micros))
    if setup.validation_batch:
        phases.append(_rollout(setup, base, "validation", setup.validation_batch, card))
    phases.append(_checkpoint(setup, base))
    return phases


def _models(setup: Setup) -> list[Model]:
    return [m for m in (setup.actor, setup.reference, setup.critic) if m is not None]


def _base(setup: Setup) -> Parts:
    """What stays on the card between phases."""
    return {
        WEIGHTS: sum(map(held.resident, _models(setup))),
        MOMENTS: sum(held.resident_moments(m) for m in _models(setup) if m.trained),
        WORKSPACE: _WORKSPACE if setup.device == "cuda" else 0,
    }


def _with(base: Parts, **more: int) -> Parts:
    names = {
        "gathered": GATHERED,
        "activations": ACTIVATIONS,
        "logits": LOGITS,
        "cache": CACHE,
        "vllm": VLLM,
        "moments": MOMENTS,
        "gradients": GRADIENTS,
        "temporaries": TEMPORARIES,
    }
    parts = dict(base)
    for key, value in more.items():
        parts[names[key]] = parts.get(names[key], 0) + value
    return {name: parts[name] for name in PARTS if parts.get(name)}


def _largest(name: str, moments: Sequence[Parts]) -> Phase:
    largest = max(moments, key=lambda parts: sum(parts.values()))
    return Phase(name, largest, tuple(moments))


def _load(setup: Setup, base: Parts) -> Phase:
    """The models are built one after the other: critic, reference, actor.

    fsdp moves a model to the card and then concatenates it, unit by unit, into flat parameters:
    the whole again for a model that is one unit. No moments exist yet.
    """
    order = [m for m in (setup.critic, setup.reference, setup.actor) if m is not None]
    moments, there = [], 0
    for model in order:
        largest = max(model.root, model.layer) * FP32
        whole = model.parameters * FP32
        if not model.cuda or model.strategy == "fsdp":
            moments.append({WEIGHTS: there + whole, GATHERED: largest})
        elif model.cpu_policy:
            moments.append({WEIGHTS: there, GATHERED: 2 * largest})
        else:
            moments.append({WEIGHTS: there + whole // model.world, GATHERED: largest})
        there += held.resident(model)
    workspace = {WORKSPACE: base[WORKSPACE]}
    return _largest("load", [_with({**workspace, **parts}) for parts in moments])


def _rollout(setup: Setup, base: Parts, name: str, batch: int, card: int) -> Phase:
    """The HF rollout runs the actor itself; vLLM has its own weights and takes a set share.

    vLLM: ``gpu_memory_utilization`` of the card for weights, cache and buffers together
    (``vllm/worker/worker.py``, determine_num_available_blocks). Before it generates it is given
    the actor's weights: a whole copy of the state dict beside its own (FSDPVLLMShardingManager).
    """
    shape, actor = setup.actor.shape, setup.actor
    if setup.rollout_name == "vllm":
        own = shape.parameters * setup.rollout_bytes
        whole = actor.parameters * FP32
        return _largest(
            name,
            [
                _with(base, vllm=int(setup.vllm_utilization * card)),
                _with(base, vllm=own, gathered=whole + held.brought(actor)),
            ],
        )
    gathered = 0
    if not actor.unsharded and actor.cuda:
        # summon_full_params of the root, which is the whole model
        gathered = actor.parameters * FP32 if actor.strategy == "fsdp" else held.gathered(actor)
    length = setup.sequence
    prompt = tensors.forward_layer(shape, batch, setup.prompt, setup.prompt, actor.eager)
    last = tensors.forward_layer(shape, batch, 1, length, actor.eager)
    # the last layer's keys and values are concatenated into new tensors
    growing = tensors.cache(shape, batch, length) // shape.layers
    sampling = tensors.sampling(shape.vocabulary, batch)
    full = tensors.cache(shape, batch, length)
    at_prompt = tensors.cache(shape, batch, setup.prompt)
    return _largest(
        name,
        [
            _with(base, gathered=held.brought(actor) + gathered),
            _with(base, gathered=gathered, cache=at_prompt, activations=prompt),
            _with(base, gathered=gathered, cache=full + growing, activations=last),
            _with(base, gathered=gathered, cache=full, logits=sampling),
        ],
    )


def _log_prob(
    setup: Setup, model: Model, base: Parts, name: str, micro: int, entropy: bool
) -> Phase:
    """A forward pass without gradients; only the old log-prob computes the entropy as well."""
    shape, length = model.shape, setup.sequence
    layer = tensors.forward_layer(shape, micro, length, length, model.eager)
    rows = tensors.entropy_rows(micro, setup.response, setup.entropy_chunked) if entropy else 0
    logits = tensors.logits_forward(shape.vocabulary, micro, length, setup.response, rows)
    head = tensors.logits_forward(shape.vocabulary, micro, length, 0, 0)
    hidden = micro * length * shape.hidden * FP32
    return _largest(
        name,
        [
            _with(base, gathered=max(held.brought(model), held.gathered(model))),
            _with(base, gathered=held.gathered_in_layers(model), activations=layer),
            _with(base, gathered=_at_head(model), activations=2 * hidden, logits=head),
            _with(base, gathered=held.head_gathered(model), logits=logits),
        ],
    )


def _at_head(model: Model) -> int:
    """Whole weights while the output projection multiplies: the root's."""
    return model.root * FP32 if model.cuda and not model.unsharded else 0


def _values(setup: Setup, critic: Model, base: Parts) -> Phase:
    length = setup.sequence
    layer = tensors.forward_layer(critic.shape, setup.values_micro, length, length, critic.eager)
    return _largest(
        "values",
        [
            _with(base, gathered=held.brought(critic)),
            _with(base, gathered=held.gathered(critic), activations=layer),
        ],
    )


def _update(setup: Setup, model: Model, base: Parts, micro: int, micros: int) -> Phase:
    """Forward and backward pass of the last micro batch, then AdamW.

    verl loads offloaded moments before the first micro batch, so they are there throughout. From
    the second micro batch on, the summed gradient is too.
    """
    shape, length = model.shape, setup.sequence
    loaded = held.moments(model) - held.resident_moments(model)
    summed = held.gradients(model) if micros > 1 else 0
    saved = tensors.saved_layers(shape, micro, length, model.eager, model.checkpointing)
    one = tensors.backward_layer(shape, micro, length, model.eager)
    if model.checkpointing:
        one += tensors.saved_layer(shape, micro, length, model.eager)
    weights = held.gathered(model) if model.strategy == "fsdp" else _at_head(model)
    # a model of one unit collects the gradients of all its parts until the very end
    collected = 0
    if not model.wrapped:
        collected = (model.parameters - shape.layer) * FP32
    growth = held.gradients(model) if micros == 1 and model.wrapped else summed
    last = saved // shape.layers if not model.checkpointing else 0
    moments = [
        _with(base, gathered=held.brought(model), moments=loaded),
        _with(
            base,
            gathered=weights,
            moments=loaded,
            gradients=growth + held.backward_end(model),
        ),
        _with(
            base,
            gathered=weights,
            moments=loaded,
            gradients=summed,
            activations=saved + one,
        ),
        _with(
            base,
            gathered=weights,
            moments=loaded,
            gradients=summed + collected,
            activations=last + one,
        ),
        _with(
            base,
            moments=loaded,
            gradients=held.gradients(model),
            temporaries=held.step_temporaries(model),
        ),
    ]
    if model.role == "actor":
        logits = tensors.logits_backward(
            shape, micro, length, setup.response, setup.entropy_in_update, head=not model.lora
        )
        moments.append(
            _with(
                base,
                gathered=held.head_gathered(model),
                moments=loaded,
                gradients=summed,
                activations=saved,
                logits=logits,
            )
        )
    if model.strategy == "fsdp2" and not model.lora:
        # what backward_end counts holds the root's gathered weights
        moments[1] = _with(base, moments=loaded, gradients=growth + held.backward_end(model))
    return _largest(f"{model.role} update", moments)


def _checkpoint(setup: Setup, base: Parts) -> Phase:
    """State dicts go to the host tensor by tensor (patch fix/0012), which counts here on the CPU
    alone; an offloaded model is loaded first, a sharded one gathered unit by unit."""
    trained = [setup.actor, *([setup.critic] if setup.critic else [])]

    def held_by(model: Model) -> int:
        copied = model.parameters * FP32 if setup.device == "cpu" else 0
        return held.brought(model) + held.gathered(model) + copied

    return _largest("checkpoint", [_with(base, gathered=held_by(m)) for m in trained])
