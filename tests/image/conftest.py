"""A real Docker Engine and a minimal Debian image, for tests that need containers.

An engine that runs already is used; otherwise one is started (as root) with its own folder and
socket and stopped at the end. Containers and images made here are always removed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.errors import DockerException, ImageNotFound

FORWARDED = (
    # what a machine behind a proxy, a mirror or a private certificate authority has set
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "PIP_INDEX_URL",
    "UV_DEFAULT_INDEX",
    "UV_INDEX_URL",
)
CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.image)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[docker.DockerClient]:
    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except DockerException:
        client = None
    if client is not None:
        yield client
        return
    dockerd = shutil.which("dockerd")
    if dockerd is None or os.geteuid() != 0:
        pytest.skip("no Docker Engine answers, and dockerd cannot be started (needs it, and root)")
    folder = tmp_path_factory.mktemp("engine")
    socket = folder / "docker.sock"
    with (folder / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(
            [
                dockerd,
                f"--host=unix://{socket}",
                f"--data-root={folder / 'data'}",
                f"--exec-root={folder / 'exec'}",
                f"--pidfile={folder / 'pid'}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        client = docker.DockerClient(base_url=f"unix://{socket}", timeout=600)
        deadline = time.monotonic() + 60
        while True:
            try:
                client.ping()
                break
            except DockerException:
                if process.poll() is not None or time.monotonic() > deadline:
                    tail = (folder / "dockerd.log").read_text(errors="replace")[-1500:]
                    pytest.fail(f"dockerd does not come up:\n{tail}")
                time.sleep(0.5)
        yield client
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def bare_debian(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tag of a Debian image holding nothing but python3, git and CA certificates."""
    tag = "verl-p40-test/bare-debian:python-git"
    try:
        engine.images.get(tag)
        return tag
    except ImageNotFound:
        pass
    mmdebstrap = shutil.which("mmdebstrap")
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    if mmdebstrap is None or not sources.exists():
        pytest.skip("mmdebstrap (Debian package) and a deb822 Debian source are needed")
    tarball = tmp_path_factory.mktemp("root") / "root.tar"
    suite = subprocess.run(
        ["/bin/sh", "-c", '. /etc/os-release; echo "$VERSION_CODENAME"'],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    subprocess.run(
        [
            mmdebstrap,
            "--quiet",
            "--variant=minbase",
            "--include=python3,git,ca-certificates",
            suite,
            str(tarball),
            str(sources),
        ],
        check=True,
    )
    with tarball.open("rb") as data:
        engine.api.import_image_from_data(data, repository=tag.split(":")[0], tag=tag.split(":")[1])
    tarball.unlink()
    return tag


@pytest.fixture(scope="session")
def network_environment() -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Environment and read-only volumes that let a container reach what this machine reaches."""
    environment = {name: os.environ[name] for name in FORWARDED if os.environ.get(name)}
    volumes: dict[str, dict[str, str]] = {}
    bundles = [os.environ[name] for name in CA_VARIABLES if os.environ.get(name)]
    if bundles:
        inside = "/etc/ssl/certs/host-ca-bundle.crt"
        volumes[str(Path(bundles[0]).resolve())] = {"bind": inside, "mode": "ro"}
        environment |= dict.fromkeys(CA_VARIABLES, inside)
    return environment, volumes
