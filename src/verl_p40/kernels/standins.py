"""What Triton source files import, answered without installing or importing their project.

A kernel's file is executed as it is. Of its project, modules that define Triton functions, or
that need nothing but torch and Triton, are executed too; every other one is replaced by an object
that accepts anything. What decides how a kernel is launched (platform, capability, limits) is
answered for the chosen card. Runs in the training stack, in a process of its own.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_p40.kernels.capability import Capability, Limits
from verl_p40.kernels.tritonscan import scan_file

_ENOUGH = frozenset({*sys.stdlib_module_names, "torch", "triton", "numpy", "packaging"})


class Anything:
    """Accepts every use that a module makes of a name at import time. False, empty, and as a
    decorator it changes nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Anything(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            len(args) == 1
            and not kwargs
            and callable(args[0])
            and not isinstance(args[0], Anything)
        ):
            return args[0]
        return Anything(f"{self._name}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, key: Any) -> Anything:
        return Anything(f"{self._name}[{key!r}]")

    def __or__(self, other: Any) -> Anything:
        return self

    __ror__ = __or__

    def __enter__(self) -> Anything:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}>"


class Version(tuple[int, int]):
    """vLLM's ``DeviceCapability``."""

    major = property(lambda self: self[0])
    minor = property(lambda self: self[1])

    def to_int(self) -> int:
        return self[0] * 10 + self[1]


class Platform(Anything):
    """vLLM's ``current_platform`` on a CUDA card of one compute capability."""

    def __init__(self, card: Capability) -> None:
        super().__init__("vllm.platforms.current_platform")
        self._card = card

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def is_rocm(self) -> bool:
        return False

    def get_device_capability(self, device_id: int = 0) -> Version:
        return Version((self._card.major, self._card.minor))

    def has_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
        return (self._card.major, self._card.minor) >= tuple(wanted)

    def get_device_name(self, device_id: int = 0) -> str:
        return f"card of compute capability {self._card}"

    def fp8_dtype(self) -> Any:
        import torch

        return torch.float8_e4m3fn


def answers(card: Capability) -> dict[str, dict[str, Any]]:
    """By module, the names whose value matters, with what vLLM 0.8.5 and verl 0.4.1 mean by them."""
    import triton
    import triton.language as tl

    def cdiv(a: int, b: int) -> int:
        return -(a // -b)

    def round_up(x: int, y: int) -> int:
        return cdiv(x, y) * y

    return {
        "vllm.platforms": {"current_platform": Platform(card)},
        "vllm.triton_utils": {"HAS_TRITON": True, "triton": triton, "tl": tl},
        "vllm.utils": {"cdiv": cdiv, "round_up": round_up},
        "vllm.attention.backends.utils": {"PAD_SLOT_ID": -1},
        "vllm.platforms.rocm": {"use_rocm_custom_paged_attention": lambda *_, **__: False},
        "vllm.model_executor.layers.fused_moe": {"get_config": lambda: None},
        "verl.utils.device": {"get_torch_device": lambda: Anything("device")},
    }


class _StandIn(ModuleType):
    """A module that is not executed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        given: Mapping[str, Any] = self.__dict__.get("_given", {})
        if name in given:
            return given[name]
        if "__path__" in self.__dict__:
            with contextlib.suppress(ModuleNotFoundError):
                return importlib.import_module(f"{self.__name__}.{name}")
        return Anything(f"{self.__name__}.{name}")


class _StandInLoader(importlib.abc.Loader):
    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_given"] = self._given


class TreeFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of one package in a source tree, executed or replaced."""

    def __init__(self, root: Path, package: str, given: Mapping[str, Mapping[str, Any]]) -> None:
        self._root, self._package, self._given = root, package, given

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != self._package:
            return None
        place = self._root.joinpath(*fullname.split("."))
        given = self._given.get(fullname, {})
        if place.is_dir():
            loader = _StandInLoader(given)
            spec = importlib.machinery.ModuleSpec(fullname, loader, is_package=True)
            spec.submodule_search_locations = [str(place)]
            return spec
        source = place.with_suffix(".py")
        if source.is_file() and not given and is_executed(source, self._root):
            _replace_missing(source)
            return importlib.util.spec_from_file_location(fullname, source)
        if source.is_file() or given or list(place.parent.glob(f"{place.name}.*.so")):
            return importlib.machinery.ModuleSpec(fullname, _StandInLoader(given))
        return None


def _imports(source: Path) -> set[str]:
    """The top-level names that a file imports, at any depth; ``.`` for relative ones."""
    found = set()
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else (node.module or "").split(".")[0])
    return found


def is_executed(source: Path, root: Path) -> bool:
    """Whether a file has Triton functions, or needs nothing but torch and Triton."""
    return any(scan_file(source, root)) or _imports(source) <= _ENOUGH


def _replace_missing(source: Path) -> None:
    """A third-party package that is not installed must not keep a kernel from compiling."""
    for name in _imports(source) - _ENOUGH - {"."}:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            module = _StandIn(name)
            module.__dict__["__path__"] = []
            sys.modules[name] = module


def answer_torch(card: Capability, limits: Limits) -> None:
    """Make ``torch.cuda`` describe a card of this capability. Nothing is run on it."""
    import torch

    class Properties:
        name = f"card of compute capability {card}"
        major, minor = card.major, card.minor
        multi_processor_count = 30
        warp_size = 32
        total_memory = 24_576 << 20
        shared_memory_per_block = limits.shared_static
        shared_memory_per_block_optin = limits.shared_optin
        max_threads_per_multi_processor = 2048
        regs_per_multiprocessor = 65_536

    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_, **__: (card.major, card.minor)
    cuda.get_device_properties = lambda *_, **__: Properties()
    cuda.get_device_name = lambda *_, **__: Properties.name
    cuda.device = lambda *_, **__: contextlib.nullcontext()
    cuda.synchronize = lambda *_, **__: None
    # Launchers assert it of every tensor, those they make themselves too.
    torch.Tensor.is_cuda = property(lambda self: True)
    # The first of two ranks, whose collectives leave everything as it is.
    dist: Any = torch.distributed
    dist.get_rank = lambda *_, **__: 0
    dist.get_world_size = lambda *_, **__: 2
    dist.all_reduce = lambda *_, **__: None
