"""``verl-p40 kernels triton``."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from verl_p40.cli.kernels_view import (
    CcOption,
    show_summary,
    show_variant,
    stack_environment,
    working,
)
from verl_p40.cli.output import JsonFlag, console, print_json
from verl_p40.errors import ExitCode, MachineError, UsageError
from verl_p40.kernels.capability import Capability, limits
from verl_p40.kernels.launches import Kernel, Launch
from verl_p40.kernels.launches import load as load_launches
from verl_p40.kernels.trees import SourceTree, default, given, user_file
from verl_p40.kernels.triton_compile import (
    DEFAULT_TIMEOUT,
    Compiler,
    Outcome,
    Request,
    Variant,
    compile_all,
)
from verl_p40.stack import env

_PACKAGES = ("vllm", "verl")


class Dtype(Enum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Ptxas(Enum):
    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


EPILOG = (
    "Examples: verl-p40 kernels triton prefix_prefill:_fwd_kernel --head-size 64  ·  "
    "verl-p40 kernels triton prefix_prefill --set BLOCK_M=32 --set BLOCK_N=32  ·  "
    "verl-p40 kernels triton --all --json  ·  "
    "verl-p40 kernels triton mine.py:add --signature '*fp32:16, *fp32:16, i32, 1024'"
)


def triton(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODULE[:KERNEL]]",
            help="A module of vLLM or verl (its last part is enough) and a kernel in it, or a "
            "Python file of your own and a kernel in it (with --signature).",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every Triton kernel of vLLM and verl (minutes).")
    ] = False,
    tree: Annotated[
        Path | None,
        typer.Option(
            help="Take the sources from this folder (with vllm/ or verl/ in it), such as a patched "
            "tree. Default: what is installed in the training stack, else the pinned release.",
        ),
    ] = None,
    cc: CcOption = "6.1",
    head_size: Annotated[
        list[int] | None,
        typer.Option("--head-size", min=1, max=1024, help="Instead of the catalog's head sizes."),
    ] = None,
    dtype: Annotated[
        list[Dtype] | None,
        typer.Option("--dtype", help="Instead of the catalog's, where a kernel has one to vary."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Replace a constexpr or num_warps."),
    ] = None,
    signature: Annotated[
        str | None,
        typer.Option(help="Of a kernel of your own, as Triton's ahead-of-time compiler takes it."),
    ] = None,
    ptxas: Annotated[
        Ptxas,
        typer.Option(
            help="Run ptxas: unless shared memory rules a kernel out already, always (minutes for "
            "some), or never (shared memory alone).",
        ),
    ] = Ptxas.AUTO,
    listing: Annotated[
        bool, typer.Option("--list", help="Show the kernels and who reaches them; compile none.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds for one kernel's compiler.")
    ] = DEFAULT_TIMEOUT,
    as_json: JsonFlag = False,
) -> int:
    """Compile Triton kernels for a card without a GPU: shared memory, registers, spills, verdict.

    The project's own launching code is executed with a stand-in for the card, so the block sizes
    are its own. Exit code 0: all can run; 1: one cannot.
    """
    kernels = _chosen(name, every or (listing and name is None), signature)
    if listing:
        return _list(kernels, as_json)
    environment = stack_environment()
    if environment is None:
        raise MachineError(
            "Triton kernels are compiled in the training stack, and none is installed",
            fix="verl-p40 stack install",
        )
    request = Request(
        card=Capability.parse(cc),
        overrides=_settings(setting or []),
        ptxas=ptxas.value,
        signature=signature,
        timeout=timeout,
    )
    limit = limits(request.card).shared_optin
    vary: dict[str, list[Any]] = {
        "head_size": head_size or [],
        "dtype": [choice.value for choice in dtype or []],
    }
    out = console()
    variants: list[Variant] = []
    with working(as_json) as status, Compiler(environment) as compiler:
        for package, group in _by_package(kernels).items():
            source = _source(package, name, tree, environment)
            if not as_json:
                out.print(f"[bold]{escape(package)}[/]: {escape(source.origin)}")
            for variant in compile_all(
                group,
                source,
                request,
                compiler,
                vary=vary,
                on_start=lambda kernel, variables: status(f"compiling {kernel.key} {variables}"),
            ):
                variants.append(variant)
                if not as_json:
                    show_variant(out, variant, limit)
    failed = [variant for variant in variants if variant.outcome is not Outcome.RUNS]
    if as_json:
        print_json(
            {
                "category": "sm_61 code generation" if request.card.sm == 61 else "code generation",
                "compute_capability": str(request.card),
                "shared_memory_limit": limit,
                "triton": sorted({variant.triton for variant in variants if variant.triton}),
                "ok": not failed,
                "variants": [variant.to_json() for variant in variants],
            }
        )
    else:
        show_summary(out, variants, request.card, limit)
    return ExitCode.FOUND if failed else ExitCode.OK


def _chosen(name: str | None, every: bool, signature: str | None) -> list[Kernel]:
    """The kernels that the arguments name.

    Raises:
        UsageError: none, or arguments that contradict each other.
    """
    if (name is None) != every:
        raise UsageError("give MODULE[:KERNEL] or --all", fix="see verl-p40 kernels triton --help")
    known = [kernel for release in load_launches().values() for kernel in release.entries()]
    if name is None:
        return known
    module, _, wanted = name.partition(":")
    if module.endswith(".py"):
        if not (signature and wanted):
            raise UsageError(
                f"{name}: a kernel of your own needs its name and signature",
                fix="verl-p40 kernels triton mine.py:add --signature '*fp32:16, i32, 1024'",
            )
        launch = Launch(kernel=wanted, launch=wanted)
        return [Kernel(module=user_file(Path(module)).package, launch=launch, reached=(), why="")]
    if signature:
        raise UsageError("--signature is for a kernel in a file of your own: mine.py:KERNEL")
    found = [
        kernel
        for kernel in known
        if f".{kernel.module}".endswith(f".{module}") and wanted in {"", kernel.launch.kernel}
    ]
    if not found:
        modules = sorted({kernel.module.rpartition(".")[2] for kernel in known})
        raise UsageError(
            f"no Triton kernel of vLLM or verl is called {name}",
            fix=f"modules: {', '.join(modules)}",
        )
    launched = [kernel for kernel in found if kernel.launch.inlined_into is None]
    if not launched:
        into = ", ".join(found[0].launch.inlined_into or []) or "none"
        raise UsageError(f"{name} is no launch of its own", fix=f"compile what inlines it: {into}")
    return launched


def _settings(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals and value):
            raise UsageError(f"--set {word}: not NAME=VALUE", fix="such as --set BLOCK_M=32")
        try:
            found[name] = json.loads(value.lower() if value in {"True", "False"} else value)
        except ValueError:
            found[name] = value
    return found


def _by_package(kernels: list[Kernel]) -> dict[str, list[Kernel]]:
    groups: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.module.split(".")[0], []).append(kernel)
    return groups


def _source(
    package: str, name: str | None, tree: Path | None, environment: env.StackEnv
) -> SourceTree:
    if package not in _PACKAGES:
        assert name is not None
        return user_file(Path(name.partition(":")[0]))
    return given(tree, package) if tree else default(package, environment)


def _list(kernels: list[Kernel], as_json: bool) -> int:
    if as_json:
        print_json(
            {
                "kernels": [
                    {
                        "kernel": kernel.key,
                        "launched_by": kernel.launch.launch or None,
                        "inlined_into": kernel.launch.inlined_into,
                        "reached": list(kernel.reached),
                        "why": kernel.why,
                    }
                    for kernel in kernels
                ]
            }
        )
        return ExitCode.OK
    out = console()
    for kernel in kernels:
        launch = kernel.launch
        how = f"launched by {launch.launch}" if launch.launch else "inlined"
        reached = f"reached with {', '.join(kernel.reached)}" if kernel.reached else "not reached"
        style = "yellow" if kernel.reached else "green"
        out.print(f"[bold]{escape(kernel.key)}[/] {how}  [{style}]{reached}[/]")
        out.print(f"    [dim]{escape(kernel.why)}[/]")
    return ExitCode.OK
