"""Triton kernels compiled for sm_61 in the training stack. No GPU: sm_61 code generation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_p40.cli.main import run
from verl_p40.errors import ExitCode
from verl_p40.kernels.capability import Capability
from verl_p40.kernels.launches import Kernel, Launch, load
from verl_p40.kernels.trees import SourceTree, default, given, user_file
from verl_p40.kernels.triton_compile import Compiler, Outcome, Request, Variant, compile_variant
from verl_p40.patches.queue import default_directory, load_queue
from verl_p40.patches.release import patched_release
from verl_p40.stack import env

pytestmark = pytest.mark.stack

P40 = Capability(6, 1)
LIMIT = 49_152


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    stack = env.adopted()
    assert stack is not None, "VERL_P40_ENV names the environment these tests run in"
    with Compiler(stack) as running:
        yield running


@pytest.fixture(scope="module")
def vllm() -> SourceTree:
    """vLLM as released."""
    return default("vllm", None)


def kernel(name: str) -> Kernel:
    (found,) = [
        kernel
        for release in load().values()
        for kernel in release.entries()
        if kernel.key.endswith(name)
    ]
    return found


PREFIX = "prefix_prefill:_fwd_kernel"


def compiled(
    compiler: Compiler, tree: SourceTree, name: str, request: Request, **chosen: object
) -> Variant:
    wanted = kernel(name)
    variables = next(wanted.launch.variants(**{key: [value] for key, value in chosen.items()}))
    return compile_variant(wanted, variables, tree, request, compiler)


@pytest.mark.parametrize(("head_size", "shared"), [(64, 81_920), (128, 131_072)])
def test_the_wall(compiler: Compiler, vllm: SourceTree, head_size: int, shared: int) -> None:
    """What vLLM 0.8.5 launches in FP32, whose error a P40 owner knows by heart."""
    variant = compiled(compiler, vllm, PREFIX, Request(P40), head_size=head_size)
    (only,) = variant.configurations
    assert only.shared == shared > LIMIT
    assert variant.outcome is Outcome.SHARED
    assert (only.constants["BLOCK_M"], only.constants["BLOCK_N"]) == (128, 64)
    assert (only.num_warps, only.registers) == (4, None)


@pytest.mark.parametrize(
    ("head_size", "rows", "columns", "shared"),
    [(64, 64, 32, 32_768), (64, 32, 32, 20_480), (64, 16, 16, 9_216), (128, 32, 32, 36_864)],
)
def test_smaller_blocks_fit(
    compiler: Compiler, vllm: SourceTree, head_size: int, rows: int, columns: int, shared: int
) -> None:
    request = Request(P40, {"BLOCK_M": rows, "BLOCK_N": columns}, ptxas="never")
    variant = compiled(compiler, vllm, PREFIX, request, head_size=head_size)
    assert variant.configurations[0].shared == shared <= LIMIT
    assert variant.outcome is Outcome.RUNS


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> SourceTree:
    """The release with the whole of patches/vllm."""
    folder = tmp_path_factory.mktemp("vllm") / "source"
    patched_release(load_queue(default_directory("vllm")), folder)
    return given(folder, "vllm")


@pytest.mark.parametrize("head_size", [64, 128])
def test_the_patched_launch_fits(compiler: Compiler, patched: SourceTree, head_size: int) -> None:
    """The launcher itself has chosen other blocks, by what the card has."""
    variant = compiled(compiler, patched, PREFIX, Request(P40), head_size=head_size)
    (only,) = variant.configurations
    assert variant.outcome is Outcome.RUNS
    assert only.shared is not None and 0 < only.shared < LIMIT
    assert only.registers is not None and 0 < only.registers <= 255
    assert only.spill_stores is not None and only.spill_stores < 1000


def test_the_patched_launch_is_the_old_one_on_ampere(
    compiler: Compiler, patched: SourceTree
) -> None:
    request = Request(Capability(8, 0), ptxas="never")
    variant = compiled(compiler, patched, PREFIX, request, head_size=64)
    constants = variant.configurations[0].constants
    assert (constants["BLOCK_M"], constants["BLOCK_N"]) == (128, 64)


@pytest.mark.parametrize(
    ("name", "outcome", "words"),
    [
        ("triton_merge_attn_states:merge_attn_states_kernel", Outcome.RUNS, ""),
        ("lora_expand:_lora_expand_kernel", Outcome.ABORTED, "LLVM ERROR"),
        ("lightning_attn:_fwd_diag_kernel", Outcome.REFUSED, "compute capability"),
        ("ssd_state_passing:_state_passing_fwd_kernel", Outcome.RUNS, ""),  # autotuned
    ],
)
def test_each_outcome(
    compiler: Compiler, vllm: SourceTree, name: str, outcome: Outcome, words: str
) -> None:
    variant = compiled(compiler, vllm, name, Request(P40))
    assert variant.outcome is outcome, variant.best.message
    assert words in variant.best.message
    if outcome is Outcome.RUNS:
        assert variant.best.registers


def test_every_configuration_of_an_autotuner_is_tried(compiler: Compiler, vllm: SourceTree) -> None:
    variant = compiled(
        compiler, vllm, "ssd_state_passing:_state_passing_fwd_kernel", Request(P40, ptxas="never")
    )
    assert [item.constants["BLOCK_SIZE"] for item in variant.configurations] == [
        64,
        128,
        256,
        512,
        1024,
        2048,
    ]


OWN = """
import triton
import triton.language as tl
from nowhere import nothing


@triton.jit
def add(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def count(x, n, BLOCK: tl.constexpr):
    tl.atomic_add(x, n)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def test_a_kernel_of_your_own(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signature = "*fp32:16, *fp32:16, i32, 1024"
    with pytest.raises(SystemExit) as caught:
        run(["kernels", "triton", f"{own}:add", "--signature", signature, "--json"])
    assert caught.value.code == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert document["category"] == "sm_61 code generation"
    assert document["shared_memory_limit"] == LIMIT
    (variant,) = document["variants"]
    assert variant["configurations"][0]["registers"] > 0
    assert variant["configurations"][0]["constants"] == {"BLOCK": 1024}


@pytest.mark.parametrize(
    ("card", "outcome"), [(P40, Outcome.UNSUPPORTED), (Capability(7, 0), Outcome.RUNS)]
)
def test_instructions_that_a_card_lacks(
    compiler: Compiler, own: Path, card: Capability, outcome: Outcome
) -> None:
    """Atomics with Triton's default semantics are for Volta and later."""
    launch = Launch(kernel="count", launch="count")
    kernel = Kernel(module="own", launch=launch, reached=(), why="")
    request = Request(card, signature="*i32:16, i32, 1")
    variant = compile_variant(kernel, {}, user_file(own), request, compiler)
    assert variant.outcome is outcome
    assert ("sm_70" in variant.best.message) is (outcome is Outcome.UNSUPPORTED)


def test_a_compiler_that_does_not_come_back_is_stopped(
    compiler: Compiler, vllm: SourceTree
) -> None:
    variant = compiled(compiler, vllm, PREFIX, Request(P40, ptxas="always", timeout=3))
    assert variant.outcome is Outcome.ABORTED
    assert variant.best.message == "timed out after 3 s"
    again = compiled(compiler, vllm, PREFIX, Request(P40, ptxas="never"), head_size=64)
    assert again.configurations[0].shared == 81_920
