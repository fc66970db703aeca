"""Proofs of patches/vllm/p40 on what vLLM chooses and refuses on a Pascal card."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def configured(model: str, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=model, skip_tokenizer_init=True, **arguments).create_engine_config()


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", None])
def test_nothing_has_to_be_set_on_pascal(pascal: Any, make_model: Any, stored: str | None) -> None:
    """V0, float32 and xFormers, whatever type the model is stored in."""
    import torch
    from vllm.platforms import current_platform

    config = configured(make_model(stored))
    assert config.model_config.dtype is torch.float32
    assert os.environ["VLLM_USE_V1"] == "0"
    assert config.parallel_config.worker_cls == "vllm.worker.worker.Worker"
    backend = current_platform.get_attn_backend_cls(
        None, 64, config.model_config.dtype, "auto", config.cache_config.block_size, False, False
    )
    assert backend == "vllm.attention.backends.xformers.XFormersBackend"
    assert not config.cache_config.enable_prefix_caching
    assert not config.scheduler_config.chunked_prefill_enabled


@pytest.mark.parametrize("asked", ["half", "float16", "bfloat16"])
def test_a_dtype_that_the_card_cannot_run_is_refused(
    pascal: Any, make_model: Any, asked: str
) -> None:
    name = {"half": "float16"}.get(asked, asked)
    with pytest.raises(ValueError) as refused:
        configured(make_model(), dtype=asked)
    assert str(refused.value) == (
        f"dtype={name} is not supported on Tesla P40 (compute capability 6.1): use dtype=float32"
    )


@pytest.mark.parametrize(
    ("capability", "half", "brain"),
    [((6, 0), False, False), ((7, 0), True, False), ((7, 5), True, False), ((8, 0), True, True)],
)
def test_other_cards_keep_what_they_can_do(
    pascal: Any,
    make_model: Any,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    half: bool,
    brain: bool,
) -> None:
    import torch

    monkeypatch.setattr(pascal, "capability", capability)
    for asked, allowed in (("float16", half), ("bfloat16", brain)):
        os.environ["VLLM_USE_V1"] = "0"
        if allowed:
            assert configured(make_model(), dtype=asked).model_config.dtype is getattr(torch, asked)
        else:
            with pytest.raises(ValueError, match="is not supported on"):
                configured(make_model(), dtype=asked)
    best = torch.bfloat16 if brain else torch.float16 if half else torch.float32
    assert configured(make_model("bfloat16")).model_config.dtype is best


def test_v1_is_refused_with_the_way_out(
    pascal: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(make_model(), dtype="float32")
    from vllm.v1.engine.async_llm import AsyncLLM

    with pytest.raises(ValueError) as refused:  # what verl's asynchronous rollout does
        AsyncLLM.from_vllm_config(config)
    assert "rollout.mode=sync" in str(refused.value)
    assert "should not happen" not in str(refused.value)

    monkeypatch.setenv("VLLM_USE_V1", "1")
    with pytest.raises(NotImplementedError) as not_there:
        configured(make_model(), dtype="float32")
    assert "Tesla P40 has 6.1" in str(not_there.value)
    assert "Unset VLLM_USE_V1" in str(not_there.value)


def test_no_chunked_prefill_by_default_on_pascal(
    pascal: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(positions=40_960)
    config = configured(model, dtype="float32")
    assert not config.scheduler_config.chunked_prefill_enabled
    # asked for, it is there, and other cards keep their default
    config = configured(model, dtype="float32", enable_chunked_prefill=True)
    assert config.scheduler_config.chunked_prefill_enabled
    monkeypatch.setattr(pascal, "capability", (7, 5))
    config = configured(model, dtype="float32")
    assert config.scheduler_config.chunked_prefill_enabled


@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2"])
def test_an_fp8_cache_is_refused_on_pascal(
    pascal: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    with pytest.raises(ValueError) as refused:
        configured(make_model(), kv_cache_dtype=cache)
    assert str(refused.value) == (
        f"kv_cache_dtype={cache} is not supported on Tesla P40 (compute capability 6.1): "
        "use kv_cache_dtype=auto"
    )
    monkeypatch.setattr(pascal, "capability", (7, 0))
    config = configured(make_model(), kv_cache_dtype=cache)
    assert config.cache_config.cache_dtype == cache


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embedding_without_flash_attention(pascal: Any, neox: bool) -> None:
    """Against the rotation in complex numbers."""
    import torch
    from vllm.model_executor.layers.rotary_embedding import _apply_rotary_emb

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 8, generator=generator, dtype=torch.float64)
    angle = torch.rand(5, 4, generator=generator, dtype=torch.float64) * 6
    rotated = _apply_rotary_emb(x, angle.cos(), angle.sin(), neox)
    pairs = x.unflatten(-1, (2, 4) if neox else (4, 2))
    if neox:
        pairs = pairs.transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones_like(angle), angle
    ).unsqueeze(1)
    wanted = torch.view_as_real(turned)
    wanted = wanted.transpose(-1, -2).flatten(-2) if neox else wanted.flatten(-2)
    torch.testing.assert_close(rotated, wanted)


OTHER_CUDA = """
import torch

real = torch.ops.load_library

def load_library(path):
    if "xformers" in path:
        raise OSError("libcudart.so.12: cannot open shared object file: No such file or directory")
    real(path)

torch.ops.load_library = load_library
torch.cuda.get_device_capability = lambda device=None: (6, 1)
import vllm.attention.backends.xformers
import xformers._cpp_lib
from xformers.ops import fmha

assert xformers._cpp_lib._build_metadata is None
assert torch.version.cuda
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode():
    query = torch.empty(1, 5, 2, 64, device="cuda")
    asked = fmha.Inputs(query, query, query, fmha.attn_bias.LowerTriangularMask())
    print(fmha.cutlass.FwOp.not_supported_reasons(asked))
"""


def test_attention_without_xformers_own_library(tree: Path) -> None:
    """As beside torch for CUDA 11.8, where the wheel's library finds no runtime of CUDA 12."""
    pytest.importorskip("xformers")
    search = os.pathsep.join([str(tree), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", OTHER_CUDA],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "[]"
