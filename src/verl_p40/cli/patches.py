"""``verl-p40 patches``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from verl_p40.cli.output import JsonFlag, console, print_json, stderr_console
from verl_p40.cli.patches_view import patch_table, print_matrix, print_report, print_status
from verl_p40.errors import ExitCode, MachineError, UsageError
from verl_p40.patches import prove as proving
from verl_p40.patches import tree as trees
from verl_p40.patches.gittree import unpack_queue
from verl_p40.patches.lint import repository_of
from verl_p40.patches.project import NAMES, find_project
from verl_p40.patches.queue import Queue, default_directory, load_queue
from verl_p40.patches.refresh import refresh_queue
from verl_p40.patches.release import obtain, patched_release, unpack_pinned
from verl_p40.patches.verify import status_against, verify_queue
from verl_p40.stack import paths, pins
from verl_p40.stack.env import StackEnv, adopted, prefix_for, read_env

app = typer.Typer(
    name="patches",
    help="The patch queues on verl and vLLM: list, apply, check, rebase.",
    no_args_is_help=True,
)

ProjectOption = Annotated[
    str,
    typer.Option("--project", metavar="|".join(NAMES), help="Which queue of this package."),
]
QueueOption = Annotated[
    Path | None,
    typer.Option("--queue", metavar="DIR", help="Another queue than those of this package."),
]
TreeArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[TREE]",
        help="A folder that contains the package (site-packages). Default: the training stack's.",
        show_default=False,
    ),
]


def register(root: typer.Typer) -> None:
    """Add this group to ``root``."""
    root.add_typer(app)


@app.command("list", epilog="Example: verl-p40 patches list --json")
def list_(
    project: ProjectOption = "verl", queue_dir: QueueOption = None, as_json: JsonFlag = False
) -> None:
    """Show the patches in the order of application."""
    queue = _queue(project, queue_dir)
    if as_json:
        print_json(
            {
                "project": queue.project,
                "version": queue.version,
                "digest": queue.digest,
                "patches": [
                    {
                        "path": patch.path,
                        "group": patch.group,
                        "name": patch.name,
                        "files": patch.touches,
                        "header": dict(patch.header.fields),
                    }
                    for patch in queue.patches
                ],
            }
        )
        return
    out = console()
    out.print(patch_table(queue))
    count = len(queue.patches)
    out.print(f"{count} patches on {queue.project} {queue.version}, queue {queue.digest[:12]}")


@app.command(epilog="Example: verl-p40 patches apply --group fix --group p40")
def apply(
    tree: TreeArgument = None,
    group: Annotated[
        list[str] | None, typer.Option("--group", help="Only this group; can be repeated.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="NAME", help="Leave out this patch; can be repeated."),
    ] = None,
    undo: Annotated[bool, typer.Option("--revert", help="The same as `patches revert`.")] = False,
    project: ProjectOption = "verl",
    queue_dir: QueueOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a tree the pinned release plus the patches: all of them or nothing.

    Applying again changes nothing; another selection or a newer queue replaces the old one. For
    vllm, TREE is its unpacked sdist (before the wheel is built), or a folder with an installed one,
    which takes the patches inside vllm/ alone.
    """
    if undo:
        if group or without:
            raise UsageError("--revert takes no --group and no --without")
        revert(tree, project, as_json)
        return
    queue = _queue(project, queue_dir)
    print_report(
        trees.apply_queue(_tree(tree), queue, groups=group, without=without or ()), as_json
    )


@app.command(epilog="Example: verl-p40 patches revert")
def revert(
    tree: TreeArgument = None, project: ProjectOption = "verl", as_json: JsonFlag = False
) -> None:
    """Put the released files back, offline, from the copies that the tree carries."""
    print_report(trees.revert(_tree(tree), _known(project)), as_json)


@app.command(epilog="Example: verl-p40 patches source work/vllm --project vllm")
def source(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    project: ProjectOption = "verl",
    queue_dir: QueueOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the pinned release, fetched by its hash, with the patches into a new folder."""
    queue = _queue(project, queue_dir)
    print_report(patched_release(queue, folder), as_json)


@app.command(epilog="Example: verl-p40 patches verify")
def verify(
    project: ProjectOption = "verl", queue_dir: QueueOption = None, as_json: JsonFlag = False
) -> None:
    """Check the queue against the pinned release, fetched by its hash.

    Headers, order and whitespace; the manifest; zero fuzz and zero offset; every Python file of
    the result compiles and every YAML file parses. Exit code 1 if anything is found.
    """
    directory = (queue_dir or default_directory(_known(project))).resolve()
    version = pins.load().find_release(find_project(directory.name).pin).version
    with _scratch() as folder:
        tree = unpack_pinned(directory.name, Path(folder))
        report = verify_queue(directory, tree, version=version)
    if as_json:
        print_json(
            {
                "release": report.release,
                "files": report.files,
                "patches": report.patches,
                "compiled": report.compiled,
                "parsed": report.parsed,
                "proofs_checked": report.proofs_checked,
                "findings": [vars(finding) for finding in report.findings],
            }
        )
    else:
        out = console()
        for finding in report.findings:
            out.print(f"[red]{escape(finding.where)}[/]: {escape(finding.what)}")
        if not report.proofs_checked:
            out.print("Proved-By not checked: the tests come with the repository only")
        out.print(
            f"{report.release}: {report.files} files as in the manifest, {report.patches} patches "
            f"applied, {report.compiled} Python files compiled, {report.parsed} YAML files parsed: "
            + (f"{len(report.findings)} findings" if report.findings else "no findings")
        )
    if report.findings:
        raise typer.Exit(ExitCode.FOUND)


@app.command(epilog="Example: verl-p40 patches status --against 0.5.0")
def status(
    tree: TreeArgument = None,
    against: Annotated[
        str,
        typer.Option(metavar="WHEEL|VERSION|TREE", help="Another release to try the queue on."),
    ] = "",
    project: ProjectOption = "verl",
    queue_dir: QueueOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Say in which state an installed tree is, or how the queue fits another release.

    With --against, exit code 1 means that a person has to decide something.
    """
    queue = _queue(project, queue_dir)
    if against:
        if tree is not None:
            raise UsageError("give a TREE or --against, not both")
        with _scratch() as folder:
            other, label = obtain(against, queue.project, Path(folder))
            report = status_against(queue, other, label)
        print_status(queue, report, as_json)
        if not report.clean:
            raise typer.Exit(ExitCode.FOUND)
        return
    folder_ = _tree(tree)
    state = trees.tree_state(folder_, queue)
    current = state.kind == "patched" and state.digest == queue.digest
    whole = len(state.patches) == len(queue.fitting(folder_).patches)
    if as_json:
        print_json(
            {
                "tree": state.tree,
                "state": state.kind,
                "digest": state.digest,
                "current": current and whole,
                "patches": state.patches,
                "files": [vars(file) for file in state.files],
            }
        )
        return
    out = console()
    out.print(escape(state.describe()))
    if state.kind == "patched" and not (current and whole):
        what = "a part of this queue" if current else f"another queue than {queue.digest[:12]}"
        out.print(f"that is {what}; verl-p40 patches apply brings the whole of it")


@app.command(epilog="Example: verl-p40 patches unpack work/ --onto 0.5.0")
def unpack(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    onto: Annotated[
        str,
        typer.Option(
            metavar="WHEEL|VERSION|TREE", help="Also commit this release, tag upstream-next."
        ),
    ] = "",
    project: ProjectOption = "verl",
    queue_dir: QueueOption = None,
) -> None:
    """Make a git work tree: one commit for the pinned release, one a patch."""
    queue = _queue(project, queue_dir)
    with _scratch() as scratch:
        tree = unpack_pinned(queue.project, Path(scratch) / "pinned")
        other, label = obtain(onto, queue.project, Path(scratch) / "other") if onto else (None, "")
        count = unpack_queue(queue, tree, folder, onto=other, onto_label=label)
    out = console()
    out.print(f"{escape(str(folder))}: {queue.project} {queue.version} and {count} patch commits")
    if onto:
        out.print("next: git rebase --onto upstream-next upstream main")
    out.print(f"then: verl-p40 patches refresh {escape(str(folder))}")


@app.command(epilog="Example: verl-p40 patches refresh work/")
def refresh(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A git work tree, see unpack.")],
    base: Annotated[
        str, typer.Option(metavar="COMMIT", help="The release. Default: upstream[-next].")
    ] = "",
    project: ProjectOption = "verl",
    queue_dir: QueueOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the commits of a git work tree back as the queue, all of it or nothing."""
    directory = queue_dir or default_directory(_known(project))
    if directory.is_relative_to(paths.package_dir()):
        raise UsageError(
            "this verl-p40 is installed; its queue is not for editing",
            fix=f"name the queue of your clone: --queue patches/{project}",
        )
    report = refresh_queue(directory, folder, base or None)
    if as_json:
        print_json(vars(report))
        return
    out = console()
    for word, names in (
        ("new", report.added),
        ("changed", report.changed),
        ("gone", report.removed),
    ):
        for name in names:
            out.print(f"{word:8}{escape(name)}")
    out.print(f"{len(report.patches)} patches on {escape(report.base)}")


@app.command(epilog="Example: verl-p40 patches prove file-logger -j 1")
def prove(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Only these patches.", show_default=False),
    ] = None,
    jobs: Annotated[int, typer.Option("-j", "--jobs", min=1, help="Tests at a time.")] = 2,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds that one pytest process may take.")
    ] = 900,
    python: Annotated[
        Path | None,
        typer.Option(help="A Python with the training stack and pytest. Default: the stack's."),
    ] = None,
    project: ProjectOption = "verl",
    queue_dir: QueueOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the necessity matrix: with all patches each proof passes, without its patch it fails.

    A patch whose removal breaks nothing is an error: exit code 1.
    """
    queue = _queue(project, queue_dir)
    root = repository_of(queue.directory)
    if root is None:
        raise UsageError(
            f"{queue.directory}: no tests beside it; the proofs come with the repository",
            fix="clone the repository and run it there, or name its queue with --queue",
        )
    log = stderr_console()
    with _scratch() as folder:
        tree = unpack_pinned(queue.project, Path(folder) / "pinned")
        matrix = proving.prove(
            queue,
            tree,
            root,
            Path(folder),
            _interpreter(python),
            names=names or (),
            jobs=jobs,
            timeout=timeout,
            on_step=lambda line: log.print(escape(line)),
        )
    print_matrix(matrix, as_json)
    if not matrix.proven:
        raise typer.Exit(ExitCode.FOUND)


def _known(project: str) -> str:
    if project not in NAMES:
        raise UsageError(f"no queue is called {project!r}", fix=f"one of: {', '.join(NAMES)}")
    return project


def _queue(project: str, directory: Path | None) -> Queue:
    return load_queue(directory or default_directory(_known(project)))


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="p40-")


def _stack() -> StackEnv:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = adopted() or read_env(prefix_for("cpu", version))
    if found is None:
        raise MachineError(
            "the training stack is not installed",
            fix="verl-p40 stack install, or name the tree",
        )
    return found


def _tree(named: Path | None) -> Path:
    return named.absolute() if named is not None else _stack().site_packages


def _interpreter(python: Path | None) -> proving.Interpreter:
    if python is None:
        stack = _stack()
        return proving.Interpreter(stack.python, stack.environ())
    environ = {**os.environ, "PYTHONPATH": str(paths.package_dir().parent)}
    return proving.Interpreter(python, environ)
