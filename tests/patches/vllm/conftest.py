"""The patched vLLM for its proofs: its source tree, a Pascal card to see, and setup.py run dry.

``VERL_P40_TREE`` names the tree (``verl-p40 patches prove --project vllm`` sets it); without it
the pinned release is fetched and patched. vLLM's Python files run as they are. Two things are
stood in for, since this machine has neither: NVML, which tells vLLM what card there is, and the
compiled ``vllm._C``, which none of the tests calls.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from verl_p40.patches.queue import default_directory, load_queue
from verl_p40.patches.release import patched_release

VERSION = "0.8.5.post1"
BINDING = "vllm.third_party.pynvml"


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree under test."""
    named = os.environ.get("VERL_P40_TREE", "")
    if named and (Path(named) / "csrc").is_dir():
        return Path(named)
    folder = tmp_path_factory.mktemp("vllm") / "source"
    patched_release(load_queue(default_directory("vllm")), folder)
    return folder


class Card:
    """The GPU that NVML reports; a test may change it."""

    name = "Tesla P40"
    capability = (6, 1)

    def binds(self, nvml: ModuleType) -> None:
        """Answer for the functions of vLLM's NVML binding that it asks about a card with."""
        nvml.nvmlInit = nvml.nvmlShutdown = lambda *flags: None  # type: ignore[attr-defined]
        nvml.nvmlDeviceGetCount = lambda: 1  # type: ignore[attr-defined]
        nvml.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
        nvml.nvmlDeviceGetCudaComputeCapability = lambda handle: self.capability  # type: ignore[attr-defined]
        nvml.nvmlDeviceGetName = lambda handle: self.name  # type: ignore[attr-defined]
        nvml.nvmlDeviceGetMemoryInfo = (  # type: ignore[attr-defined]
            lambda handle: SimpleNamespace(total=22_912 << 20)
        )


class _Binding:
    """A finder that loads vLLM's own NVML binding and then lets a card answer for it."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != BINDING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def then_bind(module: ModuleType) -> None:
            load(module)
            self._card.binds(module)

        spec.loader.exec_module = then_bind  # type: ignore[method-assign]
        return spec


@pytest.fixture(scope="session")
def pascal(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Card]:
    """vLLM imported from the tree on a machine whose NVML reports a Tesla P40."""
    missing = [name for name in ("msgspec", "zmq", "blake3", "gguf") if not _there(name)]
    if missing:
        pytest.skip(
            f"vLLM's own requirements are not installed ({', '.join(missing)}): "
            "docs/vllm.md says how to make an environment for the proofs"
        )
    info = tmp_path_factory.mktemp("metadata") / f"vllm-{VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n")
    patch = pytest.MonkeyPatch()
    search = [str(tree), str(info.parent)]
    patch.setattr(sys, "path", [*search, *sys.path])
    # vLLM looks at model classes in a process of its own
    patch.setenv("PYTHONPATH", os.pathsep.join([*search, os.environ.get("PYTHONPATH", "")]))
    patch.setenv("VLLM_NO_USAGE_STATS", "1")
    patch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    for name in ("VLLM_USE_V1", "VLLM_ATTENTION_BACKEND", "CUDA_VISIBLE_DEVICES"):
        patch.delenv(name, raising=False)
    card = Card()
    patch.setattr(sys, "meta_path", [_Binding(card), *sys.meta_path])
    if not _there("vllm._C"):
        patch.setitem(sys.modules, "vllm._C", ModuleType("vllm._C"))
    import vllm
    from vllm.platforms import current_platform

    assert Path(vllm.__file__).is_relative_to(tree)
    assert current_platform.is_cuda()
    yield card
    patch.undo()


@pytest.fixture(autouse=True)
def _card_and_engine_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM writes its choice of engine into the environment; a test may change the card."""
    monkeypatch.delenv("VLLM_USE_V1", raising=False)
    yield
    os.environ.pop("VLLM_USE_V1", None)


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


MakeModel = Callable[..., str]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Write the config of a small Qwen2; nothing here loads weights."""

    def make(dtype: str | None = "bfloat16", positions: int = 2048, heads: int = 2) -> str:
        from transformers import Qwen2Config

        folder = tmp_path / f"model-{dtype}-{positions}-{heads}"
        Qwen2Config(
            architectures=["Qwen2ForCausalLM"],
            vocab_size=260,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=1,
            max_position_embeddings=positions,
            torch_dtype=dtype,
        ).save_pretrained(folder)
        return str(folder)

    return make
