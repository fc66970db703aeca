"""``verl-p40 stack``: the training stack's environment and the pins it is made from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import click
import typer
from rich.markup import escape
from rich.table import Table

from verl_p40.cli.output import JsonFlag, console, print_json
from verl_p40.errors import ExitCode, MachineError, UsageError
from verl_p40.stack import env as stack_env
from verl_p40.stack import fetch, install, paths, pins
from verl_p40.stack.env import StackEnv
from verl_p40.stack.hold import exclusive
from verl_p40.stack.pins import FlavorName
from verl_p40.stack.progress import ConsoleReport, Report, Silent

stack = typer.Typer(
    help="Install and inspect the pinned training stack (torch, ray, patched verl).",
    no_args_is_help=True,
    epilog="Example: verl-p40 stack install",
)

_FLAVORS = click.Choice(get_args(FlavorName))
FlavorOption = Annotated[
    FlavorName,
    typer.Option("--flavor", "-f", click_type=_FLAVORS, help="cu118: the CUDA 11.8 build."),
]
PythonOption = Annotated[
    str | None,
    typer.Option("--python", "-p", help="3.10 or 3.11; by default the one that runs this."),
]


def register(app: typer.Typer) -> None:
    """Add this group to ``app``."""
    app.add_typer(stack, name="stack")


def _report(json: bool) -> Report:
    return Silent() if json else ConsoleReport()


def _describe(env: StackEnv, *, deep: bool = False) -> dict[str, Any]:
    document: dict[str, Any] = {
        "path": str(env.prefix),
        "flavor": env.flavor,
        "python": env.record.python,
        "current": stack_env.is_current(env),
        "tests": env.has_tests,
        "bytes": env.record.bytes_on_disk,
        "created": env.record.created,
    }
    if deep:
        document["verl"] = stack_env.state(env)
    return document


@stack.command("install", epilog="Example: verl-p40 stack install --with-test")
def install_(
    flavor: FlavorOption = "cpu",
    python: PythonOption = None,
    with_test: Annotated[
        bool, typer.Option("--with-test", help="Add pytest, for the tests that need the stack.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete the downloaded packages afterwards (3.3 GB).")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Install the training stack: 3.3 GB to download, 6.2 GB on disk, a few minutes.

    Run it again after a broken download: it continues where it stopped. When everything is in
    place it changes nothing and takes a moment. `verl-p40 train` does this by itself.
    """
    ready = stack_env.ensure(flavor, python=python, with_test=with_test, report=_report(json))
    freed = 0
    if prune:
        lock = pins.load().flavor[ready.flavor].lock
        freed = install.prune(fetch.resolve(lock, ready.record.python, ready.flavor))
    if json:
        print_json({**_describe(ready), "freed_bytes": freed})
        return
    console().print(f"ready: {escape(str(ready.prefix))}")
    if freed:
        console().print(f"freed {freed / 1e9:.1f} GB of downloads")


@stack.command(epilog="Example: verl-p40 stack status --json")
def status(json: JsonFlag = False) -> None:
    """List the environments on this machine and say whether each is as it should be.

    Exit code 1 when none is ready for use.
    """
    adopted = stack_env.adopted()
    found = stack_env.installed()
    if adopted and adopted.prefix not in {env.prefix for env in found}:
        found.insert(0, adopted)
    cache = paths.cache_home()
    document: dict[str, Any] = {
        "environments": [_describe(env, deep=True) for env in found],
        "in_use": str(adopted.prefix) if adopted else None,
        "cache": {"path": str(cache), "bytes": install.disk_usage(cache)},
    }
    if json:
        print_json(document)
    else:
        _print_status(document)
    if not any(entry["current"] for entry in document["environments"]):
        raise typer.Exit(ExitCode.FOUND)


def _print_status(document: dict[str, Any]) -> None:
    out = console()
    if not document["environments"]:
        out.print("no training stack is installed: run `verl-p40 stack install`")
    for entry in document["environments"]:
        age = "" if entry["current"] else " [yellow]built from older pins[/]"
        tests = ", with test tools" if entry["tests"] else ""
        out.print(
            f"[bold]{entry['flavor']}[/] Python {entry['python']}, "
            f"{entry['bytes'] / 1e9:.1f} GB{tests}{age}"
        )
        out.print(f"  {escape(entry['verl'])}")
    cache = document["cache"]
    out.print(f"downloads: {cache['bytes'] / 1e9:.1f} GB in {escape(cache['path'])}")


@stack.command(epilog='Example: "$(verl-p40 stack path)/bin/python" -c "import verl"')
def path(flavor: FlavorOption = "cpu", python: PythonOption = None, json: JsonFlag = False) -> None:
    """Print the folder of an installed environment."""
    ready = stack_env.adopted()
    if ready is None:
        version = install.choose_python(flavor, python)
        ready = stack_env.read_env(stack_env.prefix_for(flavor, version))
    if ready is None:
        raise MachineError("the training stack is not installed", fix="verl-p40 stack install")
    if json:
        print_json(_describe(ready))
    else:
        typer.echo(ready.prefix)


@stack.command("pins", epilog="Example: verl-p40 stack pins --flavor cu118")
def pins_(flavor: FlavorOption = "cpu", json: JsonFlag = False) -> None:
    """Show every pinned version and file, and why it is pinned."""
    loaded = pins.load()
    if json:
        print_json(loaded.model_dump(by_alias=True))
        return
    out = console()
    table = Table("package", "version", "why", title=f"training stack: {flavor}")
    for name, pin in loaded.packages(flavor).items():
        table.add_row(name, pin.version, escape(pin.why))
    out.print(table)
    files = Table("name", "file", "sha256", "why", title="single files (verl-p40 stack fetch NAME)")
    for name, release in loaded.release.items():
        files.add_row(name, release.filename, release.sha256[:12], escape(release.why))
    out.print(files)
    out.print(f"CUDA {loaded.cuda.version}: {loaded.cuda.why}", markup=False)
    out.print(f"compute capability {loaded.arch.target}: {loaded.arch.why}", markup=False)


@stack.command("fetch", epilog="Example: verl-p40 stack fetch vllm-sdist")
def fetch_(
    name: Annotated[str, typer.Argument(help="A single file of `verl-p40 stack pins`: verl, ...")],
    json: JsonFlag = False,
) -> None:
    """Download one pinned file, check its hash, and print where it is."""
    target = fetch.fetch_pinned(name, _report(json))
    if json:
        release = pins.load().find_release(name)
        print_json({"path": str(target), **release.model_dump(include={"filename", "sha256"})})
    else:
        typer.echo(target)


@stack.command(epilog="Example: verl-p40 stack remove --stale --cache")
def remove(
    flavor: Annotated[
        FlavorName | None,
        typer.Option("--flavor", "-f", click_type=_FLAVORS, help="Only this flavor."),
    ] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Only environments built from older pins.")
    ] = False,
    cache: Annotated[
        bool, typer.Option("--cache", help="The downloaded packages too (safe: they come back).")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonFlag = False,
) -> None:
    """Delete environments of the training stack. Runs, data and models are never touched."""
    doomed = [
        env
        for env in stack_env.installed()
        if (flavor is None or env.flavor == flavor) and not (stale and stack_env.is_current(env))
    ]
    if json and not yes:
        raise UsageError("--json cannot ask", fix="add --yes")
    if (doomed or cache) and not yes:
        for env in doomed:
            console().print(f"{escape(str(env.prefix))}  {env.record.bytes_on_disk / 1e9:.1f} GB")
        if cache:
            console().print(f"{escape(str(paths.cache_home()))}  (downloads)")
        typer.confirm("delete?", abort=True)
    for env in doomed:
        with exclusive(stack_env.lock_file(env.prefix)):
            install.remove(env.prefix)
    removed = [str(env.prefix) for env in doomed]
    for folder in install.leftovers(paths.env_home()):
        # Its name ends with the environment's; whoever builds that one holds its lock.
        name = folder.name.removeprefix(".install-").removeprefix(".build-")
        with exclusive(stack_env.lock_file(paths.env_home() / name)):
            if folder.exists():
                install.remove(folder)
                removed.append(str(folder))
    if cache:
        removed += _remove_cache(paths.cache_home())
    if json:
        print_json({"removed": removed})
    else:
        console().print("\n".join(f"removed {escape(item)}" for item in removed) or "nothing to do")


def _remove_cache(folder: Path) -> list[str]:
    parts = [folder / "files", folder / "resolved"]
    there = [part for part in parts if part.is_dir()]
    for part in there:
        install.remove(part)
    return [str(part) for part in there]
