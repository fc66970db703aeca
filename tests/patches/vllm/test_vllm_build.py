"""Proofs of patches/vllm/build on what is built: CMake's own decisions for sm_61."""

from __future__ import annotations

from pathlib import Path

import pytest
from dry_build import Configured, configure, find_cmake, run_setup


def _needs_cmake() -> None:
    if not find_cmake():
        pytest.skip("no cmake of version 3.26 or newer, which vLLM needs (pip install cmake)")


@pytest.fixture(scope="module")
def for_pascal(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Configured:
    """The configure step for 6.1, without a network."""
    _needs_cmake()
    return configure(tree, tmp_path_factory.mktemp("configure"), "6.1")


def test_the_build_targets_sm_61(for_pascal: Configured) -> None:
    assert "CUDA supported target architectures: 6.1\n" in for_pascal.output


def test_other_architectures_stay_as_they_were(tree: Path, tmp_path: Path) -> None:
    _needs_cmake()
    done = configure(tree, tmp_path, "6.0;7.5;9.0")
    assert "CUDA supported target architectures: 6.0;7.5;9.0\n" in done.output
    # 7.5 and 9.0 have CUTLASS kernels, and there is no network
    assert done.fetched == ("cutlass",)
    assert "step for cutlass failed" in done.output


@pytest.mark.parametrize("project", ["cutlass", "flashmla", "vllm-flash-attn"])
def test_nothing_is_fetched_for_sm_61(for_pascal: Configured, project: str) -> None:
    assert project not in for_pascal.fetched
    assert f"step for {project} failed" not in for_pascal.output


def test_flash_attention_is_not_demanded_for_sm_61(
    for_pascal: Configured, tree: Path, tmp_path: Path
) -> None:
    assert for_pascal.code == 0, for_pascal.output[-3000:]
    extensions = run_setup(tree, tmp_path, "6.1")["extensions"]
    # setup.py asks for these targets ...
    wanted = {name.rpartition(".")[2] for name in extensions}
    assert wanted == {"_C", "_moe_C", "_vllm_fa2_C", "cumem_allocator"}
    assert wanted <= set(for_pascal.targets)
    # ... and does without the file of the one that has nothing to build
    assert [name for name, optional in extensions.items() if optional] == [
        "vllm.vllm_flash_attn._vllm_fa2_C"
    ]


def test_attention_is_built_for_float32_alone_below_70(
    for_pascal: Configured, tree: Path, tmp_path: Path
) -> None:
    """The real build with the flag: 54 kernels a file (docs/vllm.md)."""
    _needs_cmake()
    said = "Building paged attention for float32 alone\n"
    assert said in for_pascal.output
    # an architecture that can run more gets more
    assert said not in configure(tree, tmp_path, "6.1;7.0").output


def test_kernels_read_the_headers_of_tensors_alone(
    for_pascal: Configured, tree: Path, tmp_path: Path
) -> None:
    """CMake puts our torch/all.h before torch's, for every source; it has no module in it."""
    _needs_cmake()
    assert "Reading torch/types.h where the sources ask for torch/all.h\n" in for_pascal.output
    first = {words[0] for words in for_pascal.includes if words}
    assert first == {str(tree / "csrc" / "torch_types_only")}
    header = tree / "csrc" / "torch_types_only" / "torch" / "all.h"
    assert "#include <torch/types.h>" in header.read_text()
    # not where CUTLASS kernels are built too
    assert "torch_types_only" not in str(configure(tree, tmp_path, "6.1;7.0").includes)


def test_ptx_is_built_where_it_is_asked_for(
    for_pascal: Configured, tree: Path, tmp_path: Path
) -> None:
    _needs_cmake()
    ptx = "arch=compute_61,code=compute_61"
    assert ptx not in for_pascal.output
    asked = configure(tree, tmp_path, "6.1+PTX")
    assert "CUDA supported target architectures: 6.1\n" in asked.output
    flagged = [line for line in asked.output.splitlines() if ptx in line]
    assert any("csrc/layernorm_kernels.cu" in line for line in flagged)
    assert any("csrc/moe/topk_softmax_kernels.cu" in line for line in flagged)
