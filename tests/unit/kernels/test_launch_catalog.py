"""The catalog of launches names every Triton kernel of the pinned releases, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl_p40.errors import TreeError, UsageError
from verl_p40.kernels.arguments import number
from verl_p40.kernels.launches import Launch, Release, load
from verl_p40.kernels.standins import Anything, is_executed
from verl_p40.kernels.trees import SourceTree, default, given, user_file
from verl_p40.kernels.tritonscan import JitFunction, scan
from verl_p40.patches.release import unpack_pinned
from verl_p40.stack.pins import load as load_pins


@pytest.fixture(scope="session")
def vllm() -> SourceTree:
    """The pinned release, from its sdist."""
    return default("vllm", None)


@pytest.fixture(scope="session")
def verl(tmp_path_factory: pytest.TempPathFactory) -> SourceTree:
    root = unpack_pinned("verl", tmp_path_factory.mktemp("verl"))
    return SourceTree(root, "verl", "wheel")


@pytest.fixture(params=["vllm", "verl"])
def release(request: pytest.FixtureRequest) -> tuple[Release, SourceTree, list[JitFunction]]:
    tree: SourceTree = request.getfixturevalue(request.param)
    return load()[request.param], tree, scan(tree.root, tree.package)


def test_the_catalog_is_of_the_pinned_releases() -> None:
    pins = load_pins()
    assert load()["vllm"].version == pins.find_release("vllm-sdist").version
    assert load()["verl"].version == pins.find_release("verl").version


def test_no_kernel_is_missing(release: tuple[Release, SourceTree, list[JitFunction]]) -> None:
    catalog, _, found = release
    assert {kernel.key for kernel in catalog.entries()} == {function.key for function in found}
    keys = [kernel.key for kernel in catalog.entries()]
    assert len(keys) == len(set(keys))


def test_the_scanner_sees_every_decorator(
    release: tuple[Release, SourceTree, list[JitFunction]],
) -> None:
    """Counted again, by text."""
    _, tree, found = release
    lines = [
        line
        for path in (tree.root / tree.package).rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if re.match(r"\s*@triton\.jit\b", line)  # a bare @jit is numba's
    ]
    assert len(lines) == len(found) > 8


def test_inlined_kernels_are_called_where_it_says(
    release: tuple[Release, SourceTree, list[JitFunction]],
) -> None:
    catalog, _, found = release
    callers: dict[str, set[str]] = {}
    for function in found:
        for callee in function.callees:
            callers.setdefault(callee, set()).add(function.name)
    # Helpers of the same name (cdiv_fn) stand in two modules, and each is called in its own.
    local = {(function.module, callee) for function in found for callee in function.callees}
    for kernel in catalog.entries():
        if kernel.launch.inlined_into is not None:
            named = set(kernel.launch.inlined_into)
            assert named <= callers.get(kernel.launch.kernel, set())
            assert not named or named & {
                function.name
                for function in found
                if kernel.launch.kernel in function.callees
                and (
                    function.module == kernel.module
                    or (kernel.module, kernel.launch.kernel) not in local
                )
            }


def test_launchers_exist(release: tuple[Release, SourceTree, list[JitFunction]]) -> None:
    """And the launching function names the kernel, in brackets that launch it."""
    catalog, tree, _ = release
    for kernel in catalog.entries():
        launch = kernel.launch
        if launch.inlined_into is None:
            text = tree.root.joinpath(*kernel.module.split(".")).with_suffix(".py").read_text()
            assert re.search(rf"def {launch.launch.rpartition('.')[2]}\(", text), kernel.key
            if launch.launch != launch.kernel:
                assert f"{launch.kernel}[" in text, kernel.key


def test_everything_on_the_default_path_is_free_of_triton() -> None:
    """What is reached needs prefix caching or chunked prefill, and all of it is prefix_prefill."""
    reached = {kernel.key: kernel.reached for kernel in load()["vllm"].entries() if kernel.reached}
    assert set(reached) == {
        "vllm.attention.ops.prefix_prefill:_fwd_kernel",
        "vllm.attention.ops.prefix_prefill:_fwd_kernel_alibi",
    }
    assert set(reached.values()) == {("enable_prefix_caching", "enable_chunked_prefill")}
    assert not [kernel for kernel in load()["verl"].entries() if kernel.reached]
    assert all(len(kernel.why) > 10 for catalog in load().values() for kernel in catalog.entries())


def test_the_reasons_name_real_code(vllm: SourceTree) -> None:
    """xFormers' prefix path calls this kernel; nothing else of V0 on CUDA imports its module."""
    backend = (vllm.root / "vllm/attention/backends/xformers.py").read_text()
    assert "PagedAttention.forward_prefix(" in backend
    paged = (vllm.root / "vllm/attention/ops/paged_attn.py").read_text()
    assert "context_attention_fwd(" in paged
    importers = {
        path.relative_to(vllm.root).as_posix()
        for path in (vllm.root / "vllm").rglob("*.py")
        if "prefix_prefill import" in path.read_text("utf-8")
    }
    assert importers == {
        "vllm/attention/ops/paged_attn.py",
        "vllm/attention/ops/chunked_prefill_paged_decode.py",
    }


def test_variants() -> None:
    launch = Launch(
        kernel="k", launch="f", vary={"head_size": [64, 128]}, variables={"dtype": "float32"}
    )
    assert [v["head_size"] for v in launch.variants()] == [64, 128]
    assert list(launch.variants(head_size=[80], dtype=["float16"])) == [
        {"dtype": "float16", "head_size": 80}
    ]
    assert len(list(launch.variants(unknown=[1, 2]))) == 2
    with pytest.raises(ValueError, match="either launch or inlined_into"):
        Launch(kernel="k")


def test_sizes() -> None:
    assert number("head_size // x + 2", {"head_size": 64, "x": 4}) == 18
    for text in ("__import__('os')", "size", "a.b", "f(1)"):
        with pytest.raises(ValueError):
            number(text, {})


def test_trees(tmp_path: Path, vllm: SourceTree) -> None:
    assert (
        given(vllm.root, "vllm").root
        == given(vllm.root / "vllm", "vllm").root
        == vllm.root.resolve()
    )
    with pytest.raises(TreeError, match="no package verl"):
        given(vllm.root, "verl")
    with pytest.raises(UsageError, match="does not exist"):
        user_file(tmp_path / "gone.py")
    bad = tmp_path / "not-a-name.py"
    bad.write_text("x = 1\n")
    with pytest.raises(UsageError, match="cannot be imported"):
        user_file(bad)


def test_what_is_executed_of_a_project(tmp_path: Path) -> None:
    cases = {
        "import torch\nfrom functools import lru_cache\n": True,
        "import torch\nfrom vllm.config import VllmConfig\n": False,
        "from vllm import x\nimport triton\n@triton.jit\ndef f(a):\n    pass\n": True,
        "from . import sibling\n": False,
    }
    for index, (text, expected) in enumerate(cases.items()):
        file = tmp_path / f"case{index}.py"
        file.write_text(text)
        assert is_executed(file, tmp_path) is expected, text


def test_a_stand_in_takes_whatever_a_module_does_at_import() -> None:
    thing = Anything("vllm.config")

    @thing.register("name")
    def function() -> int:
        return 3

    class Child(thing.Base):  # type: ignore[misc,name-defined]
        pass

    assert thing.decorator(function) is function
    assert Child.__mro__[1] is object
    assert not thing.flag and list(thing.items()) == []
    with thing.lock as held:
        assert repr(held[0] | None).startswith("<stand-in for vllm.config.lock")
