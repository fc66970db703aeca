"""``verl-p40 image``: build, inspect, push, pull and verify the container image."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, get_args

import click
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from verl_p40.cli import image_view as view
from verl_p40.cli.image_progress import Bars
from verl_p40.cli.output import JsonFlag, console, print_json, stderr_console
from verl_p40.errors import ExitCode
from verl_p40.image import build as building
from verl_p40.image import describe, names, transfer
from verl_p40.image import verify as verifying
from verl_p40.image.engine import connect
from verl_p40.image.names import Target
from verl_p40.stack.pins import FlavorName

app = typer.Typer(
    name="image",
    help="The container image: build, inspect, push, pull, verify.",
    no_args_is_help=True,
)

ImageArgument = Annotated[
    str,
    typer.Argument(
        metavar="[IMAGE]",
        help="name[:tag][@sha256:...]. Default: $VERL_P40_IMAGE, else this version's image.",
        show_default=False,
    ),
]


def register(root: typer.Typer) -> None:
    """Add this group to ``root``."""
    root.add_typer(app)


def _report(json: bool) -> AbstractContextManager[transfer.Report]:
    return nullcontext(transfer.Silent()) if json else Bars(stderr_console())


def _tell_compose(out: Console, target: Target, tags: Sequence[str]) -> None:
    if setting := names.compose_needs(target, tags):
        out.print(f"for docker compose: {escape(setting)}, in .env or exported")


@app.command(epilog="Example: verl-p40 image build --flavor cpu --base-image debian:12")
def build(
    target: Annotated[
        Target,
        typer.Option(
            click_type=click.Choice(get_args(Target)),
            help="train: everything. monitor: small, without torch.",
        ),
    ] = "train",
    flavor: Annotated[
        FlavorName,
        typer.Option(
            "--flavor",
            "-f",
            envvar="VERL_P40_FLAVOR",
            click_type=click.Choice(get_args(FlavorName)),
            help="cu118: the CUDA 11.8 build of torch.",
        ),
    ] = "cu118",
    tag: Annotated[
        list[str] | None,
        typer.Option(
            "--tag",
            "-t",
            metavar="NAME",
            help="Name of the result; can be repeated.",
            show_default=False,
        ),
    ] = None,
    base_image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE",
            envvar="VERL_P40_BASE_IMAGE",
            help="Start from this one; best by digest.",
        ),
    ] = "",
    pypi_index: Annotated[
        str,
        typer.Option(metavar="URL", envvar="VERL_P40_PYPI_INDEX", help="A mirror of PyPI."),
    ] = "",
    torch_index: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="VERL_P40_TORCH_INDEX",
            help="A mirror of PyTorch's index of CUDA 11.8 wheels.",
        ),
    ] = "",
    hf_endpoint: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="HF_ENDPOINT",
            help="A mirror of the Hugging Face hub, for its runs.",
        ),
    ] = "",
    runtime_packages: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            envvar="VERL_P40_RUNTIME_PACKAGES",
            help="Debian packages that the runs need: a C compiler, for Triton on a GPU. "
            "'' for none, on the CPU.",
            show_default=False,
        ),
    ] = None,
    vllm: Annotated[
        bool | None,
        typer.Option(
            "--vllm/--no-vllm",
            help="With vLLM, compiled for a P40 (half an hour on two cores, once). Default: with "
            "it for cu118.",
            show_default=False,
        ),
    ] = None,
    vllm_base_image: Annotated[
        str,
        typer.Option(
            metavar="IMAGE",
            envvar="VERL_P40_VLLM_BASE_IMAGE",
            help="Compile vLLM in this one: the CUDA 11.8 toolkit.",
        ),
    ] = "",
    triton: Annotated[
        str,
        typer.Option(
            metavar="VERSION",
            envvar="VERL_P40_TRITON",
            help="3.2.0, which vLLM's prefix caching needs, instead of the lock's.",
        ),
    ] = "",
    ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificates to trust in the build, as a secret: in no layer. Default: "
            "$VERL_P40_CA_FILE, $SSL_CERT_FILE, $REQUESTS_CA_BUNDLE.",
            show_default=False,
        ),
    ] = None,
    build_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="Another argument of the Dockerfile; NAME alone takes the environment's "
            "(HTTPS_PROXY). Can be repeated.",
            show_default=False,
        ),
    ] = None,
    network: Annotated[
        str, typer.Option(metavar="MODE", help="Network of the build: default, host, none.")
    ] = "",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build every step again.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help="Ask for a newer base image.")] = False,
    context: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The clone to build. Default: the one this runs from.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the docker command and stop.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Build the image of this clone with BuildKit."""
    plan = building.plan(
        building.Request(
            target=target,
            flavor=flavor,
            tags=tag or (),
            base_image=base_image,
            pypi_index=pypi_index,
            torch_index=torch_index,
            hf_endpoint=hf_endpoint,
            runtime_packages=runtime_packages,
            vllm=vllm,
            vllm_base_image=vllm_base_image,
            triton=triton,
            ca=ca,
            build_args=build_arg or (),
            network=network,
            no_cache=no_cache,
            pull=pull,
            context=context,
        )
    )
    if dry_run:
        view.print_plan(plan, json)
        return
    with connect() as client:
        built = building.run(client, plan)
    if json:
        print_json(built.as_json())
        return
    out = console()
    layers = "1 layer" if built.layers == 1 else f"{built.layers} layers"
    out.print(
        f"built {escape(', '.join(built.tags))}\n{built.id}\n"
        f"{decimal(built.size)} in {layers}, {built.seconds:.0f} s"
    )
    _tell_compose(out, target, built.tags)


@app.command(epilog="Example: verl-p40 image inspect verl-p40:local --json")
def inspect(
    image: ImageArgument = "",
    local: Annotated[
        bool, typer.Option("--local", help="Do not ask the registry for the compressed sizes.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Show what is in an image, without running it: versions, patches, size by layer."""
    with connect() as client:
        found = describe.describe(client, image or names.default(), ask_registry=not local)
    if json:
        print_json(found.as_json())
    else:
        view.print_description(found)


@app.command(epilog="Example: verl-p40 image push registry.example.org/me/verl-p40:0.1.0")
def push(image: ImageArgument = "", json: JsonFlag = False) -> None:
    """Send an image to its registry, with the credentials of `docker login`."""
    reference = names.parse(image or names.default())
    with connect() as client, _report(json) as report:
        moved = transfer.push(client, reference, report)
    if json:
        print_json(moved.as_json())
        return
    console().print(f"pushed {reference} in {moved.seconds:.0f} s\n{moved.pinned}")


@app.command(epilog="Example: verl-p40 image pull")
def pull(image: ImageArgument = "", json: JsonFlag = False) -> None:
    """Fetch an image from its registry."""
    reference = names.parse(image or names.default())
    with connect() as client:
        with _report(json) as report:
            moved = transfer.pull(client, reference, report)
        target = describe.target(client, str(reference))
    if json:
        print_json(moved.as_json())
        return
    out = console()
    out.print(f"{escape(moved.status or f'pulled {reference}')} ({moved.seconds:.0f} s)")
    out.print(moved.pinned)
    _tell_compose(out, target, [str(reference)])


@app.command(epilog="Example: verl-p40 image verify --against environment.json")
def verify(
    image: ImageArgument = "",
    against: Annotated[
        str,
        typer.Option(
            metavar="FILE|IMAGE",
            help="Also compare with a release's environment.json, or another image's.",
        ),
    ] = "",
    json: JsonFlag = False,
) -> None:
    """Check that a pulled image is the one that was published.

    Its digest is the one named after @, or the one that the registry has now for the tag; its
    environment.json says what its labels say; its patches are this version's. Exit code 1 with
    every difference named.
    """
    with connect() as client:
        verdict = verifying.verify(client, names.parse(image or names.default()), against=against)
    if json:
        print_json(verdict.as_json())
    else:
        view.print_verdict(verdict)
    if not verdict.ok:
        raise typer.Exit(ExitCode.FOUND)
