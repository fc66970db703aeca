"""What FSDP keeps on the card of each model, and what training it adds.

Read from torch 2.6.0 (``torch/distributed/fsdp``) and ``verl/workers/fsdp_workers.py``,
``verl/utils/fsdp_utils.py`` of verl 0.4.1, and checked against ``benchmarks/memory.py``.
"""

from __future__ import annotations

from verl_p40.plan.setup import Model
from verl_p40.plan.tensors import FP32


def resident(model: Model) -> int:
    """Bytes of weights on the card between phases.

    On one card fsdp falls back to NO_SHARD, where the modules' weights are views of the flat
    parameter: offloading moves the flat parameter to the host, the views keep the card's storage
    alive until the next forward pass replaces them. So ``param_offload``, and the reference's
    CPUOffload, free nothing there (measured: load, then offload, leaves all of it).
    """
    if not model.cuda or model.unsharded:
        return model.parameters * FP32
    if model.cpu_policy or model.param_offload:
        return 0
    return model.parameters * FP32 // model.world


def brought(model: Model) -> int:
    """Bytes a phase loads onto the card before it computes.

    A second copy where the first was not freed (see :func:`resident`); it replaces the first one
    as the forward pass reaches each unit. The reference comes unit by unit.
    """
    if not model.cuda or not model.param_offload or model.cpu_policy:
        return 0
    if model.role == "reference":
        return model.root * FP32 if model.unsharded else 0
    return model.parameters * FP32 // model.world


def gathered(model: Model) -> int:
    """Bytes of whole weights beside the shards while the model computes.

    NO_SHARD: none. fsdp: the root stays, and two layers are in flight (one computing, one
    prefetched: ``limit_all_gathers``). fsdp2: a gathered copy of root or layer; from the host, a
    copy to gather from comes first.
    """
    if not model.cuda or model.unsharded:
        return 0
    if model.strategy == "fsdp":
        return (model.root + 2 * model.layer) * FP32
    return 2 * max(model.root, model.layer) * FP32 if model.cpu_policy else model.root * FP32


def gathered_in_layers(model: Model) -> int:
    """Of :func:`gathered`, what is there while a layer computes.

    fsdp2 from the host: what the root was gathered from is freed by then, a layer's two are there.
    """
    if model.cuda and not model.unsharded and model.strategy != "fsdp" and model.cpu_policy:
        return (model.root + 2 * model.layer) * FP32
    return gathered(model)


def head_gathered(model: Model) -> int:
    """Of :func:`gathered`, what is still there when the logits are at their largest."""
    if not model.cuda or model.unsharded:
        return 0
    return model.root * FP32 if model.strategy == "fsdp" else 0


def moments(model: Model) -> int:
    """Adam's two FP32 moments of this rank's trained parameters."""
    return 0 if model.cpu_policy else 2 * gradients(model)


def resident_moments(model: Model) -> int:
    """Moments that stay on the card between phases."""
    return 0 if model.optimizer_offload and model.cuda else moments(model)


def gradients(model: Model) -> int:
    """The gradient that an optimizer step reads: this rank's share."""
    return 0 if model.cpu_policy else model.trained * FP32 // model.world


def step_temporaries(model: Model) -> int:
    """AdamW's temporaries.

    CUDA: ``_multi_tensor_adamw`` makes the root of the second moment of all parameters at once.
    CPU: ``_single_tensor_adamw`` makes it and its quotient, one parameter (here a flat one) at a
    time.
    """
    if model.cpu_policy:
        return 0
    share = gradients(model)
    if model.cuda:
        return share
    return min(2 * max(model.root, model.layer) * FP32 // model.world, 2 * share)


def backward_end(model: Model) -> int:
    """Gradients in flight when a unit's backward pass ends.

    fsdp: the parts of the unit's flat gradient, each an own tensor, and their concatenation
    (``SplitWithSizesBackward``): twice the unit, which is the whole model for the HF rollout's
    actor (``auto_wrap_policy = None``). Sharded, the reduced shard as well. fsdp2, at the root:
    its gathered weights, its gradient, the input and output of the reduce-scatter, and the layer
    before it, whose reduce-scatter input is freed last.
    """
    if model.lora:
        # LoRA: only the adapters of one layer have gradients.
        return 2 * model.trained // model.shape.layers * FP32
    if model.strategy == "fsdp":
        shard = 0 if model.world == 1 else model.root * FP32 // model.world
        return 2 * model.root * FP32 + shard
    return (4 * model.root + model.layer) * FP32
