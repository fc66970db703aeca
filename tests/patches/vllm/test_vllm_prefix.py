"""Proofs of the patches on the prefix prefill: blocks that fit, and errors before they are needed.

vLLM's own launch runs against a driver that says it is a P40, and Triton compiles for it. What
that cannot show, that the numbers are right, its interpreter shows on the CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

PASCAL, TURING, AMPERE, HOPPER = 49_152, 65_536, 166_912, 232_448
"""Shared memory that a block can have, in bytes: CUDA C++ Programming Guide, table of compute
capabilities (the opt-in maximum, from 7.0 on: what Triton asks for)."""


@pytest.fixture
def triton_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Make Triton's active driver report a card."""
    triton = pytest.importorskip("triton")
    if not hasattr(triton.language, "range"):
        pytest.skip(f"Triton {triton.__version__} cannot compile the prefix kernel at all")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))

    def sees(capability: int, shared: int) -> None:
        triton.runtime.driver.set_active(
            SimpleNamespace(
                get_current_device=lambda: 0,
                get_current_stream=lambda device: 0,
                get_current_target=lambda: GPUTarget("cuda", capability, 32),
                utils=SimpleNamespace(
                    get_device_properties=lambda device: {"max_shared_mem": shared}
                ),
            )
        )

    yield sees
    triton.runtime.driver.reset_active()


def launch(head_size: int, *, alibi: bool = False, page: int = 16) -> Any:
    """Call vLLM's context_attention_fwd with tensors of one short prompt; what Triton compiled."""
    import torch
    from vllm.attention.ops import prefix_prefill

    if hasattr(prefix_prefill, "get_max_shared_mem"):
        prefix_prefill.get_max_shared_mem.cache_clear()
    kernel = prefix_prefill._fwd_kernel_alibi if alibi else prefix_prefill._fwd_kernel
    run, compiled = kernel.run, []
    kernel.run = lambda *args, **kwargs: compiled.append(run(*args, **kwargs | {"warmup": True}))
    try:
        q, k, v = torch.zeros(8, 2, head_size), *torch.zeros(2, 8, 1, head_size)
        prefix_prefill.context_attention_fwd(
            q, k, v, torch.zeros_like(q), "auto",
            torch.zeros(4, 1, head_size // 4, page, 4), torch.zeros(4, 1, head_size, page),
            torch.zeros(1, 4, dtype=torch.int32), torch.tensor([0, 8]), torch.tensor([24]),
            None, 8, torch.ones(1), torch.ones(1),
            alibi_slopes=torch.ones(2) if alibi else None,
        )  # fmt: skip
    finally:
        kernel.run = run
    return compiled[0]


@pytest.mark.parametrize(
    ("head_size", "alibi", "bytes_needed"),
    [(64, False, 20_480), (128, False, 36_864), (256, True, 33_792)],
)
def test_the_launch_fits_the_device(
    pascal: Any, triton_sees: Any, head_size: int, alibi: bool, bytes_needed: int
) -> None:
    triton_sees(61, PASCAL)
    kernel = launch(head_size, alibi=alibi)
    assert kernel.metadata.target.arch == 61
    assert kernel.metadata.shared <= PASCAL
    assert kernel.metadata.shared == bytes_needed


@pytest.mark.parametrize(("head_size", "page"), [(64, 32), (80, 16), (256, 16), (32, 16)])
def test_the_formula_is_what_triton_allocates(
    pascal: Any, triton_sees: Any, head_size: int, page: int
) -> None:
    from vllm.attention.ops.prefix_prefill import get_block_sizes, get_shared_mem_bytes

    triton_sees(61, PASCAL)
    padded = 1 << (head_size - 1).bit_length()
    m, n = get_block_sizes(128, 64, padded, 4, page, PASCAL)
    assert launch(head_size, page=page).metadata.shared == get_shared_mem_bytes(
        m, n, padded, 4, page
    )


@pytest.mark.parametrize(
    ("limit", "head_size", "blocks"),
    [
        (PASCAL, 64, (32, 32)),
        (PASCAL, 128, (32, 32)),
        (PASCAL, 256, (16, 16)),
        (TURING, 64, (32, 32)),  # the 81,920 bytes fit a T4 no more than a P40
        (TURING, 32, (128, 64)),
        (AMPERE, 64, (128, 64)),
        (AMPERE, 128, (128, 64)),
        (HOPPER, 128, (128, 64)),
    ],
)
def test_blocks_change_only_where_they_do_not_fit(
    pascal: Any, limit: int, head_size: int, blocks: tuple[int, int]
) -> None:
    from vllm.attention.ops.prefix_prefill import get_block_sizes, get_shared_mem_bytes

    assert get_block_sizes(128, 64, head_size, 4, 16, limit) == blocks
    assert get_shared_mem_bytes(*blocks, head_size, 4, 16) <= limit


def test_a_head_size_that_fits_no_blocks_is_a_plain_error(pascal: Any, triton_sees: Any) -> None:
    triton_sees(61, PASCAL)
    with pytest.raises(ValueError) as error:
        launch(512)
    assert "66560 bytes of shared memory a block for head size 512" in str(error.value)
    assert "this GPU has 49152" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "heads", "words"),
    [
        ({"enable_prefix_caching": True, "block_size": 8}, 2, "KV cache blocks of 16 tokens"),
        ({"enable_prefix_caching": True}, 0, "head size 512"),
        ({"enable_chunked_prefill": True}, 0, "head size 512"),
    ],
)
def test_what_the_prefix_kernel_cannot_do_is_said_at_the_start(
    pascal: Any,
    make_model: Any,
    triton_sees: Any,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    heads: int,
    words: str,
) -> None:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.worker.worker import Worker

    if heads == 0:
        arguments = {**arguments, "hf_overrides": {"head_dim": 512}}
    config = EngineArgs(
        model=make_model(), skip_tokenizer_init=True, **arguments
    ).create_engine_config()
    worker = object.__new__(Worker)
    worker.vllm_config, worker.model_config = config, config.model_config
    worker.device_config, worker.local_rank = config.device_config, 0
    triton_sees(61, PASCAL)
    # There is no card to set; everything after that is vLLM's own.
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    from vllm.attention.ops import prefix_prefill

    if hasattr(prefix_prefill, "get_max_shared_mem"):
        prefix_prefill.get_max_shared_mem.cache_clear()
    with pytest.raises(ValueError) as error:
        worker.init_device()
    assert words in str(error.value) and "\n" not in str(error.value)

    import triton

    monkeypatch.delattr(triton.language, "range")  # as in 2.3.1
    with pytest.raises(ValueError, match="need Triton 3, this is"):
        worker.init_device()


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("head_size", [64, 128])
def test_the_numbers_are_right_with_the_smaller_blocks(
    tree: Path, head_size: int, alibi: bool
) -> None:
    """A CPU run of the kernels, ragged and with cached prefixes, against float64."""
    script = Path(__file__).with_name("interpreted_prefix.py")
    source = tree / "vllm" / "attention" / "ops" / "prefix_prefill.py"
    arguments = [str(source), str(head_size), str(PASCAL), *(["alibi"] if alibi else [])]
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["m"], result["n"]) == (32, 32)
    assert result["error"] < 1e-6
