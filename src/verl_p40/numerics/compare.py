"""Step two: every kernel on ragged batches, and how far it is from float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from verl_p40.numerics import cases, launches, reference
from verl_p40.numerics.cases import Decode, Heads, Prefix, Rotary
from verl_p40.numerics.device import LIMIT, Device

BOUND = 1e-5
"""The largest relative error that passes."""
VECTOR = 10.0
"""How many times that a single vector may be off. A sum of tens of thousands of values of both
signs is small beside them, and float32 is relative to them; this is to find a wrong vector in a
large tensor, which the norm of the whole would hide."""
EPSILON = 1e-6
_EXACT = 0.0
_TINY = 1e-30


@dataclass(frozen=True)
class Errors:
    """How far a result is from float64.

    Attributes:
        norm: the 2-norm of the difference relative to that of the result; of a batch, the
            sequence where it is largest.
        vector: the largest, over the vectors of the last dimension (a head of a token; a token),
            of the largest difference relative to the vector's largest element.
    """

    norm: float
    vector: float


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        error, vector: as in :class:`Errors`.
        bound: what ``error`` may be at most; 0 for kernels that only move data.
        shared: bytes of shared memory a block, the static part included.
    """

    kernel: str
    case: str
    error: float
    vector: float
    bound: float
    shared: int

    @property
    def ok(self) -> bool:
        # Written so that NaN fails.
        close = self.error <= self.bound and self.vector <= VECTOR * self.bound
        return close and self.shared <= LIMIT

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}


def measure(*pairs: tuple[Any, Any], parts: Sequence[int] = ()) -> Errors:
    """The worst of some results, each with what it should be. NaN where anything is.

    Args:
        parts: how many vectors of the first dimension belong to each sequence; none: it is one.
    """
    norms, vectors = [], []
    for found, wanted in pairs:
        lengths = list(parts) or [len(wanted)]
        for one, exact in zip(found.split(lengths), wanted.double().split(lengths), strict=True):
            off = one.double() - exact
            norms.append(off.norm() / exact.norm().clamp_min(_TINY))
            sizes = exact.abs().amax(-1).clamp_min(_TINY)
            vectors.append((off.abs().amax(-1) / sizes).max())
    # torch's maximum is NaN where one is; Python's may not be.
    return Errors(float(torch.stack(norms).max()), float(torch.stack(vectors).max()))


def _row(kernel: str, case: str, errors: Errors, bound: float, shared: int) -> Row:
    return Row(kernel, case, errors.norm, errors.vector, bound, shared)


def _random(*shape: int) -> Any:
    return torch.randn(*shape, device="cuda")


def _slopes(heads: int) -> Any:
    return torch.tensor([2.0 ** -(i + 1) for i in range(heads)], device="cuda")


class Cache:
    """A KV cache in vLLM's layout, its pages in random order, what is unused filled with NaN."""

    def __init__(self, heads: Heads, head_size: int, page: int, pages: tuple[int, ...]) -> None:
        self.page = page
        order = torch.randperm(sum(pages), device="cuda").int()
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
        for row, part in enumerate(order.split(list(pages))):
            self.table[row, : len(part)] = part
        nan = float("nan")
        self.k = torch.full((sum(pages), heads.kv, head_size // 4, page, 4), nan, device="cuda")
        self.v = torch.full((sum(pages), heads.kv, head_size, page), nan, device="cuda")

    def write(self, row: int, k: Any, v: Any) -> None:
        """The first tokens of a sequence; [T, kv_heads, D]."""
        position = torch.arange(k.shape[0], device="cuda")
        pages = self.table[row, position // self.page].long()
        slots = position % self.page
        self.k[pages, :, :, slots] = k.view(*k.shape[:2], k.shape[2] // 4, 4)
        self.v[pages, :, :, slots] = v


def _size(size: int, page: int, heads: Heads) -> str:
    return f"D {size}, {heads} heads, pages of {page}"


def prefix(device: Device, index: int, case: Prefix) -> Row:
    """The Triton kernel that attends to a cached prefix, launched as vLLM's launcher would."""
    heads, size = case.heads, case.head_size
    cache = Cache(heads, size, case.page, case.pages)
    slopes = _slopes(heads.query) if case.alibi else None
    queries, keys, values, wanted = [], [], [], []
    for row, (cached, new) in enumerate(case.lengths):
        q = _random(new, heads.query, size)
        k, v = (_random(cached + new, heads.kv, size) for _ in range(2))
        cache.write(row, k[:cached], v[:cached])
        queries.append(q)
        keys.append(k[cached:])
        values.append(v[cached:])
        wanted.append(
            reference.attend(q, k, v, cached, slopes=slopes, window=case.window, scale=size**-0.5)
        )
    new = torch.tensor([new for _, new in case.lengths])
    out = torch.full_like(torch.cat(queries), float("nan"))
    tensors = {
        "q": torch.cat(queries),
        "k": torch.cat(keys),
        "v": torch.cat(values),
        "o": out,
        "k_cache": cache.k,
        "v_cache": cache.v,
        "b_loc": cache.table,
        "b_start_loc": torch.cat([torch.zeros(1), new.cumsum(0)]).int().cuda(),
        "b_seq_len": torch.tensor([sum(pair) for pair in case.lengths]).int().cuda(),
        "k_scale": torch.ones(1, device="cuda"),
        "v_scale": torch.ones(1, device="cuda"),
        "alibi_slopes": slopes,
    }
    shared = device.launch_prefix(index, tensors)
    name = "prefix prefill" + (", ALiBi" if case.alibi else "")
    text = f"{case.name}; {_size(size, case.page, heads)}; to {case.longest:,} tokens"
    errors = measure((out, torch.cat(wanted)), parts=[new for _, new in case.lengths])
    return _row(name, text, errors, BOUND, shared)


def decode(device: Device, case: Decode) -> Row:
    """Paged attention, v1 or v2 as vLLM would choose, the query a part of a fused projection."""
    heads, size, page = case.heads, case.head_size, case.page
    rows, longest = len(case.lengths), max(case.lengths)
    cache = Cache(heads, size, page, tuple(-(-length // page) for length in case.lengths))
    fused = _random(rows, (heads.query + 2 * heads.kv) * size)
    q = fused[:, : heads.query * size].view(rows, heads.query, size)
    slopes = _slopes(heads.query) if case.alibi else None
    wanted = []
    for row, length in enumerate(case.lengths):
        k, v = (_random(length, heads.kv, size) for _ in range(2))
        cache.write(row, k, v)
        one = reference.attend(q[row : row + 1], k, v, length - 1, slopes=slopes, scale=size**-0.5)
        wanted.append(one)
    out = torch.full((rows, heads.query, size), float("nan"), device="cuda")
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
    one = torch.ones(1, device="cuda")
    common = (
        *(q, cache.k, cache.v, heads.kv, float(size**-0.5), cache.table, lengths),
        *(cache.table.shape[1], slopes, q.stride(0), cache.k.stride(0), cache.k.stride(1)),
        *(one, one, 0, 0, 0, 64, 0),
    )
    if launches.uses_v1(longest, rows, heads.query):
        version = "v1"
        launch = launches.paged_attention_v1(rows, heads.query, size, page, longest)
        shared = device.launch(f"paged_attention_v1/{size}/{page}", launch, out, *common)
    else:
        version = "v2"
        launch, join = launches.paged_attention_v2(rows, heads.query, size, longest)
        sums = torch.full((rows, heads.query, launch.grid[2]), float("nan"), device="cuda")
        largest = torch.full_like(sums, float("nan"))
        parts = torch.full((*sums.shape, size), float("nan"), device="cuda")
        kernel = f"paged_attention_v2/{size}/{page}"
        shared = device.launch(kernel, launch, sums, largest, parts, *common)
        joined = (out, sums, largest, parts, lengths, launch.grid[2])
        shared = max(shared, device.launch(f"paged_attention_v2_reduce/{size}", join, *joined))
    text = f"{case.name}; {_size(size, page, heads)}; to {longest:,} tokens"
    errors = measure((out, torch.cat(wanted)), parts=[1] * rows)
    return _row(f"paged_attention_{version}", text, errors, BOUND, shared)


def norms(device: Device, tokens: int, hidden: int) -> Iterator[Row]:
    """RMSNorm, and the one that adds the residual first and keeps the sum."""
    x, residual, weight = _random(tokens, hidden), _random(tokens, hidden), _random(hidden)
    x = x * torch.logspace(-2, 2, tokens, device="cuda")[:, None]
    out = torch.full_like(x, float("nan"))
    tail = (weight, EPSILON, tokens, hidden)
    text = f"{tokens} x {hidden}"
    shared = device.launch("rms_norm", launches.rms_norm(tokens, hidden), out, x, *tail)
    wanted = reference.rms_norm(x, weight, EPSILON)
    yield _row("rms_norm", text, measure((out, wanted)), BOUND, shared)
    total = x.double() + residual.double()
    wanted = reference.rms_norm(total, weight, EPSILON)
    kernel = f"fused_add_rms_norm/{launches.fused_add_width(hidden)}"
    launch = launches.fused_add_rms_norm(tokens, hidden)
    shared = device.launch(kernel, launch, x, residual, *tail)
    errors = measure((x, wanted), (residual, total))
    yield _row("fused_add_rms_norm", text, errors, BOUND, shared)


def rotary(device: Device, case: Rotary) -> Row:
    """Rotary embeddings in place, of queries and keys that are parts of a fused projection."""
    heads, size = case.heads, case.head_size
    widths = (heads.query * size, heads.kv * size, heads.kv * size)
    q, k, rest = _random(case.tokens, sum(widths)).split(widths, -1)
    untouched = rest.clone()
    frequency = 1e6 ** -(torch.arange(0, case.rot_dim, 2, device="cuda") / case.rot_dim)
    angles = torch.arange(case.longest, device="cuda")[:, None] * frequency
    table = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.randint(case.longest, (case.tokens,), device="cuda")
    positions[0], positions[-1] = 0, case.longest - 1
    rows = positions
    extra: tuple[Any, ...] = ()
    if case.offsets:  # two tables below each other, as LoRA adapters of other lengths have
        table = torch.cat([table, table.flip(0)])
        offsets = torch.arange(case.tokens, device="cuda") % 2 * case.longest
        rows, extra = positions + offsets, (offsets,)
    wanted = [
        reference.rotate(part.view(case.tokens, -1, size), table[rows], case.neox)
        for part in (q, k)
    ]
    kernel = "batched_rotary_embedding" if case.offsets else "rotary_embedding"
    style = "neox" if case.neox else "gptj"
    shared = device.launch(
        f"{kernel}/{style}",
        launches.rotary_embedding(case.tokens, heads.query, case.rot_dim),
        *(positions, q, k, table, *extra, case.rot_dim),
        *(ctypes.c_int64(q.stride(0)), ctypes.c_int64(k.stride(0))),
        *(heads.query, heads.kv, size),
    )
    found = [part.view(case.tokens, -1, size) for part in (q, k)]
    errors = measure(*zip(found, wanted, strict=True))
    if not torch.equal(rest, untouched):
        errors = Errors(float("nan"), float("nan"))
    text = f"{style}; D {size}, {heads} heads, {case.rot_dim} rotated; to {case.longest:,}"
    return _row(kernel, text, errors, BOUND, shared)


def activation(device: Device, name: str, tokens: int, width: int) -> Row:
    """One activation; the gated ones read twice the width."""
    x = 3 * _random(tokens, 2 * width if name in cases.GATED else width)
    out = torch.full((tokens, width), float("nan"), device="cuda")
    threshold = 0.25
    extra = (threshold,) if name == "fatrelu_and_mul" else ()
    shared = device.launch(name, launches.activation(tokens, width), out, x, width, *extra)
    wanted = reference.activate(name, x, threshold)
    return _row(name, f"{tokens} x {width}", measure((out, wanted)), BOUND, shared)


def caches(device: Device, size: int, page: int) -> Iterator[Row]:
    """Writing new keys and values to their slots, and copying pages: to the bit."""
    heads, tokens, pages = 2, 77, 12
    fused = _random(tokens, 3 * heads * size)
    k, v, _ = (part.view(tokens, heads, size) for part in fused.split(heads * size, -1))
    slots = torch.randperm(pages * page, device="cuda")[:tokens]
    slots[5] = slots[76] = -1  # padding, which writes nothing
    used = slots >= 0
    one = torch.ones(1, device="cuda")
    launch = launches.reshape_and_cache(tokens, heads, size)
    text = f"D {size}, pages of {page}"

    k_cache, v_cache = _random(pages, heads, size // 4, page, 4), _random(pages, heads, size, page)
    k_wanted, v_wanted = k_cache.clone(), v_cache.clone()
    place = slots[used] // page, slots[used] % page
    k_wanted[place[0], :, :, place[1]] = k[used].reshape(-1, heads, size // 4, 4)
    v_wanted[place[0], :, :, place[1]] = v[used]
    shared = device.launch(
        "reshape_and_cache",
        launch,
        *(k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0)),
        *(heads, size, page, 4, one, one),
    )
    errors = measure((k_cache, k_wanted), (v_cache, v_wanted))
    yield _row("reshape_and_cache", text, errors, _EXACT, shared)

    flat = [_random(pages, page, heads, size) for _ in range(2)]
    flat_wanted = [cache.clone() for cache in flat]
    for cache, new in zip(flat_wanted, (k, v), strict=True):
        cache[place] = new[used]
    strides = (*flat[0].stride()[:3], k.stride(0), v.stride(0))
    shared = device.launch(
        "reshape_and_cache_flash",
        launch,
        *(k, v, *flat, slots, *map(ctypes.c_int64, strides), heads, size, page, one, one),
    )
    errors = measure(*zip(flat, flat_wanted, strict=True))
    yield _row("reshape_and_cache_flash", text, errors, _EXACT, shared)

    layers = [
        (_random(pages, heads * size * page), _random(pages, heads * size * page)) for _ in "abc"
    ]
    pairs = torch.tensor([[0, 7], [0, 8], [3, 11]], device="cuda")
    layers_wanted = [tuple(cache.clone() for cache in layer) for layer in layers]
    for layer in layers_wanted:
        for cache in layer:
            cache[pairs[:, 1]] = cache[pairs[:, 0]]
    addresses = [torch.tensor([layer[i].data_ptr() for layer in layers]).cuda() for i in (0, 1)]
    elements = heads * size * page
    launch = launches.copy_blocks(len(layers), len(pairs), elements)
    shared = device.launch("copy_blocks", launch, *addresses, pairs, elements)
    every = [
        pair
        for layer, layer_wanted in zip(layers, layers_wanted, strict=True)
        for pair in zip(layer, layer_wanted, strict=True)
    ]
    yield _row("copy_blocks", text, measure(*every), _EXACT, shared)


def compare(device: Device, seed: int, done: Callable[[Row], None]) -> list[Row]:
    """Everything in :mod:`verl_p40.numerics.cases`; ``done`` is told of every row."""
    torch.manual_seed(seed)
    rows: list[Row] = []

    def add(*found: Row) -> None:
        for row in found:
            rows.append(row)
            done(row)

    for index, prefill in enumerate(cases.PREFIX):
        add(prefix(device, index, prefill))
    for case in cases.DECODE:
        add(decode(device, case))
    for tokens, hidden in cases.NORMS:
        add(*norms(device, tokens, hidden))
    for turned in cases.ROTARY:
        add(rotary(device, turned))
    for name in (*cases.GATED, *cases.PLAIN):
        for tokens, width in cases.WIDTHS:
            add(activation(device, name, tokens, width))
    for size, page in cases.CACHE:
        add(*caches(device, size, page))
    return rows
