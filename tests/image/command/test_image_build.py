"""`verl-p40 image build` with BuildKit, on a Dockerfile that builds in seconds."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import docker
import pytest
import registrykit as kit
from commandkit import Command, on_terminal, refused
from runkit import output

from verl_p40.errors import ExitCode
from verl_p40.patches.queue import load_queue

DOCKERFILE = """\
ARG BASE_IMAGE=scratch
FROM scratch AS tools
COPY busybox nonce /bin/
RUN --mount=type=secret,id=ca ["/bin/busybox", "sh", "-c", "/bin/busybox sha256sum < /run/secrets/ca > /ca-digest"]

FROM ${BASE_IMAGE} AS monitor
COPY --from=tools /bin/busybox /bin/busybox
LABEL io.verl-p40.target=monitor

FROM ${BASE_IMAGE} AS train
ARG FLAVOR
ARG VERSION
ARG REVISION
ARG PATCHES_DIGEST
ARG PYPI_INDEX
COPY --from=tools /bin/busybox /bin/busybox
COPY --from=tools /ca-digest /ca-digest
LABEL org.opencontainers.image.version=${VERSION} \\
      org.opencontainers.image.revision=${REVISION} \\
      io.verl-p40.flavor=${FLAVOR} io.verl-p40.patches-digest=${PATCHES_DIGEST} \\
      index=${PYPI_INDEX}
CMD ["/bin/busybox", "cat", "/ca-digest"]
"""


@pytest.fixture
def clone(programs: dict[str, Path], tmp_path: Path) -> Path:
    """A clone with this repository's patches and locks, and a Dockerfile that builds in seconds."""
    repository = Path(__file__).resolve().parents[3]
    folder = tmp_path / "clone"
    (folder / "src" / "verl_p40").mkdir(parents=True)
    (folder / "src" / "verl_p40" / "__init__.py").write_text('__version__ = "7.8.9"\n')
    (folder / "patches").symlink_to(repository / "patches")
    (folder / "locks").symlink_to(repository / "locks")
    (folder / "busybox").write_bytes(programs["busybox"].read_bytes())
    (folder / "busybox").chmod(0o755)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    # A secret is no part of a step's cache key: without this an earlier test's result would do.
    (folder / "nonce").write_text(uuid.uuid4().hex)
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    return folder


def test_build(
    engine: docker.DockerClient,
    image: Command,
    name: Callable[[str], str],
    clone: Path,
    tmp_path: Path,
) -> None:
    tag = name("")
    planned = image("build", "--context", str(clone), "-t", tag, "--dry-run")
    assert planned.out.startswith("docker buildx build --load --target train --tag")
    assert planned.out.endswith(f" {clone}\n") and not engine.images.list(tag)
    ca = tmp_path / "ca.pem"
    ca.write_bytes(os.urandom(2000))
    other = tag.replace(":1", ":2")
    done = image(
        *("build", "--context", str(clone), "-t", tag, "-t", other, "--flavor", "cpu"),
        *("--ca", str(ca), "--pypi-index", "https://mirror.example/simple", "--json"),
    )
    assert done.code == 0, done.err
    assert "exporting" in done.err, "the builder's progress is passed on"
    built = engine.images.get(tag)
    assert done.document["id"] == built.id == engine.images.get(other).id
    assert done.document["tags"] == [tag, other]
    assert done.document["size"] == built.attrs["Size"] and done.document["layers"] == 2
    commit = subprocess.run(
        ["git", "-C", clone, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert built.labels == {
        "org.opencontainers.image.version": "7.8.9",
        "org.opencontainers.image.revision": commit,
        "io.verl-p40.flavor": "cpu",
        "io.verl-p40.patches-digest": load_queue().digest,
        "io.verl-p40.lock-digest": kit.environment()["lock"]["sha256"],
        "index": "https://mirror.example/simple",
    }
    secret = hashlib.sha256(ca.read_bytes()).hexdigest()
    assert output(engine, tag).decode().split()[0] == secret
    assert ca.read_bytes() not in b"".join(built.save()), "the secret is in no layer"

    (clone / "Dockerfile").write_text(DOCKERFILE + "# edited\n")
    shown = image(
        "build", "--context", str(clone), "-t", tag, "--target", "monitor", "--ca", str(ca)
    )
    assert shown.code == 0
    assert re.search(r"built \S+\nsha256:\w{64}\n\d\.\d MB in 1 layer, \d+ s\n", shown.out), (
        shown.out
    )
    assert shown.out.endswith(
        f"for docker compose: VERL_P40_MONITOR_IMAGE={tag}, in .env or exported\n"
    )
    assert engine.images.get(tag).labels["io.verl-p40.target"] == "monitor"


def test_build_on_a_terminal(
    engine: docker.DockerClient,
    engine_host: str,
    image: Command,
    name: Callable[[str], str],
    clone: Path,
    tmp_path: Path,
) -> None:
    """The builder draws by itself; standard output holds the result alone."""
    tag = name("")
    arguments = ("build", "--context", str(clone), "-t", tag, "--target", "monitor", "--json")
    settings = {"DOCKER_HOST": engine_host, "DOCKER_CONFIG": str(tmp_path / "docker")}
    code, out, shown = on_terminal(*arguments, **settings)
    assert code == 0, shown
    assert json.loads(out)["id"] == engine.images.get(tag).id
    assert "\x1b[" in shown and "exporting to image" in shown
    (clone / "Dockerfile").write_text("FROM scratch AS monitor\nCOPY nowhere /\n")
    code, out, shown = on_terminal(*arguments, **settings)
    assert (code, out) == (ExitCode.ENVIRONMENT, "")
    assert "the build failed (exit code 1)" in shown and "the lines above say" in shown


def test_a_build_that_fails(image: Command, name: Callable[[str], str], clone: Path) -> None:
    (clone / "Dockerfile").write_text(
        f'{DOCKERFILE}RUN ["/bin/busybox", "false"]\n', encoding="utf-8"
    )
    arguments = ("build", "--context", str(clone), "-t", name(""))
    refused(
        image(*arguments, "--flavor", "cpu"),
        ExitCode.ENVIRONMENT,
        "the build failed",
        "busybox false",
    )
    base = ("--base-image", "registry.invalid/base:1")
    refused(image(*arguments, *base), ExitCode.NETWORK, "cannot resolve", "registry.invalid")


def test_a_build_that_fills_the_disk(
    image: Command,
    name: Callable[[str], str],
    clone: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    (clone / "big").write_bytes(os.urandom(8 << 20))
    (clone / "Dockerfile").write_text(f"{DOCKERFILE}COPY big /big\n")
    with kit.small_engine(tmp_path_factory.mktemp("full"), "6m") as small:
        done = image("build", "--context", str(clone), "-t", name(""), DOCKER_HOST=small)
        refused(done, ExitCode.DISK, "no space left", "docker builder prune")


def test_build_without_an_engine(image: Command, clone: Path, tmp_path: Path) -> None:
    done = image("build", "--context", str(clone), DOCKER_HOST=f"unix://{tmp_path}/no.sock")
    refused(done, ExitCode.ENVIRONMENT, "no Docker Engine")
