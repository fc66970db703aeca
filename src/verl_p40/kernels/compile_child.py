"""In the training stack: launch kernels as their projects do, and compile instead of running.

``python -m verl_p40.kernels.compile_child`` reads a job in JSON from every line of standard input.
It does each in a fork of its own, which LLVM may abort, and prints lines of JSON: one for every
kernel that is about to be compiled, one for what came of it, and one when the fork has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from verl_p40.kernels.arguments import build, from_signature
from verl_p40.kernels.capability import Capability, limits
from verl_p40.kernels.standins import TreeFinder, answer_torch, answers

MARK = "verl-p40-kernel "
WARP = 32


class CompileFailure(Exception):
    """The code generator refused a kernel: ``stage`` and its own words."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage, self.message = stage, message


def emit(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)


class Recorder:
    """Stands where Triton launches: compiles the wanted kernel and records what it needs."""

    def __init__(self, job: dict[str, Any], card: Capability) -> None:
        self.kernel: str = job["kernel"]
        self.overrides: dict[str, Any] = job.get("overrides", {})
        self.start: int = job.get("start", 0)
        self.limit: int = job.get("limit", 0)
        self.ptxas: str = job["ptxas"]
        self.card = card
        self.index = 0
        self.last: dict[str, Any] = {}

    def run(self, function: Any, original: Any, args: Any, kwargs: Any) -> None:
        if function.__name__ != self.kernel:
            return
        index = self.index
        self.index += 1
        if index < self.start or (self.limit and index >= self.start + self.limit):
            return
        args = list(args)
        for name, value in self.overrides.items():
            if name in function.arg_names and function.arg_names.index(name) < len(args):
                args[function.arg_names.index(name)] = value
            else:
                kwargs[name] = value
        named = dict(zip(function.arg_names, args, strict=False)) | kwargs
        constants = {
            name: named[name]
            for i, name in enumerate(function.arg_names)
            if i in function.constexprs and isinstance(named.get(name), int | float | str | bool)
        }
        emit({"begin": index, "constants": constants})
        try:
            original(function, *args, **{**kwargs, "warmup": True})
        except CompileFailure as failure:
            emit({"failed": failure.stage, "message": failure.message, **self.last})
        except Exception as error:
            emit({"failed": "triton", "message": _first_words(error), **self.last})
        else:
            emit({"done": index, **self.last})
        self.last = {}

    def compile(self, source: Any, target: Any = None, options: Any = None) -> Any:
        """In place of ``triton.compile``: as far as PTX, then ptxas with its report."""
        from triton._C.libtriton import ir
        from triton.compiler.compiler import make_backend

        backend = make_backend(target)
        parsed = backend.parse_options({**(options or {}), **source.parse_options()})
        self.last = {"num_warps": parsed.num_warps, "num_stages": parsed.num_stages}
        stages: dict[str, Any] = {}
        backend.add_stages(stages, parsed)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        metadata: dict[str, Any] = {"target": target, **parsed.__dict__}
        code = source.make_ir(
            parsed, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
        maximum = limits(self.card).shared_optin
        for name, stage in stages.items():
            if name == "cubin":
                break
            if name == "llir" and self.ptxas != "always":
                # LLVM and ptxas take minutes over blocks of this size, and no card takes them.
                self.last["shared"] = shared_memory(code, context, backend)
                if self.last["shared"] is not None and (
                    self.ptxas == "never" or self.last["shared"] > maximum
                ):
                    return SimpleNamespace(metadata=metadata)
            try:
                code = stage(code, metadata)
            except RuntimeError as error:
                raise CompileFailure(name, _first_words(error)) from error
            self.last["shared"] = metadata.get("shared", self.last.get("shared"))
        assert isinstance(code, str)
        self.last.update(assemble(code, self.card))
        return SimpleNamespace(metadata=metadata)


def shared_memory(code: Any, context: Any, backend: Any) -> int | None:
    """The bytes of shared memory that a TritonGPU module will have, from a copy of it.

    The same passes lead up to the allocation as in the backend's own ``make_llir`` (Triton 3.2);
    None where another version calls them otherwise: the full compilation then says it.
    """
    scope = type(backend).add_stages.__globals__
    try:
        ir, passes, nvidia = scope["ir"], scope["passes"], scope["nvidia"]
        with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
            file.write(str(code))
            file.flush()
            module = ir.parse_mlir_module(file.name, context)
        module.context = context
        manager = ir.pass_manager(context)
        nvidia.passes.ttgpuir.add_decompose_unsupported_conversions(manager)
        passes.ttgpuir.add_combine_tensor_select_and_if(manager)
        passes.convert.add_scf_to_cf(manager)
        passes.convert.add_index_to_llvmir(manager)
        passes.ttgpuir.add_allocate_shared_memory(manager)
        manager.run(module)
        shared = module.get_int_attr("triton_gpu.shared")
    except (AttributeError, KeyError, RuntimeError):
        return None
    return None if shared is None else int(shared)


def _first_words(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A CompilationError shows the source first and says what is wrong last.
    return (lines[-1] if type(error).__name__ == "CompilationError" else lines[0])[:300]


def assemble(ptx: str, card: Capability) -> dict[str, Any]:
    """Run Triton's own ptxas for the card: registers, spill bytes, stack, or its complaints.

    Raises:
        CompileFailure: ptxas refuses the code; the message has every different complaint.
    """
    from triton.backends.nvidia.compiler import _path_to_binary

    ptxas, _ = _path_to_binary("ptxas")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        suffix = "a" if card.sm == 90 else ""
        done = subprocess.run(
            [ptxas, "-v", f"--gpu-name=sm_{card.sm}{suffix}", str(source), "-o", f"{folder}/out"],
            capture_output=True,
            text=True,
            check=False,
        )
    report = done.stdout + done.stderr
    if done.returncode:
        raise CompileFailure("ptxas", complaints(report) or f"ptxas exit code {done.returncode}")
    return read_report(report)


def complaints(report: str) -> str:
    """The errors in what ptxas printed, each kind once, without file and line."""
    found = dict.fromkeys(
        match.strip()
        for match in re.findall(r"error\s*:\s*(.+)", report)
        if "fatal" not in match.lower() and "Ptx assembly aborted" not in match
    )
    return "; ".join(found)[:600]


def read_report(report: str) -> dict[str, Any]:
    """Registers a thread and bytes of spills, stack and constants from ``ptxas -v``."""

    def number(pattern: str) -> int:
        return sum(int(value) for value in re.findall(pattern, report))

    return {
        "registers": max((int(v) for v in re.findall(r"Used (\d+) registers", report)), default=0),
        "spill_stores": number(r"(\d+) bytes spill stores"),
        "spill_loads": number(r"(\d+) bytes spill loads"),
        "stack": number(r"(\d+) bytes stack frame"),
    }


def arm(recorder: Recorder, card: Capability) -> None:
    """Put the recorder where Triton launches, autotunes and asks its driver for the device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import autotuner, jit

    maximum = limits(card).shared_optin
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_current_target=lambda: GPUTarget("cuda", card.sm, WARP),
        get_device_interface=lambda: SimpleNamespace(),
        get_benchmarker=lambda: None,
        set_current_device=lambda device: None,
        utils=SimpleNamespace(
            get_device_properties=lambda device=0: {
                "max_shared_mem": maximum,
                "multiprocessor_count": 30,
                "warpSize": WARP,
                "max_num_regs": 65_536,
            }
        ),
    )
    triton.runtime.driver.set_active(driver)
    triton.compiler.compile = recorder.compile
    launch = jit.JITFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        recorder.run(self, launch, args, kwargs)

    def tune(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        configs = self.prune_configs(kwargs) if len(self.configs) > 1 else self.configs
        for config in configs:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    jit.JITFunction.run = run
    autotuner.Autotuner.run = tune


def main() -> int:
    """Do the jobs on standard input, one after the other."""
    import torch
    import triton

    del torch  # imported once, for every fork
    if int(triton.__version__.split(".")[0]) < 3:
        emit({"old": triton.__version__})
        return 1
    for line in sys.stdin:
        in_fork(json.loads(line))
    return 0


def in_fork(job: dict[str, Any]) -> None:
    """Do one job in a process of its own, and no longer than it may take."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()  # its ptxas goes with it
            do(job)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + job["timeout"]
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                print(f"timed out after {job['timeout']:.0f} s", flush=True)
                os.killpg(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                break
            time.sleep(0.02)
    except BaseException:
        os.killpg(child, signal.SIGKILL)
        raise
    emit({"ended": os.waitstatus_to_exitcode(status)})


def do(job: dict[str, Any]) -> None:
    """Launch what the job says, with everything in place that keeps it from a GPU."""
    import triton

    card = Capability.parse(job["cc"])
    answer_torch(card, limits(card))
    recorder = Recorder(job, card)
    arm(recorder, card)
    package = job["module"].split(".")[0]
    sys.meta_path.insert(0, TreeFinder(Path(job["root"]), package, answers(card)))
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    module = importlib.import_module(job["module"])
    emit({"triton": triton.__version__})
    try:
        launch(job, module)
    except (RuntimeError, NotImplementedError) as error:
        # The launcher's own words: a card of this capability is not for it.
        emit({"refused": _first_words(error)})
    emit({"launches": recorder.index})


def launch(job: dict[str, Any], module: Any) -> None:
    """Call what launches the kernel, with the arguments of the job."""
    variables = job.get("variables", {})
    for name, words in job.get("before", {}).items():
        getattr(module, name)(*build(words, variables, module))
    launcher = job["launch"]
    if "signature" in job:
        getattr(module, launcher)[(1, 1, 1)](*from_signature(job["signature"]))
        return
    arguments = build(job["arguments"], variables, module)
    if launcher == job["kernel"]:
        kernel: Any = getattr(module, launcher)
        kernel[(1, 1, 1)](**arguments)
        return
    function: Any = module
    for part in launcher.split("."):
        function = getattr(function, part)
    function(**arguments)


if __name__ == "__main__":
    sys.exit(main())
