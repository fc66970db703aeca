"""How vLLM 0.8.5.post1's host code launches its kernels: grid, threads, dynamic shared memory.

Restated from the sources named at each function, since the host code itself is compiled into an
extension for one CUDA and one torch. Shared memory is in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

FLOAT = 4
PARTITION = 512
"""Tokens that a block of ``paged_attention_v2`` handles: ``PARTITION_SIZE`` in
``csrc/attention/paged_attention_v2.cu``, ``_PARTITION_SIZE`` in ``vllm/attention/ops/paged_attn.py``."""

V1_LONGEST = 8192
"""``max_seq_len`` up to which ``PagedAttention.forward_decode`` may choose v1 (paged_attn.py)."""

THREADS = 128
_WARPS = THREADS // 32


@dataclass(frozen=True)
class Launch:
    """A launch; ``shared`` is the dynamic part, which comes on top of the kernel's static one."""

    grid: tuple[int, int, int]
    threads: int
    shared: int = 0


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def uses_v1(max_seq_len: int, sequences: int, heads: int) -> bool:
    """The choice of ``PagedAttention.forward_decode`` (vllm/attention/ops/paged_attn.py)."""
    partitions = -(-max_seq_len // PARTITION)
    return max_seq_len <= V1_LONGEST and (partitions == 1 or sequences * heads > 512)


def paged_attention_v1(
    sequences: int, heads: int, head_size: int, page: int, max_seq_len: int
) -> Launch:
    """``paged_attention_v1_launcher``: a block a head of a sequence keeps all its logits."""
    logits = round_up(max_seq_len, page) * FLOAT
    outputs = _WARPS // 2 * head_size * FLOAT
    return Launch((heads, sequences, 1), THREADS, max(logits, outputs))


def v1_longest(static: int, page: int, limit: int) -> int:
    """The largest ``max_seq_len`` at which ``paged_attention_v1`` fits ``limit`` bytes.

    Args:
        static: the kernel's static shared memory.
        page: tokens in a block of the KV cache.
    """
    return (limit - static) // (page * FLOAT) * page


def paged_attention_v2(
    sequences: int, heads: int, head_size: int, max_seq_len: int
) -> tuple[Launch, Launch]:
    """``paged_attention_v2_launcher``: the kernel, and the one that joins the partitions."""
    partitions = -(-max_seq_len // PARTITION)
    logits, outputs = PARTITION * FLOAT, _WARPS // 2 * head_size * FLOAT
    return (
        Launch((heads, sequences, partitions), THREADS, max(logits, outputs)),
        Launch((heads, sequences, 1), THREADS, 2 * partitions * FLOAT),
    )


def rms_norm(tokens: int, hidden: int) -> Launch:
    """``rms_norm`` in ``csrc/layernorm_kernels.cu``."""
    return Launch((tokens, 1, 1), min(hidden, 1024))


def fused_add_rms_norm(tokens: int, hidden: int) -> Launch:
    """``fused_add_rms_norm`` in ``csrc/layernorm_kernels.cu``."""
    return Launch((tokens, 1, 1), min(hidden, 1024 if tokens < 256 else 256))


def fused_add_width(hidden: int) -> int:
    """The template argument it is called with, tensors being aligned to 16 bytes as torch's are.
    In float32 both instances are the generic kernel."""
    return 8 if hidden % 8 == 0 else 0


def rotary_embedding(tokens: int, heads: int, rot_dim: int) -> Launch:
    """``rotary_embedding`` and ``batched_rotary_embedding`` in ``csrc/pos_encoding_kernels.cu``."""
    return Launch((tokens, 1, 1), min(heads * rot_dim // 2, 512))


def activation(tokens: int, width: int) -> Launch:
    """The launch macros of ``csrc/activation_kernels.cu``; ``width`` is that of the output."""
    return Launch((tokens, 1, 1), min(width, 1024))


def reshape_and_cache(tokens: int, heads: int, head_size: int) -> Launch:
    """``reshape_and_cache`` and ``reshape_and_cache_flash`` in ``csrc/cache_kernels.cu``."""
    return Launch((tokens, 1, 1), min(heads * head_size, 512))


def copy_blocks(layers: int, pairs: int, elements: int) -> Launch:
    """``copy_blocks`` in ``csrc/cache_kernels.cu``; ``elements`` of a block of the cache."""
    return Launch((layers, pairs, 1), min(1024, elements))
