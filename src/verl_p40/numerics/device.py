"""Step two's ground: the GPU at hand, the modules of the build on it, and launches that are checked."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl_p40.errors import MachineError
from verl_p40.hardware.cudadriver import CudaError, Module, pointer
from verl_p40.kernels.capability import Capability, limits
from verl_p40.numerics.launches import Launch
from verl_p40.numerics.manifest import ARCH, read_manifest

LIMIT = limits(Capability.from_sm(ARCH)).shared_optin
"""Bytes of shared memory that a block can have on a P40."""

_SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}


def arguments(*values: Any) -> list[Any]:
    """Kernel arguments: a tensor or None is a pointer, an int an ``int``, a float a ``float``;
    anything of ctypes is passed as it is."""
    made: list[Any] = []
    for value in values:
        if value is None or isinstance(value, torch.Tensor):
            made.append(pointer(value))
        elif isinstance(value, float):
            made.append(ctypes.c_float(value))
        elif isinstance(value, int):
            made.append(ctypes.c_int32(value))
        else:
            made.append(value)
    return made


@dataclass
class Device:
    """Loaded modules. ``attributes`` notes what the driver says of every kernel launched.

    Raises:
        CudaError: of the launches, the driver's refusal.
    """

    manifest: dict[str, Any]
    modules: dict[str, Module]
    attributes: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)

    def launch(self, kernel: str, launch: Launch, *values: Any) -> int:
        """Launch a CUDA kernel; its shared memory in bytes, the static part included."""
        facts = self.manifest["kernels"][kernel]
        return self._launch(facts, launch, facts["shared"], arguments(*values))

    def launch_prefix(self, index: int, tensors: dict[str, Any]) -> int:
        """Launch what was recorded for a case, with ``tensors`` by the names of the launcher."""
        facts = self.manifest["prefix"][index]
        made = [
            pointer(tensors[value]) if kind.startswith("*") else _SCALARS[kind](value)
            for kind, value in facts["arguments"]
        ]
        grid = (facts["grid"][0], facts["grid"][1], facts["grid"][2])
        launch = Launch(grid, facts["threads"], facts["shared"])
        return self._launch(facts, launch, 0, made)

    def _launch(
        self, facts: dict[str, Any], launch: Launch, static: int, made: Sequence[Any]
    ) -> int:
        module = self.modules[facts["module"]]
        torch.cuda.synchronize()  # the legacy stream need not wait for torch's
        module.launch(
            facts["entry"],
            grid=launch.grid,
            threads=launch.threads,
            shared=launch.shared,
            arguments=made,
        )
        name = facts["module"], facts["entry"]
        if name not in self.attributes:
            self.attributes[name] = module.attributes(facts["entry"])
        return static + launch.shared

    @property
    def compiled(self) -> dict[str, Any]:
        """What the driver made the launched code of: sets of ``ptx`` and ``binary`` versions."""
        seen = self.attributes.values()
        return {
            "ptx": sorted({item["ptx_version"] for item in seen}),
            "binary": sorted({item["binary_version"] for item in seen}),
        }


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Device]:
    """The GPU with every module of a build loaded, compiled by the driver.

    Raises:
        MachineError: there is no GPU, an older one than a P40, or the driver refuses the PTX.
        DataError: as :func:`read_manifest`.
    """
    manifest = read_manifest(folder)
    if not torch.cuda.is_available():
        raise MachineError("no NVIDIA GPU that torch can use", fix="run it where there is one")
    major, minor = torch.cuda.get_device_capability()
    if not Capability(major, minor).runs_ptx(ARCH):
        raise MachineError(f"{torch.cuda.get_device_name()} is older than PTX for sm_{ARCH}")
    torch.cuda.current_stream().synchronize()
    torch.zeros(1, device="cuda")  # makes the context current
    with contextlib.ExitStack() as stack:
        try:
            loaded = {
                name: stack.enter_context(Module((folder / module["file"]).read_bytes()))
                for name, module in manifest["modules"].items()
            }
        except CudaError as error:
            raise MachineError(str(error)) from error
        yield Device(manifest, loaded)
