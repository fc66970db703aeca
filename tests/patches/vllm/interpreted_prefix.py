"""Run in a process of its own by test_vllm_prefix: the prefix kernels in Triton's interpreter.

Arguments: the file prefix_prefill.py, head size, bytes of shared memory, and ``alibi`` or nothing.
Prints the largest relative error against attention in float64, and the block sizes used.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PAGE = 16
LENGTHS = [(0, 7), (16, 5), (37, 21), (64, 1), (3, 40)]
"""Cached and new tokens of each sequence: ragged, a lone query, pages full and not."""


def load(path: str, limit: int) -> Any:
    platforms: Any = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(
        has_device_capability=lambda capability: False,
        get_device_capability=lambda: (6, 1),
        is_rocm=lambda: False,
        is_cuda=lambda: True,
    )
    sys.modules["vllm"] = ModuleType("vllm")
    sys.modules["vllm.platforms"] = platforms
    spec = importlib.util.spec_from_file_location("prefix_prefill", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.get_max_shared_mem = lambda device: limit  # type: ignore[attr-defined]
    return module


def attention(q: Any, k: Any, v: Any, context: int, slope: Any) -> Any:
    """Causal attention of the queries after ``context`` tokens, in float64. [T, H, D]"""
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    rows = torch.arange(q.shape[0]) + context
    distance = torch.arange(k.shape[0])[None] - rows[:, None]
    if slope is not None:
        scores = scores + slope[:, None, None] * distance
    scores = scores.masked_fill(distance > 0, float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v)


def main(path: str, head_size: int, limit: int, alibi: bool) -> None:
    module = load(path, limit)
    used: dict[str, int] = {}
    name = "_fwd_kernel_alibi" if alibi else "_fwd_kernel"
    kernel = getattr(module, name)

    class Noting:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                used.update(m=kwargs["BLOCK_M"], n=kwargs["BLOCK_N"])
                kernel[grid](*args, **kwargs)

            return launch

    setattr(module, name, Noting())
    generator = torch.Generator().manual_seed(1)
    heads, kv_heads, x = 4, 2, 4
    total = [context + new for context, new in LENGTHS]
    pages = [-(-length // PAGE) for length in total]
    table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    order = torch.randperm(sum(pages), generator=generator).int()
    k_cache = torch.zeros(sum(pages), kv_heads, head_size // x, PAGE, x)
    v_cache = torch.zeros(sum(pages), kv_heads, head_size, PAGE)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else None
    queries, keys, values, wanted = [], [], [], []
    taken = 0
    for row, (context, new) in enumerate(LENGTHS):
        q, k, v = (
            torch.randn(n, h, head_size, generator=generator)
            for n, h in ((new, heads), (context + new, kv_heads), (context + new, kv_heads))
        )
        for page in range(pages[row]):
            table[row, page] = order[taken]
            taken += 1
        for token in range(context):
            page, slot = int(table[row, token // PAGE]), token % PAGE
            k_cache[page, :, :, slot] = k[token].view(kv_heads, head_size // x, x)
            v_cache[page, :, :, slot] = v[token]
        repeat = heads // kv_heads
        wanted.append(
            attention(
                q.double(),
                k.double().repeat_interleave(repeat, 1),
                v.double().repeat_interleave(repeat, 1),
                context,
                None if slopes is None else slopes.double(),
            )
        )
        queries.append(q)
        keys.append(k[context:])
        values.append(v[context:])
    q, k, v = torch.cat(queries), torch.cat(keys), torch.cat(values)
    news = torch.tensor([new for _, new in LENGTHS])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), news.cumsum(0)]).int()
    out = torch.zeros_like(q)
    one = torch.ones(1)
    module.context_attention_fwd(
        q, k, v, out, "auto", k_cache, v_cache, table, starts,
        torch.tensor(total, dtype=torch.int32), None, int(news.max()), one, one,
        alibi_slopes=slopes,
    )  # fmt: skip
    reference = torch.cat(wanted)
    error = (out.double() - reference).norm() / reference.norm()
    print(json.dumps({"error": float(error), **used}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["alibi"])
