"""What of vLLM's CUDA sources is compiled, and which entries of the PTX are the FP32 kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping

from verl_p40.errors import TreeError
from verl_p40.numerics.cases import GATED, HEAD_SIZES, PAGES, PLAIN

SOURCES = {
    "layernorm": "layernorm_kernels.cu",
    "rotary": "pos_encoding_kernels.cu",
    "activation": "activation_kernels.cu",
    "cache": "cache_kernels.cu",
}
"""By module, the files of ``csrc/`` that are compiled as they are."""

_INSTANCES = """#include "attention/attention_kernels.cuh"
template <int HEAD, int PAGE> void take(void** out) {{
  constexpr auto AUTO = vllm::Fp8KVCacheDataType::kAuto;
  out[0] = (void*)vllm::paged_attention_v1_kernel<float, float, HEAD, PAGE, 128, AUTO, false>;
  out[1] = (void*)vllm::paged_attention_v2_kernel<float, float, HEAD, PAGE, 128, AUTO, false, 512>;
  out[2] = (void*)vllm::paged_attention_v2_reduce_kernel<float, HEAD, 128, 512>;
}}
void all(void** out) {{
{calls}
}}
"""


def attention_source() -> str:
    """CUDA C++ that instantiates the FP32 kernels of ``attention_kernels.cuh`` and no others.

    vLLM's own ``paged_attention_v1.cu`` has hundreds of instances in one file, minutes each.
    """
    calls = [f"  take<{size}, {page}>(out);" for size in HEAD_SIZES for page in PAGES]
    return _INSTANCES.format(calls="\n".join(calls))


def _name(identifier: str) -> str:
    """As the Itanium C++ ABI writes it."""
    return f"{len(identifier)}{identifier}"


_FUNCTIONS = {
    "silu_and_mul": ("act_and_mul_kernel", "silu_kernel", "Lb1E"),
    "mul_and_silu": ("act_and_mul_kernel", "silu_kernel", "Lb0E"),
    "gelu_and_mul": ("act_and_mul_kernel", "gelu_kernel", "Lb1E"),
    "gelu_tanh_and_mul": ("act_and_mul_kernel", "gelu_tanh_kernel", "Lb1E"),
    "fatrelu_and_mul": ("act_and_mul_kernel_with_param", "fatrelu_kernel", ""),
    "gelu_new": ("activation_kernel", "gelu_new_kernel", ""),
    "gelu_fast": ("activation_kernel", "gelu_fast_kernel", ""),
    "gelu_quick": ("activation_kernel", "gelu_quick_kernel", ""),
}


def _patterns() -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    auto = f"LNS_{_name('Fp8KVCacheDataType')}E0E"
    for size in HEAD_SIZES:
        for page in PAGES:
            numbers = f"IffLi{size}ELi{page}ELi128E{auto}Lb0E"
            for version, rest in (("v1", ""), ("v2", "Li512E")):
                kernel = f"paged_attention_{version}"
                found[f"{kernel}/{size}/{page}"] = (
                    "attention",
                    re.escape(f"{_name(f'{kernel}_kernel')}{numbers}{rest}E"),
                )
        reduce = f"{_name('paged_attention_v2_reduce_kernel')}IfLi{size}ELi128ELi512EE"
        found[f"paged_attention_v2_reduce/{size}"] = ("attention", re.escape(reduce))
    found["rms_norm"] = ("layernorm", f"{_name('rms_norm_kernel')}IfEE")
    for width in (0, 8):
        text = f"{_name('fused_add_rms_norm_kernel')}IfLi{width}EEE"
        found[f"fused_add_rms_norm/{width}"] = ("layernorm", text)
    for style, flag in (("neox", 1), ("gptj", 0)):
        for kernel in ("rotary_embedding", "batched_rotary_embedding"):
            text = f"{_name(f'{kernel}_kernel')}IfLb{flag}EEE"
            found[f"{kernel}/{style}"] = ("rotary", text)
    for name in (*GATED, *PLAIN):
        template, function, rest = _FUNCTIONS[name]
        text = f"{_name(template)}If\\w*{_name(function)}If\\w*E{rest}EE"
        found[name] = ("activation", text)
    for kernel in ("reshape_and_cache", "reshape_and_cache_flash"):
        text = f"{_name(f'{kernel}_kernel')}Iff{auto[:-1]}EEE"
        found[kernel] = ("cache", text)
    found["copy_blocks"] = ("cache", f"{_name('copy_blocks_kernel')}IfEE")
    return found


PATTERNS = _patterns()
"""By kernel, its module and a pattern that one mangled name there has."""


def entries(ptx: str) -> list[str]:
    """The kernels of a PTX text, by their mangled names."""
    return re.findall(r"^\.visible \.entry (\w+)\s*\(", ptx, re.MULTILINE)


def find_kernels(module: str, names: list[str]) -> Mapping[str, str]:
    """By kernel, its entry among the ``names`` of a module.

    Raises:
        TreeError: none or several match: the sources are not those of the pinned release.
    """
    found = {}
    for kernel, (where, pattern) in PATTERNS.items():
        if where != module:
            continue
        matching = [name for name in names if re.search(pattern, name)]
        if len(matching) != 1:
            raise TreeError(
                f"{len(matching)} kernels of {module} match {kernel}, not one",
                fix="build from the patched sources of the pinned vLLM",
            )
        found[kernel] = matching[0]
    return found
