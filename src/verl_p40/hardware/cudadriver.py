"""The CUDA driver itself: loading and launching PTX or a cubin without a compiler or launcher stub.

PTX is compiled by the driver for the card at hand (JIT); torch's and Triton's own launchers would
take other code, made for that card. torch has to have made its context current before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Any

_UNSUPPORTED_PTX = 222
"""``CUDA_ERROR_UNSUPPORTED_PTX_VERSION`` of cuda.h."""

_ATTRIBUTES = {"shared": 1, "local": 3, "registers": 4, "ptx_version": 5, "binary_version": 6}
"""Of ``CUfunction_attribute`` in cuda.h: bytes of static shared and of local memory, registers a
thread; the virtual architecture that the PTX was for, and the real one that runs (61, 90)."""


_VIRTUAL_MEMORY = 102
"""``CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`` of cuda.h."""


class CudaError(RuntimeError):
    """The driver refuses; its own words are in the message."""


class Module:
    """Code loaded into the current context, until the ``with`` block ends.

    Raises:
        CudaError: the driver refuses it.
    """

    def __init__(self, code: bytes) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._code = code + b"\0"
        self._module = ctypes.c_void_p()

    def __enter__(self) -> Module:
        self._must(
            "loading the code",
            self._driver.cuModuleLoadData(ctypes.byref(self._module), self._code),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._driver.cuModuleUnload(self._module)

    def launch(
        self,
        name: str,
        *,
        grid: Sequence[int],
        threads: int,
        shared: int,
        arguments: Sequence[Any],
    ) -> None:
        """Run ``name`` once, on the legacy default stream, and wait for it.

        Args:
            grid: blocks, in three dimensions.
            shared: bytes of dynamic shared memory. More than 48 KiB with the static part is
                refused on every card, since it is not asked for beforehand.
            arguments: ctypes values, in the order of the kernel's parameters.
        """
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(v) for v in arguments))
        launched = self._driver.cuLaunchKernel(
            self._function(name), *grid, threads, 1, 1, shared, None, addresses, None
        )
        self._must(f"launching {name}", launched)
        self._must(f"running {name}", self._driver.cuCtxSynchronize())

    def attributes(self, name: str) -> dict[str, int]:
        """What the driver says of a kernel: the keys of ``_ATTRIBUTES``."""
        function, value = self._function(name), ctypes.c_int()
        found = {}
        for key, number in _ATTRIBUTES.items():
            asked = self._driver.cuFuncGetAttribute(ctypes.byref(value), number, function)
            self._must(f"asking about {name}", asked)
            found[key] = value.value
        return found

    def _function(self, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        found = self._driver.cuModuleGetFunction(
            ctypes.byref(function), self._module, name.encode()
        )
        self._must(f"finding {name}", found)
        return function

    def _must(self, what: str, code: int) -> None:
        if code == 0:
            return
        words = ctypes.c_char_p()
        self._driver.cuGetErrorString(code, ctypes.byref(words))
        text = words.value.decode() if words.value else f"error {code}"
        if code == _UNSUPPORTED_PTX:
            text += ": the driver is older than the CUDA of the compiler that made the PTX"
        raise CudaError(f"{what} on the GPU: {text}")


def maps_memory() -> bool:
    """Whether every card maps memory to addresses of the program's choice (``cuMemMap``).

    PyTorch's expandable segments need it. False where there is no driver or no card.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count, device, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return False
    for ordinal in range(count.value):
        failed = driver.cuDeviceGet(ctypes.byref(device), ordinal)
        failed |= driver.cuDeviceGetAttribute(ctypes.byref(value), _VIRTUAL_MEMORY, device)
        if failed or not value.value:
            return False
    return True


def pointer(tensor: Any) -> ctypes.c_uint64:
    """A tensor's device address as an argument; a null pointer for None."""
    return ctypes.c_uint64(0 if tensor is None else tensor.data_ptr())
