"""Proofs of patches/vllm/build on the name of the wheel and on what it requires."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dry_build import run_setup
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_p40.stack import lockfile, pins

Setup = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def setup(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return lambda archs: run_setup(tree, tmp_path_factory.mktemp("setup"), archs)


@pytest.mark.parametrize(
    ("archs", "version"),
    [
        ("6.1", "0.8.5.post1+cu118.sm61"),
        ("6.0;6.1", "0.8.5.post1+cu118.sm60.sm61"),
        ("6.1;9.0+PTX", "0.8.5.post1+cu118.sm61.sm90"),
        ("7.0;8.0 9.0+PTX", "0.8.5.post1+cu118"),
        ("", "0.8.5.post1+cu118"),
    ],
)
def test_the_version_says_cuda_and_architecture(setup: Setup, archs: str, version: str) -> None:
    assert setup(archs)["version"] == version


def requirements(setup: Setup) -> list[Requirement]:
    """Those that count on the image's Python."""
    every = [Requirement(line.partition(" #")[0]) for line in setup("6.1")["install_requires"]]
    where = {"python_version": "3.10", "platform_system": "Linux", "platform_machine": "x86_64"}
    return [item for item in every if item.marker is None or item.marker.evaluate(where)]


def test_no_requirement_brings_cuda_12(setup: Setup) -> None:
    found = {item.name: item.extras for item in requirements(setup)}
    assert not {"torchvision", "torchaudio", "vllm-flash-attn"} & set(found)
    assert "cgraph" not in found["ray"]  # cupy-cuda12x
    assert {"torch", "xformers", "transformers"} <= set(found)


def test_the_pins_name_what_it_requires(setup: Setup) -> None:
    """pins.toml says it once more, since a lock is made without building vLLM."""
    pinned = [Requirement(line) for line in pins.load().vllm.packages]
    said = {(canonicalize_name(r.name), frozenset(r.extras), r.specifier) for r in pinned}
    assert said == {
        (canonicalize_name(item.name), frozenset(item.extras), item.specifier)
        for item in requirements(setup)
    }


@pytest.mark.parametrize("flavor", ["cpu", "cu118"])
def test_the_locked_stack_satisfies_every_requirement(setup: Setup, flavor: str) -> None:
    """Adding vLLM to the training stack moves no version that is locked there."""
    stack, added = (
        lockfile.versions(lockfile.parse(lockfile.lock_path(f"{part}-{flavor}.txt")))
        for part in ("train", "vllm")
    )
    assert not set(stack) & set(added)
    locked = {**stack, **added}
    wrong = [
        f"{item} but locked {versions}"
        for item in requirements(setup)
        for versions in [locked.get(canonicalize_name(item.name), set())]
        if not versions
        or not all(item.specifier.contains(version, prereleases=True) for version in versions)
    ]
    assert not wrong
    assert not {"torchvision", "torchaudio", "cupy-cuda12x"} & set(locked)
    assert {"xformers", "xgrammar"} <= set(added)


def test_the_wheel_carries_the_record_of_its_patches(setup: Setup, tmp_path: Path) -> None:
    """By setuptools' own rules, from a package folder that has it."""
    from setuptools import Distribution

    from verl_p40.patches.marker import MARKER, PRISTINE

    for name in (MARKER, PRISTINE, ".other"):
        (tmp_path / name).write_text("")
    build_py = Distribution({"package_data": setup("6.1")["package_data"]}).get_command_obj(
        "build_py"
    )
    build_py.finalize_options()
    build_py.manifest_files = {}
    found = {Path(name).name for name in build_py.find_data_files("vllm", str(tmp_path))}
    assert found == {MARKER, PRISTINE}
