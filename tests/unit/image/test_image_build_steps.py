"""scripts/image_build.py: which lines of which lock a step of the Dockerfile installs, from where."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


class Installed:
    """What uv was told: its options and the names in the requirement file, call by call."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], set[str]]] = []

    def __call__(self, *arguments: str) -> None:
        if "install" in arguments:
            lines = Path(arguments[-1]).read_text(encoding="utf-8").splitlines()
            names = {line.split("==")[0] for line in lines if "==" in line}
            self.calls.append((list(arguments), names))

    @property
    def names(self) -> set[str]:
        return set().union(*(names for _, names in self.calls))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("image_build")
    for name in ("image_build", "bootstrap"):
        sys.modules.pop(name, None)


@pytest.fixture
def uv(steps: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Installed:
    recorder = Installed()
    monkeypatch.setattr(steps, "uv", recorder)
    monkeypatch.setenv("TORCH_INDEX", "https://torch.invalid/cu118")
    return recorder


def test_patterns_choose_torch_and_what_it_loads(
    steps: ModuleType, uv: Installed, tmp_path: Path
) -> None:
    steps.install(tmp_path, "train-cu118.txt", ["torch", "nvidia-*", "numpy"], [])
    assert {"torch", "numpy", "nvidia-cublas-cu11"} <= uv.names
    assert all(name in ("torch", "numpy") or name.startswith("nvidia-") for name in uv.names)
    # torch alone is asked of PyTorch's index
    for arguments, names in uv.calls:
        assert ("https://torch.invalid/cu118" in arguments) == (names == {"torch"})


def test_everything_but_some(steps: ModuleType, uv: Installed, tmp_path: Path) -> None:
    steps.install(tmp_path, "train-cpu.txt", [], ["verl", "uv"])
    assert not {"verl", "uv"} & uv.names
    assert {"torch", "ray", "transformers", "triton"} <= uv.names


def test_a_name_that_no_line_has_is_named(steps: ModuleType, uv: Installed, tmp_path: Path) -> None:
    with pytest.raises(steps.bootstrap.BootstrapError, match=r"has no nvidia-rtx-\*, vllm$"):
        steps.install(tmp_path, "train-cpu.txt", ["torch", "vllm", "nvidia-rtx-*"], [])
    assert not uv.calls


def test_triton_is_the_locks_unless_torchs_own_is_asked_for(
    steps: ModuleType, uv: Installed, tmp_path: Path
) -> None:
    steps.triton(tmp_path, "")
    assert not uv.calls
    steps.triton(tmp_path, "3.2.0")
    assert uv.names == {"triton"}
    assert all("--require-hashes" in arguments for arguments, _ in uv.calls)
    with pytest.raises(steps.bootstrap.BootstrapError, match=r"TRITON=3\.4\.0: the locks have"):
        steps.triton(tmp_path, "3.4.0")
