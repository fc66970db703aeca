"""``python -m verl_p40.numerics``: compile for 6.1, run on the GPU at hand, compare with float64."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from verl_p40.errors import ExitCode, MachineError, UsageError, VerlP40Error
from verl_p40.numerics.manifest import MANIFEST, MARK
from verl_p40.numerics.view import show

_EXAMPLES = """examples:
  python scripts/numerics.py all work/ptx          both steps; nvcc and a GPU on one machine
  python scripts/numerics.py build work/ptx        PTX alone: needs nvcc, no GPU
  python -m verl_p40.numerics run work/ptx --json  where the GPU is: needs torch, no nvcc
  python scripts/numerics.py show result.json --every

exit codes: 0 all within the bound; 1 some are not; others as in docs/exit-codes.md
"""

_WIDTH = 130
"""Columns of a table in a pipe or file."""

Say = Callable[[str], None]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="numerics",
        description="vLLM's kernels as PTX for compute capability 6.1, compiled by the driver of "
        "the GPU at hand and compared with float64.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = made.add_subparsers(dest="step", required=True, metavar="all|build|run|show")
    for step, words in (("all", "build, then run"), ("build", "compile"), ("run", "compare")):
        one = steps.add_parser(step, help=words)
        one.add_argument("folder", type=Path, help="of the PTX and its manifest")
        if step != "run":
            one.add_argument("--tree", type=Path, help="patched sources of vLLM; default: made")
            one.add_argument("--jobs", type=int, default=2, help="compilers at a time, 1 GB each")
        if step != "build":
            one.add_argument("--seed", type=int, default=0)
            _view_arguments(one)
    one = steps.add_parser("show", help="print a saved result")
    one.add_argument("file", type=Path, help="what run --json printed")
    _view_arguments(one)
    return made


def _view_arguments(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--every", action="store_true", help="each comparison, not each kernel's worst"
    )
    one.add_argument("--json", action="store_true", help="one JSON document")


def build_step(args: argparse.Namespace, say: Say) -> None:
    from verl_p40.numerics.build import build
    from verl_p40.numerics.nvcc import Nvcc
    from verl_p40.stack import env
    from verl_p40.wheel.toolchain import find_toolchain

    if args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: at least one")
    if args.tree is not None and not (args.tree / "csrc").is_dir():
        raise UsageError(
            f"{args.tree} has no csrc in it", fix="verl-p40 patches source FOLDER --project vllm"
        )
    if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        raise UsageError(f"{args.folder}: not an empty folder", fix="name one that does not exist")
    nvcc = Nvcc(find_toolchain())
    build(args.folder, nvcc, env.ensure(), args.tree, args.jobs, say)


def run_step(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """The report of a comparison, made where torch is: in this interpreter or the stack's.

    Raises:
        VerlP40Error: as the child says.
        MachineError: the child ended without a word.
    """
    words = [str(args.folder.absolute()), str(args.seed)]
    module = "verl_p40.numerics.child"
    if importlib.util.find_spec("torch") is not None:
        command, environ = [sys.executable, "-m", module, *words], dict(os.environ)
    else:
        from verl_p40.stack import env

        stack = env.ensure()
        command, environ = stack.command(module, words), stack.environ()
    done = 0
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(MARK):
                continue
            message: dict[str, Any] = json.loads(line[len(MARK) :])
            if "row" in message:
                done += 1
                say(f"{done} compared: {message['row']['kernel']}, {message['row']['case']}")
            elif "report" in message:
                report: dict[str, Any] = message["report"]
                return report
            else:
                error = VerlP40Error(message["error"], fix=message["fix"])
                error.exit_code = ExitCode(message["code"])
                raise error
    raise MachineError(f"the comparison ended with exit code {process.returncode}")


def read_result(file: Path) -> dict[str, Any]:
    """What ``run --json`` printed.

    Raises:
        UsageError: it is something else.
    """
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _ = document["rows"], document["gpu"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file}: no result of run --json ({error})") from None
    return document


def work(args: argparse.Namespace, errors: Console) -> dict[str, Any] | None:
    if args.step == "show":
        return read_result(args.file)
    with errors.status("") as status:

        def show_status(text: str) -> None:
            status.update(escape(text))

        def say(text: str) -> None:
            if errors.is_terminal:
                show_status(text)
            else:
                errors.print(escape(text))

        if args.step in ("all", "build"):
            build_step(args, say)
        return run_step(args, show_status) if args.step in ("all", "run") else None


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        report = work(args, errors)
    except VerlP40Error as error:
        errors.print(f"[bold red]error:[/] {escape(error.message)}")
        if error.fix:
            errors.print(f"  [bold]fix:[/] {escape(error.fix)}")
        return error.exit_code
    out = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    if report is None:
        out.print(f"{escape(str(args.folder / MANIFEST))} and its PTX: carry the folder to a GPU")
        return ExitCode.OK
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(out, report, args.every)
    return ExitCode.OK if report["ok"] else ExitCode.FOUND


if __name__ == "__main__":
    sys.exit(main())
