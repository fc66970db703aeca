"""Compile Triton kernels for a compute capability, without a GPU, and judge what comes out.

Every launch is compiled in a process of its own in the training stack (a fork of one that has
torch imported): LLVM aborts the whole process on an instruction that an architecture lacks.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from verl_p40.errors import MachineError
from verl_p40.kernels.capability import Capability, limits
from verl_p40.kernels.launches import Kernel
from verl_p40.kernels.trees import SourceTree
from verl_p40.stack.env import StackEnv

MARK = "verl-p40-kernel "
_CHILD = "verl_p40.kernels.compile_child"
DEFAULT_TIMEOUT = 600.0
"""Seconds. ptxas alone takes minutes over a kernel that spills tens of kilobytes."""


class Outcome(Enum):
    """What came of compiling one configuration of one kernel."""

    RUNS = "can run"
    SHARED = "too much shared memory"
    UNSUPPORTED = "unsupported instruction"
    ABORTED = "compiler aborted"
    REFUSED = "refused by its launcher"
    FAILED = "not compiled"


@dataclass
class Compiled:
    """One configuration. Bytes; registers a thread.

    Attributes:
        constants: the ``tl.constexpr`` arguments.
        shared: None where it failed before shared memory was laid out.
        registers, spill_stores, spill_loads, stack: from ``ptxas -v``; None where ptxas was not
            asked, since the shared memory alone rules the kernel out.
    """

    outcome: Outcome
    constants: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    shared: int | None = None
    registers: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None
    stack: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "outcome": self.outcome.name.lower()}


@dataclass
class Variant:
    """A kernel as one set of variables launches it: every configuration that would be tried."""

    kernel: Kernel
    variables: dict[str, Any]
    configurations: list[Compiled]
    triton: str = ""

    @property
    def best(self) -> Compiled:
        """What an autotuner would keep of it: a configuration that runs, with fewest spills."""
        return min(
            self.configurations,
            key=lambda item: (
                item.outcome is not Outcome.RUNS,
                list(Outcome).index(item.outcome),
                item.spill_stores or 0,
                item.shared or 0,
            ),
        )

    @property
    def outcome(self) -> Outcome:
        return self.best.outcome

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel.key,
            "variables": self.variables,
            "outcome": self.outcome.name.lower(),
            "reached": list(self.kernel.reached),
            "why": self.kernel.why,
            "configurations": [item.to_json() for item in self.configurations],
        }


@dataclass(frozen=True)
class Request:
    """What to compile kernels for, and how.

    Attributes:
        overrides: constexprs and options (``num_warps``) that replace the launcher's.
        ptxas: ``auto``: unless the shared memory rules the kernel out already; ``always``;
            ``never``: shared memory alone, in a second instead of several.
        signature: of a kernel of the user's own, instead of a launcher's arguments.
    """

    card: Capability
    overrides: Mapping[str, Any] = field(default_factory=dict)
    ptxas: str = "auto"
    signature: str | None = None
    timeout: float = DEFAULT_TIMEOUT


class Compiler:
    """The process in the training stack that compiles; used as a context manager.

    Raises:
        MachineError: the environment's Python does not start.
    """

    def __init__(self, env: StackEnv) -> None:
        self._env = env
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def lines(self, job: dict[str, Any]) -> Iterator[str]:
        """What the job prints, to the line that says that its process has ended."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except OSError:
            pass  # it has ended: what it said is still there to be read
        for line in process.stdout:
            if line.startswith(MARK + '{"old"'):
                raise MachineError(
                    f"{self._env.prefix} has Triton {json.loads(line[len(MARK) :])['old']}; kernels "
                    "are compiled with 3.x, which vLLM's need",
                    fix="set VERL_P40_ENV to a stack with Triton 3.2, such as the cpu flavor's",
                )
            yield line.rstrip("\n")
            if line.startswith(MARK + '{"ended"'):
                return
        self._process = None  # it died: the next job gets another

    def _start(self) -> subprocess.Popen[str]:
        try:
            return self._env.popen_module(
                _CHILD,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # No GPU, even where there is one, and the ptxas that Triton brings.
                env={"CUDA_VISIBLE_DEVICES": "", "TRITON_PTXAS_PATH": "", "PYTHONUNBUFFERED": "1"},
            )
        except OSError as error:
            raise MachineError(
                f"cannot start {self._env.python}: {error.strerror or error}",
                fix="verl-p40 stack install",
            ) from error


def compile_variant(
    kernel: Kernel,
    variables: dict[str, Any],
    tree: SourceTree,
    request: Request,
    compiler: Compiler,
) -> Variant:
    """Compile every configuration of one kernel with one set of variables.

    Raises:
        UsageError: nothing is known about the limits of the card.
        MachineError: the environment's Python does not start.
    """
    limits(request.card)
    launch = kernel.launch
    job: dict[str, Any] = {
        "root": str(tree.root),
        "cc": str(request.card),
        "module": kernel.module,
        "kernel": launch.kernel,
        "launch": launch.launch,
        "arguments": launch.arguments,
        "before": launch.before,
        "variables": variables,
        "overrides": dict(request.overrides),
        "ptxas": request.ptxas,
        "timeout": request.timeout,
    }
    if request.signature is not None:
        job["signature"] = request.signature
    variant = Variant(kernel, variables, [])
    finished = False
    while not finished:
        job["start"] = len(variant.configurations)
        finished = _one_process(job, variant, request, compiler)
    if not variant.configurations:
        variant.configurations.append(
            Compiled(Outcome.FAILED, message=f"{launch.launch} did not launch {launch.kernel}")
        )
    return variant


def _one_process(
    job: dict[str, Any], variant: Variant, request: Request, compiler: Compiler
) -> bool:
    """Do the job once; False where it died in the middle and another is to go on."""
    shared_limit = limits(request.card).shared_optin
    begun: dict[str, Any] | None = None
    other: list[str] = []
    complete = False
    for line in compiler.lines(job):
        if not line.startswith(MARK):
            other.append(line)
            continue
        message = json.loads(line[len(MARK) :])
        if "triton" in message:
            variant.triton = message["triton"]
        elif "begin" in message:
            begun = message["constants"]
        elif "done" in message or "failed" in message:
            if message.get("message", "").startswith("PassManager"):  # says nothing by itself
                message["message"] = _mlir_words(other)
            variant.configurations.append(_compiled(message, begun or {}, shared_limit))
            begun = None
            other.clear()
        elif "refused" in message:
            variant.configurations.append(Compiled(Outcome.REFUSED, message=message["refused"]))
        elif "launches" in message:
            complete = True
    if complete:
        return True
    if begun is None:
        # Nothing was being compiled: the launch itself went wrong, and would again.
        variant.configurations.append(Compiled(Outcome.FAILED, message=_last_words(other)))
        return True
    variant.configurations.append(
        Compiled(Outcome.ABORTED, constants=begun, message=_llvm_words(other))
    )
    return False


def _compiled(message: dict[str, Any], constants: dict[str, Any], shared_limit: int) -> Compiled:
    facts: dict[str, Any] = {
        name: message.get(name)
        for name in (
            *("shared", "registers", "spill_stores", "spill_loads", "stack"),
            *("num_warps", "num_stages"),
        )
    }
    if message.get("failed") is None:
        shared = facts["shared"]
        too_much = shared is not None and shared > shared_limit
        return Compiled(Outcome.SHARED if too_much else Outcome.RUNS, constants, **facts)
    # What the frontend refuses is said to be the kernel's own fault only where the words say so.
    words = message["message"]
    hardware = message["failed"] != "triton" or _names_hardware(words)
    outcome = Outcome.UNSUPPORTED if hardware else Outcome.FAILED
    return Compiled(outcome, constants, words, **facts)


def _names_hardware(words: str) -> bool:
    return re.search(r"sm_?\d+|compute capability|not supported|architecture", words) is not None


def _mlir_words(lines: list[str]) -> str:
    """The diagnostic that MLIR printed, without the file that it points into."""
    for line in lines:
        if match := re.search(r"error: (.+)", line):
            return match[1].strip()[:300]
    return "Triton's code generation failed without a diagnostic"


def _llvm_words(lines: list[str]) -> str:
    for line in lines:
        if "LLVM ERROR" in line or "Cannot select" in line or "timed out" in line:
            return line.strip()[:300]
    return _last_words(lines)


def _last_words(lines: list[str]) -> str:
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:300] if said else "the compiler process died without a word"


def compile_all(
    kernels: list[Kernel],
    tree: SourceTree,
    request: Request,
    compiler: Compiler,
    *,
    vary: Mapping[str, list[Any]] | None = None,
    on_start: Callable[[Kernel, dict[str, Any]], None] = lambda kernel, variables: None,
) -> Iterator[Variant]:
    """Compile every variant of every kernel that is a launch of its own, one after the other."""
    for kernel in kernels:
        if kernel.launch.inlined_into is None:
            for variables in kernel.launch.variants(**(vary or {})):
                on_start(kernel, variables)
                yield compile_variant(kernel, variables, tree, request, compiler)
