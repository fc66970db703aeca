"""Bytes of the tensors of a step that are no weights. Every formula says what it was read from.

verl 0.4.1 with our patches, torch 2.6.0, transformers 4.51.3, no unpadding, FP32 (4 bytes).
"""

from __future__ import annotations

from verl_p40.plan.shapes import ModelShape

FP32 = 4


def saved_layer(shape: ModelShape, batch: int, length: int, eager: bool) -> int:
    """What one decoder layer keeps for its backward pass, ``batch`` x ``length`` tokens.

    ``modeling_qwen2.py`` (llama, mistral, qwen3 alike), operator by operator: two RMSNorms keep
    their input, the normalised input and their output (6h); q (copied by bmm), the repeated k and
    v, and the attention's output (4q); gate, silu, up and their product (4f). Eager attention
    keeps the probabilities (heads x length); SDPA its own output (q) and the log-sum-exp instead.
    qwen3 normalises q and k heads as well.
    """
    h, q, f = shape.hidden, shape.query, shape.intermediate
    each = 6 * h + 4 * q + 4 * f
    each += shape.heads * length if eager else q + shape.heads
    if shape.head_norms:
        each += 2 * (q + shape.key)
    return batch * length * each * FP32


def saved_layers(
    shape: ModelShape, batch: int, length: int, eager: bool, checkpointing: bool
) -> int:
    """What all layers keep. With gradient checkpointing: the input of each.

    ``torch.utils.checkpoint`` (use_reentrant=False), applied by transformers to every layer.
    """
    tail = 3 * batch * length * shape.hidden * FP32  # the final norm
    if checkpointing:
        return shape.layers * batch * length * shape.hidden * FP32 + tail
    return shape.layers * saved_layer(shape, batch, length, eager) + tail


def forward_layer(shape: ModelShape, batch: int, queries: int, keys: int, eager: bool) -> int:
    """The most that one layer holds at once without gradients, its input included.

    The MLP's silu, up and product (3f) on hidden states, with the weights that eager attention
    has returned; or the attention's repeated k and v, q, its output, and in eager mode two score
    matrices (the sum with the mask is a new one).
    """
    h, q, f = shape.hidden, shape.query, shape.intermediate
    scores = shape.heads * queries * keys if eager else 0
    mlp = queries * (3 * f + 4 * h) + scores
    attention = queries * (2 * h + 2 * q + 2 * shape.key) + 2 * keys * q + 2 * scores
    return batch * max(mlp, attention) * FP32


def backward_layer(shape: ModelShape, batch: int, length: int, eager: bool) -> int:
    """The gradients in flight in one layer's backward pass: 3f, or two score matrices."""
    h, f = shape.hidden, shape.intermediate
    scores = 2 * shape.heads * length if eager else 2 * shape.query
    return batch * length * max(3 * f + 2 * h, scores + 4 * h) * FP32


ENTROPY_CHUNK = 2048
"""Rows that verl's ``entropy_from_logits_with_chunking`` takes at a time, of one sample at most."""


def entropy_rows(batch: int, response: int, chunked: bool) -> int:
    """Rows of logits whose entropy is computed at a time."""
    return min(response, ENTROPY_CHUNK) if chunked else batch * response


def logits_forward(
    vocabulary: int, batch: int, length: int, response: int, entropy_rows: int
) -> int:
    """Logits of every position, and the temporaries of log-probability and entropy.

    ``DataParallelPPOActor._forward_micro_batch`` without unpadding: the model returns logits of
    the prompt too (B x S x V). ``logprobs_from_logits_v2`` takes the log-sum-exp row by row (one
    R x V temporary); the entropy of ``entropy_rows`` rows adds a softmax and a product of that
    many rows (0: there is none). Exact against torch's CPU allocator
    (``tests/unit/plan/test_plan_torch.py``).
    """
    extra = max(response, 2 * entropy_rows)
    return (batch * length + extra) * vocabulary * FP32


def logits_backward(
    shape: ModelShape, batch: int, length: int, response: int, entropy: bool, *, head: bool = True
) -> int:
    """The most that logits and their gradients take, activations apart.

    Without entropy: the gradient of the slice and of the division by the temperature, each
    B x S x V (2BS); or, with long responses, logits beside the gradients of gather and of every
    row's log-sum-exp. With an entropy bonus: six B x R x V beside the logits. Fitted to, and exact
    against, torch's CPU allocator (``tests/unit/plan/test_plan_torch.py``). The output
    projection's weight gradient, where it is trained (``head``), comes with one B x S x V left.
    """
    tokens, answer = batch * length, batch * response
    if entropy:
        most = tokens + 6 * answer
    else:
        most = max(2 * tokens, tokens + max(2 * answer, answer + 2 * response))
    with_weight = tokens * shape.vocabulary + shape.embedding if head else 0
    return max(most * shape.vocabulary, with_weight) * FP32


def cache(shape: ModelShape, batch: int, length: int, size: int = FP32) -> int:
    """Keys and values of every layer: transformers' ``DynamicCache``, vLLM's blocks."""
    return 2 * shape.layers * batch * length * shape.key * size


def sampling(vocabulary: int, batch: int) -> int:
    """The last position's logits, their FP32 copy, probabilities and multinomial's noise.

    ``GenerationMixin._sample``; ``generate`` asks for the last position only (logits_to_keep).
    """
    return 4 * batch * vocabulary * FP32
