"""Loading and launching PTX or a cubin through the CUDA driver: no compiler, no launcher stub.

Triton's own launcher is C that it compiles at run time, and would take the code of the card at
hand; here the very sm_61 code is run. torch has to have made its context current before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType

from verl_p40.smoke.model import Failed

_UNSUPPORTED_PTX = 222
"""``CUDA_ERROR_UNSUPPORTED_PTX_VERSION`` of cuda.h."""


class Module:
    """Code loaded into the current context, until the ``with`` block ends.

    Raises:
        Failed: the driver refuses; its own words are given.
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
        blocks: int,
        threads: int,
        shared: int,
        pointers: Sequence[int],
        numbers: Sequence[int],
        parameters: int,
    ) -> None:
        """Run ``name`` once and wait for it.

        Args:
            shared: bytes of dynamic shared memory.
            pointers: device addresses, the first parameters.
            numbers: 32-bit integers, the next ones.
            parameters: how many the kernel has; the rest are null pointers (Triton's scratch).
        """
        function = ctypes.c_void_p()
        found = self._driver.cuModuleGetFunction(
            ctypes.byref(function), self._module, name.encode()
        )
        self._must(f"finding {name}", found)
        values: list[ctypes.c_uint64 | ctypes.c_int32] = [ctypes.c_uint64(p) for p in pointers]
        values += [ctypes.c_int32(n) for n in numbers]
        values += [ctypes.c_uint64(0) for _ in range(parameters - len(values))]
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        launched = self._driver.cuLaunchKernel(
            function, blocks, 1, 1, threads, 1, 1, shared, None, addresses, None
        )
        self._must(f"launching {name}", launched)
        self._must(f"running {name}", self._driver.cuCtxSynchronize())

    def _must(self, what: str, code: int) -> None:
        if code == 0:
            return
        words = ctypes.c_char_p()
        self._driver.cuGetErrorString(code, ctypes.byref(words))
        text = words.value.decode() if words.value else f"error {code}"
        if code == _UNSUPPORTED_PTX:
            text += ": the driver is older than the CUDA of Triton's compiler"
        raise Failed(f"{what} on the GPU: {text}")
