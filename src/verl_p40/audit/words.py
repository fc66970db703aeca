"""The vocabulary of the rules: dtype names, modules, switches. No logic."""

from __future__ import annotations

import re

HALF_ATTRS = frozenset({"bfloat16", "float16", "half", "HalfTensor", "BFloat16Tensor"})
HALF_WORDS = frozenset(
    {
        "bfloat16", "bf16", "float16", "fp16", "half",
        "torch.bfloat16", "torch.float16", "torch.half",
        "bf16-mixed", "16-mixed", "fp16-mixed", "bf16-true", "16-true",
    }
)  # fmt: skip
FP8_NAME = re.compile(r"(?:torch\.)?(?:fp8|float8)(?:_?e\dm\d(?:fn|fnuz)?)?(?:_?hybrid)?")

FLASH_IDENT = re.compile(r"flash_?att(?:n|ention)", re.IGNORECASE)
FLASH_VALUES = frozenset(
    {"flash_attention_2", "flash_attention_3", "flash_attention", "flash_attn", "flash-attn", "fa3"}
)
FLASH_MODULE = re.compile(
    r"(?:^|[._])(?:vllm_)?flash_attn(?:_\d+)?(?:$|[._])|flash_attention_utils$"
)

TRITON_MODULE = re.compile(r"(?:^|\.)(?:triton|triton_utils)(?:$|\.)")
TRITON_DECORATORS = frozenset({"jit", "autotune", "heuristics"})

NO_SM61_LIBRARIES = {
    "transformer_engine": "sm80-library",
    "flashinfer": "sm80-library",
    "flash_mla": "sm80-library",
    "deep_gemm": "sm80-library",
    "deep_ep": "sm80-library",
    "sglang": "sm80-library",
    "sgl_kernel": "sm80-library",
    "liger_kernel": "sm80-library",
}

CAPABILITY = re.compile(
    r"(?:get|has|is|supports?|min|cuda)_?(?:device_)?(?:min_)?capability|compute_capability"
)

SWITCHES_ON = {
    "enable_prefix_caching": "prefix-caching",
    "enable_chunked_prefill": "chunked-prefill",
    "chunked_prefill_enabled": "chunked-prefill",
    "use_torch_compile": "torch-compile",
    "torch_compile": "torch-compile",
    "enable_torch_compile": "torch-compile",
    "use_remove_padding": "remove-padding",
    "use_rmpad": "remove-padding",
    "use_fused_kernels": "fused-kernels",
    "use_liger": "sm80-library",
    "use_liger_kernel": "sm80-library",
    "use_triton": "triton-kernel",
    "_use_triton": "triton-kernel",
    "use_flash_attn": "flash-attn-implementation",
    "use_flash_attention_2": "flash-attn-implementation",
    "bf16": "half-flag",
    "fp16": "half-flag",
}
"""Names that ask for a hostile feature when they are true."""

BACKEND_KEYS = frozenset(
    {"impl_backend", "attention_backend", "attn_backend", "fused_kernels_backend"}
)
BACKEND_VALUES = {
    "triton": "triton-kernel",
    "flashinfer": "sm80-library",
    "flashmla": "sm80-library",
    "fa3": "flash-attn-implementation",
    "flash": "flash-attn-implementation",
}
DTYPE_KEYS = frozenset({"dtype", "torch_dtype", "model_dtype", "param_dtype", "kv_cache_dtype"})

_TOKENS = (
    b"float16", b"bf16", b"fp16", b"halftensor", b"16-mixed", b"16-true", b"float8", b"fp8",
    b"flash", b"attn_impl", b"torch.compile", b"torch_compile", b"_dynamo", b"_inductor", b"triton",
    b"capability", b"autocast", b"gradscaler", b"from_config", b"torch_dtype",
    b"transformer_engine", b"deep_gemm", b"deep_ep", b"sglang", b"sgl_kernel", b"liger",
    b"prefix_caching", b"prefix-caching", b"chunked_prefill", b"chunked-prefill",
    b"remove_padding", b"rmpad", b"fused_kernels", b"fa3",
)  # fmt: skip
_RARER = {
    b"half": re.compile(rb"\.half\b|[\"']half[\"']|[:=]\s*half\b|\bhalf\s*[,:]"),
    b"compile": re.compile(rb"import[^\n]*\bcompile\b"),
    b"auto": re.compile(rb"[\"']auto[\"']|(?:[:=]|dtype)\s*auto\b"),
}


def relevant(data: bytes) -> bool:
    """Whether a file can hold a site: a cheap superset of every rule's trigger.

    It leaves most files unparsed.
    """
    lowered = data.lower()
    if any(token in lowered for token in _TOKENS):
        return True
    return any(word in lowered and regex.search(lowered) for word, regex in _RARER.items())


def half_word(value: str) -> bool:
    return value.strip().lower() in HALF_WORDS


def fp8_word(value: str) -> bool:
    return FP8_NAME.fullmatch(value.strip().lower()) is not None
