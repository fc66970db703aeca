"""The rules of the tree audit: what they look for and why it matters on sm_61.

Sources: NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities" (arithmetic throughput: FP16
at 1/64 of FP32 on 6.1; BF16 conversion and arithmetic from 8.0; Tensor Cores from 7.0; FP8 from
8.9); Dao-AILab/flash-attention README (FlashAttention-2: Ampere, Ada, Hopper);
torch 2.6 ``torch/_inductor/scheduler.py`` and ``torch/utils/_triton.py`` (Inductor's Triton code
generator refuses capability major < 7).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """A kind of site: ``why`` says what happens there on a P40."""

    id: str
    title: str
    why: str


_BF16 = (
    "sm_61 has no BF16 arithmetic (sm_80 has) and runs FP16 at 1/64 of its FP32 rate: "
    "the run stops or crawls, and the P40 path is FP32 only"
)
_FLASH = "FlashAttention-2 kernels start at sm_80; the package cannot even be installed usefully"
_TRITON = (
    "Triton's code for sm_61 is partial (no FP16/BF16 dot, ptxas wants sm_70 for atomics and "
    "eviction policies, 48 KiB shared memory): no Triton kernel is on the P40 path"
)

_ALL = (
    Rule("half-dtype", "a half-precision dtype is named", _BF16),
    Rule("half-literal", "a half-precision dtype as a string", _BF16),
    Rule("half-default", "half precision is the default when nothing is set", _BF16),
    Rule("half-cast", "a tensor or module is cast to half precision", _BF16),
    Rule("half-test", "a value is compared with a half-precision dtype", _BF16),
    Rule("half-flag", "a switch asks for half precision", _BF16),
    Rule("auto-dtype", "the dtype is left to the checkpoint ('auto')", _BF16),
    Rule(
        "implicit-dtype",
        "a model is built with its checkpoint's dtype",
        "transformers 4.51 from_config() takes config.torch_dtype when none is given, and most "
        "checkpoints say bfloat16; " + _BF16,
    ),
    Rule(
        "autocast",
        "autocast to half precision, or autocast with its default dtype",
        "torch.autocast turns matrix products into FP16/BF16; " + _BF16,
    ),
    Rule("fp8", "an FP8 dtype is named", "FP8 needs sm_89"),
    Rule("flash-attn-import", "flash_attn (or a module that needs it) is imported", _FLASH),
    Rule("flash-attn-implementation", "FlashAttention is chosen as attention", _FLASH),
    Rule("flash-attn-use", "a FlashAttention function is used", _FLASH),
    Rule(
        "attn-internal",
        "the model's private attention choice is read or set",
        "code that branches on _attn_implementation may take the FlashAttention branch; " + _FLASH,
    ),
    Rule(
        "torch-compile",
        "torch.compile, Dynamo or Inductor",
        "Inductor refuses CUDA devices below sm_70 with any Triton version",
    ),
    Rule("triton-import", "Triton is imported", _TRITON),
    Rule("triton-kernel", "a Triton kernel or a switch to one", _TRITON),
    Rule(
        "capability",
        "behaviour depends on the GPU's compute capability",
        "a minimum above 6.1 refuses the card or picks another branch",
    ),
    Rule(
        "sm80-library",
        "a library without kernels for sm_61",
        "Transformer Engine, FlashInfer, FlashMLA, DeepGEMM and SGLang start at sm_75 or later; "
        "Liger kernels are Triton",
    ),
    Rule(
        "prefix-caching",
        "vLLM prefix caching is on",
        "with a cached prefix vLLM calls the Triton prefix_prefill kernel: 81,920 bytes of shared "
        "memory in FP32 at head size 64, and a P40 block has 49,152",
    ),
    Rule(
        "chunked-prefill",
        "vLLM chunked prefill is on",
        "with it vLLM V0 gives every prompt a block table, and xFormers then calls the Triton "
        "prefix_prefill kernel, which does not fit 49,152 bytes of shared memory in FP32",
    ),
    Rule(
        "remove-padding",
        "packing without padding is on",
        "sequences packed without a mask are only kept apart by FlashAttention's varlen kernels",
    ),
    Rule(
        "fused-kernels", "fused kernels are on", "verl's fused kernels come with a Triton backend"
    ),
    Rule(
        "upstream-defect",
        "a known upstream bug on the P40 path",
        "not a precision problem, but the run cannot pass it",
    ),
    Rule("unreadable", "a file the audit cannot parse", "an unread file proves nothing"),
)

RULES: dict[str, Rule] = {rule.id: rule for rule in _ALL}
