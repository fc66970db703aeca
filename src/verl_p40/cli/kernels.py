"""``verl-p40 kernels``: what GPU code can run on a card, without having the card."""

from __future__ import annotations

import shutil
import subprocess
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from verl_p40.cli import kernels_triton
from verl_p40.cli.kernels_view import CcOption, stack_environment, working
from verl_p40.cli.output import JsonFlag, console, print_json
from verl_p40.errors import ExitCode
from verl_p40.kernels.capability import Capability
from verl_p40.kernels.inspect import TargetReport, inspect
from verl_p40.kernels.verdict import FileReport, Verdict, target_key

_STYLE = {
    Verdict.NATIVE: "green",
    Verdict.JIT: "green",
    Verdict.PARTLY: "yellow",
    Verdict.CANNOT: "bold red",
    Verdict.NO_CODE: "dim",
    Verdict.UNREADABLE: "bold red",
}
_MEANING = {
    Verdict.NATIVE: "every module with kernels has native code for compute capability {cc}",
    Verdict.JIT: "the driver compiles PTX for {cc} when a module is first used",
    Verdict.PARTLY: "some modules have code for {cc}; a kernel of another fails with "
    "'no kernel image is available for execution on the device'",
    Verdict.CANNOT: "no module has code for {cc}: every kernel fails with "
    "'no kernel image is available for execution on the device'",
    Verdict.NO_CODE: "no GPU code in there",
    Verdict.UNREADABLE: "damaged: get it again",
}
_MANY_NAMES = 20

app = typer.Typer(
    name="kernels",
    help="What GPU code can run on a P40: the architectures in a binary, Triton kernels compiled.",
    no_args_is_help=True,
    epilog="Example: verl-p40 kernels binary torch",
)


def register(parent: typer.Typer) -> None:
    """Add this group to ``parent``."""
    parent.add_typer(app)


# -- binary ---------------------------------------------------------------------------------


@app.command(
    "binary",
    epilog="Examples: verl-p40 kernels binary vllm-0.8.5.post1-cp38-abi3-manylinux1_x86_64.whl"
    "  ·  verl-p40 kernels binary torch nvidia-cublas-cu12  ·  "
    "verl-p40 kernels binary -v --cc 7.0 build/",
)
def binary(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|PACKAGE...",
            help="A wheel, shared object, executable, .o, .a, fatbin, cubin, PTX file, folder, or "
            "a package of the training stack by its import or distribution name.",
        ),
    ],
    cc: CcOption = "6.1",
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            help="List the kernels by module (-v: the first of each, -vv: all), and files without "
            "GPU code.",
        ),
    ] = 0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 also where it runs only in part.")
    ] = False,
    as_json: JsonFlag = False,
) -> int:
    """Show for which GPUs a binary holds code, and whether it runs on a card.

    Reads the file alone: no GPU, no CUDA toolkit. Exit code 0: it runs, or holds no GPU code;
    1: it cannot run on the card; 5: a file is damaged.
    """
    card = Capability.parse(cc)
    environment = stack_environment()
    with working(as_json) as status:
        reports = [
            inspect(
                target,
                card,
                environment,
                names=verbose > 0 or as_json,
                progress=lambda name, size: status(f"{name} ({size / 1e6:,.0f} MB)"),
            )
            for target in targets
        ]
    if as_json:
        print_json(
            {
                "compute_capability": str(card),
                "how": "file read; nothing was run",
                "targets": [report.to_json() for report in reports],
            }
        )
    else:
        out = console()
        for report in reports:
            _show_binary(out, report, card, verbose)
    verdicts = {report.verdict for report in reports}
    if any(file.problem for report in reports for file in report.files):
        return ExitCode.DATA
    if Verdict.CANNOT in verdicts or (strict and Verdict.PARTLY in verdicts):
        return ExitCode.FOUND
    return ExitCode.OK


def _show_binary(out: Console, report: TargetReport, card: Capability, verbose: int) -> None:
    out.print(f"[bold]{escape(report.target)}[/] on compute capability {card}")
    silent = 0
    for file in report.files:
        if file.verdict is Verdict.NO_CODE and not verbose and len(report.files) > 1:
            silent += 1
            continue
        _show_file(out, file, verbose)
    if silent:
        out.print(f"[dim]  {silent} more files have no GPU code (-v lists them)[/]")
    verdict = report.verdict
    meaning = _MEANING[verdict].format(cc=card)
    out.print(f"[{_STYLE[verdict]}]{verdict.value}[/]: {meaning}\n")


def _show_file(out: Console, file: FileReport, verbose: int) -> None:
    verdict = file.verdict
    out.print(
        f"  [{_STYLE[verdict]}]{verdict.value}[/] {escape(file.name)} ({file.size / 1e6:,.1f} MB)"
    )
    if file.problem:
        out.print(f"      {escape(file.problem)}")
    if file.targets:
        targets = sorted(file.targets, key=target_key)
        out.print("      " + ", ".join(f"{name} x{file.targets[name]}" for name in targets))
    counts = [
        (file.native, "native"),
        (file.jit, f"through JIT (PTX ISA {'.'.join(map(str, file.ptx_isa))})"),
        (file.missing, "without code for this card"),
        (file.empty, "without kernels"),
        (file.relocatable, "input of the device linker"),
        (file.embedded, f"loaded by the library itself, {file.embedded_runs} of them fit"),
    ]
    said = [f"{number} {what}" for number, what in counts if number]
    if said:
        out.print(f"      [dim]modules: {', '.join(said)}[/]")
    if verbose and file.kernels:
        _show_kernels(out, file, verbose)


def _show_kernels(out: Console, file: FileReport, verbose: int) -> None:
    readable = _demangled([name for _, _, names in file.kernels for name in names])
    for verdict, target, names in sorted(file.kernels, key=lambda item: item[0].name):
        shown = names if verbose > 1 else names[:_MANY_NAMES]
        style = _STYLE[verdict]
        out.print(f"      [{style}]{verdict.value}[/] {target}, {len(names)} kernels")
        for name in shown:
            out.print(f"          {escape(readable.get(name, name))}")
        if len(shown) < len(names):
            out.print(f"          [dim]and {len(names) - len(shown)} more (-vv)[/]")


def _demangled(names: list[str]) -> dict[str, str]:
    """C++ names as people write them, where binutils' c++filt is on this machine."""
    tool = shutil.which("c++filt")
    if not tool or not names:
        return {}
    done = subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    return dict(zip(names, lines, strict=True)) if len(lines) == len(names) else {}


app.command("triton", epilog=kernels_triton.EPILOG)(kernels_triton.triton)
