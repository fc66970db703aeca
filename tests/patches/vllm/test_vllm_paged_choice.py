"""vLLM's own choice between its paged attention kernels: what numerics/launches.py says of it.

``paged_attn.py`` of the tree runs as it is; the operators it calls are replaced by notes.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from verl_p40.numerics import launches

PASCAL = 49_152


@pytest.fixture
def chosen(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, int], str]:
    """Which operator ``PagedAttention.forward_decode`` calls."""
    import torch

    called: list[str] = []
    operators = ModuleType("vllm._custom_ops")
    for name in ("paged_attention_v1", "paged_attention_v2"):
        setattr(operators, name, lambda *_, name=name: called.append(name))
    package = ModuleType("vllm")
    package._custom_ops = operators  # type: ignore[attr-defined]
    triton_utils = ModuleType("vllm.triton_utils")
    triton_utils.HAS_TRITON = False  # type: ignore[attr-defined]
    for module in (package, operators, triton_utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    source = tree / "vllm" / "attention" / "ops" / "paged_attn.py"
    spec = importlib.util.spec_from_file_location("paged_attn_of_the_tree", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)

    def choose(longest: int, sequences: int, heads: int) -> str:
        called.clear()
        attention = SimpleNamespace(forward_decode=module.PagedAttention.forward_decode)
        attention.forward_decode(
            torch.empty(sequences, heads, 8), None, torch.empty(1, 1, 8, 16), None, None,
            longest, "auto", heads, 1.0, None, None, None,
        )  # fmt: skip
        (name,) = called
        return name.rpartition("_")[2]

    return choose


@pytest.mark.parametrize("longest", [1, 511, 512, 513, 4096, 8191, 8192, 8193, 12_288, 32_768])
@pytest.mark.parametrize(("sequences", "heads"), [(1, 14), (36, 14), (37, 14), (32, 16), (256, 14)])
def test_the_rule_is_vllms(
    chosen: Callable[[int, int, int], str], longest: int, sequences: int, heads: int
) -> None:
    version = chosen(longest, sequences, heads)
    assert (version == "v1") is launches.uses_v1(longest, sequences, heads)
    if version == "v1":
        used = launches.paged_attention_v1(sequences, heads, 256, 16, longest).shared
        assert used <= 32_768 < PASCAL


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("paged_attention_v1.cu", "int logits_size = padded_max_seq_len * sizeof(float);"),
        ("paged_attention_v1.cu", "int shared_mem_size = std::max(logits_size, outputs_size);"),
        (
            "paged_attention_v1.cu",
            "int outputs_size = (NUM_WARPS / 2) * head_size * sizeof(float);",
        ),
        ("paged_attention_v2.cu", "int NUM_THREADS = 128, int PARTITION_SIZE = 512>"),
        ("paged_attention_v2.cu", "int logits_size = PARTITION_SIZE * sizeof(float);"),
        (
            "paged_attention_v2.cu",
            "reduce_shared_mem_size = 2 * max_num_partitions * sizeof(float);",
        ),
    ],
)
def test_the_formulas_are_those_of_the_sources(tree: Path, file: str, words: str) -> None:
    text = (tree / "csrc" / "attention" / file).read_text()
    assert words in re.sub(r"\s+", " ", text)
