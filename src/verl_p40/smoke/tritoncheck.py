"""Triton's code generation for sm_61, and what that code computes where there is a GPU."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl_p40.hardware.cudadriver import CudaError, Module, pointer
from verl_p40.smoke.matmul import gamma
from verl_p40.smoke.model import CODE, PTX, Context, Failed, Finding, Skip
from verl_p40.smoke.torchbuild import limit_memory

TARGET = 61
SHARED_LIMIT = 48 * 1024
"""Bytes of shared memory a block can have at compute capability 6.1 (CUDA C++ Programming Guide,
technical specifications per compute capability)."""

ADD_BLOCK = 1024
DOT_BLOCK = 32
_WARP = 32


@dataclass(frozen=True)
class Compiled:
    """A kernel's code for sm_61. ``shared`` is in bytes."""

    name: str
    ptx: str
    cubin: bytes
    shared: int
    warps: int

    @property
    def parameters(self) -> int:
        """Parameters of the entry point: newer Tritons append pointers of their own."""
        head = self.ptx[self.ptx.index(".entry") :].split(")")[0]
        return len(re.findall(r"\.param\b", head))


def check(context: Context) -> Finding:
    """Compile for sm_61 everywhere; with a GPU, run that very code on it.

    On a newer card the driver compiles the sm_61 PTX; on a 6.1 card the cubin itself is loaded.
    """
    if importlib.util.find_spec("triton") is None:
        raise Skip("triton is not installed in the training stack")
    triton = importlib.import_module("triton")
    add, dot = compile_all()
    details: dict[str, Any] = {
        "triton": triton.__version__,
        "target": f"sm_{TARGET}",
        "shared_bytes": {"vector_add": add.shared, "fp32_dot": dot.shared},
        "cubin_bytes": {"vector_add": len(add.cubin), "fp32_dot": len(dot.cubin)},
    }
    for kernel in (add, dot):
        if not re.search(rf"^\.target sm_{TARGET}\b", kernel.ptx, re.MULTILINE):
            raise Failed(f"Triton made no sm_{TARGET} PTX for {kernel.name}", details)
        if kernel.cubin[:4] != b"\x7fELF":
            raise Failed(f"ptxas made no cubin for {kernel.name}", details)
        if kernel.shared > SHARED_LIMIT:
            raise Failed(
                f"{kernel.name} wants {kernel.shared:,} bytes of shared memory, and a block has "
                f"{SHARED_LIMIT:,} on a P40",
                details,
            )
    text = (
        f"triton {triton.__version__}: vector add and FP32 dot compiled for sm_{TARGET}, "
        f"{dot.shared:,} bytes shared"
    )
    if context.device != "cuda":
        return Finding(text, CODE, details)
    limit_memory(context)
    native, worst = run_all(add, dot)
    details["worst_fraction_of_bound"] = round(worst, 4)
    category = context.category if native else PTX
    return Finding(f"{text}; run, at worst {worst:.2f} of the error bound", category, details)


def compile_all() -> tuple[Compiled, Compiled]:
    """``(vector_add, fp32_dot)`` for sm_61."""
    from verl_p40.smoke import kernels

    pointers = {"x": "*fp32", "y": "*fp32", "out": "*fp32"}
    add = compile_kernel(kernels.vector_add, {**pointers, "n": "i32"}, {"BLOCK": ADD_BLOCK})
    pointers = {"a": "*fp32", "b": "*fp32", "out": "*fp32"}
    dot = compile_kernel(kernels.fp32_dot, {**pointers, "k": "i32"}, {"BLOCK": DOT_BLOCK})
    return add, dot


def compile_kernel(
    function: Any, signature: Mapping[str, str], constants: Mapping[str, int]
) -> Compiled:
    """Compile a ``triton.jit`` function for sm_61 without a GPU, with Triton 2.3 or 3.x."""
    triton = importlib.import_module("triton")
    if triton.__version__.startswith("2."):
        return _compile_2(function, signature, constants)
    GPUTarget: Any = importlib.import_module("triton.backends.compiler").GPUTarget
    ASTSource: Any = importlib.import_module("triton.compiler").ASTSource
    if "constexprs" in inspect.signature(ASTSource.__init__).parameters:
        # From 3.3 on, constants are in the signature too.
        named = {**signature, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(function, named, dict(constants))
    else:
        source = ASTSource(function, dict(signature), dict(constants))
    done = triton.compile(source, target=GPUTarget("cuda", TARGET, _WARP))
    return Compiled(
        done.metadata.name,
        done.asm["ptx"],
        done.asm["cubin"],
        int(done.metadata.shared),
        int(done.metadata.num_warps),
    )


def _compile_2(
    function: Any, signature: Mapping[str, str], constants: Mapping[str, int]
) -> Compiled:
    """Stage by stage: ``triton.compile`` of 2.3 also builds a launcher, with gcc and libcuda."""
    ASTSource: Any = importlib.import_module("triton.compiler").ASTSource
    CUDABackend: Any = importlib.import_module("triton.compiler.backends.cuda").CUDABackend
    place = function.arg_names.index
    source = ASTSource(
        function,
        {place(name): kind for name, kind in signature.items()},
        {place(name): value for name, value in constants.items()},
    )
    target = ("cuda", TARGET)
    backend = CUDABackend(target)
    options = backend.parse_options({})
    metadata: dict[str, Any] = {"target": target, **options.__dict__, **source.metadata()}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    code: Any = source.make_ir(options)
    made = {}
    for name, stage in stages.items():
        code = made[name] = stage(code, metadata)
    return Compiled(
        metadata["name"],
        str(made["ptx"]),
        bytes(made["cubin"]),
        int(metadata["shared"]),
        int(metadata["num_warps"]),
    )


def run_all(add: Compiled, dot: Compiled) -> tuple[bool, float]:
    """Run both; ``(whether the card is a 6.1 one, largest error as a fraction of its bound)``.

    Raises:
        Failed: a sum is not the rounded one, or a product exceeds the bound of
            :func:`verl_p40.smoke.matmul.gamma`.
    """
    import torch

    native = torch.cuda.get_device_capability() == (6, 1)
    made = torch.Generator().manual_seed(22)
    size = 3 * ADD_BLOCK + 17
    x, y = (torch.randn(size, generator=made).cuda() for _ in range(2))
    total = torch.zeros(size, device="cuda")
    _launch(add, native, (size + ADD_BLOCK - 1) // ADD_BLOCK, [x, y, total], size)
    wrong = int((total.cpu() != x.cpu() + y.cpu()).sum())
    if wrong:
        raise Failed(f"vector add: {wrong} of {size} sums differ from the CPU's")
    depth = 8 * DOT_BLOCK
    a = torch.randn(DOT_BLOCK, depth, generator=made)
    b = torch.randn(depth, DOT_BLOCK, generator=made)
    product = torch.zeros(DOT_BLOCK, DOT_BLOCK, device="cuda")
    _launch(dot, native, 1, [a.cuda(), b.cuda(), product], depth)
    exact = a.double() @ b.double()
    bound = gamma(depth) * (a.double().abs() @ b.double().abs())
    worst = float(((product.cpu().double() - exact).abs() / bound).max())
    if not worst <= 1.0:
        raise Failed(f"FP32 dot: the error is {worst:.3g} times the largest that FP32 can make")
    return native, worst


def _launch(kernel: Compiled, native: bool, blocks: int, tensors: list[Any], number: int) -> None:
    import torch

    torch.cuda.synchronize()  # the driver's own stream does not wait for torch's copies
    arguments: list[Any] = [*map(pointer, tensors), ctypes.c_int32(number)]
    # Triton's scratch, where there is any.
    arguments += [pointer(None)] * (kernel.parameters - len(arguments))
    try:
        with Module(kernel.cubin if native else kernel.ptx.encode()) as module:
            module.launch(
                kernel.name,
                grid=(blocks, 1, 1),
                threads=kernel.warps * _WARP,
                shared=kernel.shared,
                arguments=arguments,
            )
    except CudaError as error:
        raise Failed(str(error)) from error
