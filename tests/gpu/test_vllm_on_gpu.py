"""vLLM's engine on the GPU at hand against transformers in float64, token by token.

Needs the training stack with vLLM: the wheel of ``nox -s vllm-wheel`` (``6.1+PTX`` runs on newer
cards, in float32), or one built for the card.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

CHILD = Path(__file__).with_name("vllm_child.py")
PASCAL = 49_152
RELEASED = [128, 64]


@pytest.fixture(scope="module", autouse=True)
def gpu_and_vllm() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")


def generate(**options: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(options)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_greedy_tokens(eager: bool) -> None:
    done = generate(enforce_eager=eager, enable_sleep_mode=True, rounds=3)
    assert done["got"] == [done["expected"]] * 3
    assert done["launches"] == []


def test_prefix_caching_within_pascals_shared_memory() -> None:
    """The first prompts fill the cache, all later ones hit it, with the blocks of a P40."""
    done = generate(enable_prefix_caching=True, limit=PASCAL, rounds=2)
    assert done["got"] == [done["expected"]] * 2
    assert done["launches"]
    assert [32, 32] in done["launches"]
    assert RELEASED not in done["launches"]


def test_chunked_prefill_within_pascals_shared_memory() -> None:
    done = generate(enable_chunked_prefill=True, max_num_batched_tokens=64, limit=PASCAL, rounds=2)
    assert done["got"] == [done["expected"]] * 2
    assert [32, 32] in done["launches"]
    assert RELEASED not in done["launches"]


def test_a_card_with_room_keeps_the_released_blocks() -> None:
    import triton

    properties = triton.runtime.driver.active.utils.get_device_properties(0)
    if properties["max_shared_mem"] < 81_920:
        pytest.skip("this card has no room for them")
    # in the first round all prompts are one batch, and nothing is cached yet
    done = generate(enable_prefix_caching=True, rounds=2)
    assert done["got"] == [done["expected"]] * 2
    assert RELEASED in done["launches"]
