"""Which card a log is about, and advice for it."""

from __future__ import annotations

import pytest

from verl_p40.diagnose import Finding, diagnose_lines
from verl_p40.diagnose.card import capability_in
from verl_p40.diagnose.model import Advice
from verl_p40.kernels.capability import Capability


@pytest.mark.parametrize(
    ("line", "capability"),
    [
        ("Your Tesla P40 GPU has compute capability 6.1. You can use float16 instead", (6, 1)),
        ("requires device with capability <= (9, 0) but your GPU has capability (12, 0)", (12, 0)),
        ("Found GPU0 GeForce GT 730 which is of cuda capability 3.5.", (3, 5)),
        ("NVIDIA GeForce RTX 5060 Ti with CUDA capability sm_120 is not compatible", (12, 0)),
        ("Found Tesla P100-PCIE-16GB which is too old, CUDA Capability >= 7.0", (6, 0)),
        ("GPU 0: Tesla V100-SXM2-32GB (UUID: GPU-1)", (7, 0)),
        ("|   0  NVIDIA GeForce GTX 1080 Ti     Off |", (6, 1)),
        ("Bfloat16 is only supported on GPUs with compute capability of at least 8.0", None),
        ("FlashAttention only supports Ampere GPUs or newer, requires sm_80", None),
        ("RuntimeError: CUDA error: no kernel image is available", None),
    ],
)
def test_what_the_card_has_not_what_is_required(
    line: str, capability: tuple[int, int] | None
) -> None:
    found = capability_in([line])
    assert (found and (found.major, found.minor)) == capability


def test_two_cards_are_no_answer_and_its_own_word_goes_before_a_name() -> None:
    assert capability_in(["GPU 0: Tesla P40", "GPU 1: Tesla T4"]) is None
    assert capability_in(["GPU 0: Tesla P40", "GPU 1: Tesla P40"]) == Capability(6, 1)
    both = ["tested on Tesla T4", "your GPU has compute capability 6.1"]
    assert capability_in(both) == Capability(6, 1)


def test_advice_for_some_cards_is_for_all_where_the_card_is_unknown() -> None:
    old = Advice(do="use float32", cc="<7.0")
    assert old.suits(Capability(6, 1)) and old.suits(None) and not old.suits(Capability(7, 0))
    new = Advice(do="use half", cc=">=7.0")
    assert new.suits(Capability(7, 0)) and not new.suits(Capability(6, 1))
    with pytest.raises(ValueError, match="cc"):
        Advice(do="use half", cc="7.0")


def _cause(*lines: str) -> Finding:
    return diagnose_lines(lines).causes[0]


BF16 = (
    "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your "
    "{} GPU has compute capability {}. You can use float16 instead by explicitly setting the "
    "`dtype` flag in CLI, for example: --dtype=half."
)


def test_half_is_right_on_a_volta_and_wrong_on_a_pascal() -> None:
    pascal = " ".join(_cause(BF16.format("Tesla P40", "6.1")).fix)
    volta = " ".join(_cause(BF16.format("Tesla V100", "7.0")).fix)
    assert "do not follow the message" in pascal and "half is right" not in pascal
    assert "half is right" in volta and "do not follow the message" not in volta


def test_a_build_is_told_the_architecture_of_the_card_that_the_log_names() -> None:
    error = "RuntimeError: CUDA error: no kernel image is available for execution on the device"
    assert "TORCH_CUDA_ARCH_LIST=6.1" in " ".join(_cause(error).fix)
    assert "TORCH_CUDA_ARCH_LIST=7.5" in " ".join(_cause("GPU 0: Tesla T4", error).fix)


def test_a_newer_card_is_not_sent_to_an_older_torch() -> None:
    said = "NVIDIA GeForce RTX 5060 Ti with CUDA capability sm_120 is not compatible with the current PyTorch installation."
    fix = " ".join(_cause(said).fix)
    assert "+cu128" in fix and "+cu118" not in fix


def test_what_no_pattern_found_leaves_no_gap() -> None:
    killed = _cause(
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."
    )
    assert "?" not in killed.text and "()" not in killed.text
    known = _cause(
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "Memory on the node (IP: 192.0.2.1, ID: fc2b) where the task (actor ID: f9cc, name=S, "
        "pid=4331, memory used=2.22GB) was running was 59.49GB / 62.58GB (0.950744), which exceeds "
        "the memory usage threshold of 0.95.",
    )
    assert "59.49GB of 62.58GB" in known.text
