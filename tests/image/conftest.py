"""A real Docker Engine and a minimal Debian image, for tests that need containers.

An engine that runs already is used; otherwise one is started (as root) with its own folder and
socket and stopped at the end. Containers and images made here are always removed.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import composekit
import debiankit
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
ROOT = Path(__file__).resolve().parents[2]
CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.image)


@pytest.fixture(scope="session")
def engine_host() -> Iterator[str]:
    """Address of a Docker Engine: the one that answers, else one of our own until the end."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if _answers(host):
        yield host
        return
    dockerd = shutil.which("dockerd")
    if dockerd is None or os.geteuid() != 0:
        missing("no Docker Engine answers, and none can be started (that needs dockerd, and root)")
    assert dockerd is not None
    # Not below pytest's folder, which is closed to other users: the socket alone decides.
    folder = Path(tempfile.mkdtemp(prefix="verl-p40-engine-"))
    folder.chmod(0o755)
    host = f"unix://{folder / 'docker.sock'}"
    command = [dockerd, f"--host={host}", f"--data-root={folder / 'data'}"]
    command += [f"--exec-root={folder / 'exec'}", f"--pidfile={folder / 'pid'}"]
    with (folder / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not _answers(host):
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (folder / "dockerd.log").read_text(errors="replace")[-1500:]
                pytest.fail(f"dockerd does not come up:\n{tail}")
            time.sleep(0.5)
        yield host
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(host: str) -> bool:
    try:
        client = docker.DockerClient(base_url=host, timeout=20)
        client.ping()
        client.close()
    except DockerException:
        return False
    return True


def missing(why: str) -> None:
    """Skip, or fail where the machine is known to have what is missing (CI)."""
    if os.environ.get("VERL_P40_REQUIRE_ENGINE"):
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="session")
def engine(engine_host: str) -> Iterator[docker.DockerClient]:
    client = docker.DockerClient(base_url=engine_host, timeout=600)
    yield client
    client.close()


@pytest.fixture(scope="session")
def docker_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A docker configuration folder with Compose and buildx, new enough, and no credentials."""
    if shutil.which("docker") is None:
        missing("there is no docker command")
    return debiankit.plugins(tmp_path_factory.mktemp("docker"))


@pytest.fixture(scope="session")
def bare_debian(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tag of a Debian image holding nothing but python3, git and CA certificates."""
    tag = "verl-p40-test/bare-debian:python-git"
    _import_debian(engine, tag, tmp_path_factory.mktemp("root"), "python3,git,ca-certificates")
    return tag


@pytest.fixture(scope="session")
def base_image(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tag of a minimal Debian: what stands in for the CUDA base, which cannot be pulled here."""
    tag = "verl-p40-test/base:debian"
    _import_debian(engine, tag, tmp_path_factory.mktemp("root"))
    return tag


def _import_debian(engine: docker.DockerClient, tag: str, folder: Path, include: str = "") -> None:
    try:
        engine.images.get(tag)
        return
    except ImageNotFound:
        pass
    mmdebstrap = shutil.which("mmdebstrap")
    if mmdebstrap is None or not debiankit.SOURCES.exists():
        missing("mmdebstrap (Debian package) and a deb822 Debian source are needed")
    assert mmdebstrap is not None
    tarball = folder / "root.tar"
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    command = [mmdebstrap, "--quiet", "--variant=minbase"]
    command += [f"--include={include}"] if include else []
    subprocess.run([*command, suite, str(tarball), str(debiankit.SOURCES)], check=True)
    repository, _, version = tag.partition(":")
    with tarball.open("rb") as data:
        engine.api.import_image_from_data(data, repository=repository, tag=version)
    tarball.unlink()


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


@pytest.fixture(scope="session")
def images(
    engine: docker.DockerClient, engine_host: str, docker_config: Path, base_image: str
) -> composekit.Images:
    """Both targets, built by ``verl-p40 image build`` as a user would."""
    started = time.monotonic()
    tags = {}
    for target in ("train", "monitor"):
        tags[target] = f"verl-p40-test/{target}:dev"
        command = [sys.executable, "-m", "verl_p40.cli.main", "image", "build"]
        command += ["--target", target, "--tag", tags[target], "--flavor", "cpu"]
        command += ["--base-image", base_image, "--build-arg", "RUNTIME_PACKAGES="]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "DOCKER_HOST": engine_host, "DOCKER_CONFIG": str(docker_config)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            pytest.fail(
                f"{' '.join(command[2:])}: exit code {done.returncode}\n{done.stdout[-6000:]}"
            )
        print(done.stdout[-400:])
    return composekit.Images(tags["train"], tags["monitor"], time.monotonic() - started)


@pytest.fixture
def project(
    engine: docker.DockerClient,
    engine_host: str,
    docker_config: Path,
    images: composekit.Images,
    tmp_path: Path,
) -> Iterator[composekit.Project]:
    """A compose project on the CPU with the built images, whatever the host's uid."""
    name = f"vp40-test-{secrets.token_hex(3)}"
    settings = {
        "VERL_P40_IMAGE": images.train,
        "VERL_P40_MONITOR_IMAGE": images.monitor,
        "VERL_P40_HEALTH_INTERVAL": "5s",
        **composekit.limits(),
    }
    with composekit.project(
        tmp_path, name, engine, docker_config, engine_host, settings
    ) as started:
        yield started
