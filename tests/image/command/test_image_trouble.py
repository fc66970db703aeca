"""What can go wrong with an engine or a registry, provoked."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import docker
import pytest
import registrykit as kit
from commandkit import Command, log_in, refused, remove

from verl_p40 import __version__
from verl_p40.errors import ExitCode, MachineError
from verl_p40.image import names
from verl_p40.image.engine import connect

# --- a registry with users -----------------------------------------------------------------


def test_a_registry_that_wants_a_login(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    image: Command,
    name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    with kit.serve(programs["registry"], tmp_path / "registry", login=True) as address:
        tag = name(address)
        kit.make(engine, programs["busybox"], tag)
        refused(image("push", tag), ExitCode.NETWORK, "refuses", f"docker login {address}")
        refused(image("pull", tag), ExitCode.NETWORK, "refuses", f"docker login {address}")
        log_in(tmp_path, address, "guessed")
        refused(image("push", tag), ExitCode.NETWORK, "refuses", f"docker login {address}")
        log_in(tmp_path, address, kit.PASSWORD)
        digest = image("push", tag, "--json").document["digest"]
        found = image("inspect", tag, "--json").document
        assert found["compressed"] and found["digests"][0].endswith(digest)
        remove(engine, tag)
        assert image("pull", tag).code == 0
        assert image("verify", tag).code == 0
        assert kit.PASSWORD not in image("inspect", tag, "--json").out


def test_a_credential_helper_that_is_not_installed(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    tag = name(registry)
    kit.make(engine, programs["busybox"], tag)
    (tmp_path / "docker" / "config.json").write_text('{"credsStore": "nowhere"}')
    refused(image("push", tag), ExitCode.ENVIRONMENT, "docker-credential-nowhere", "credsStore")


def test_a_registry_that_hands_out_tokens(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    image: Command,
    name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    """As Docker Hub and GitHub do it: a token from elsewhere says who may do what."""
    with kit.serve_tokens(programs["registry"], tmp_path / "registry") as address:
        tag = name(address)
        kit.make(engine, programs["busybox"], tag)
        # Everyone may read; this server gives no token to write to a nobody.
        done = image("push", tag)
        refused(done, ExitCode.NETWORK, "refuses", "denied", f"docker login {address}")
        log_in(tmp_path, address, kit.PASSWORD)
        assert image("push", tag).code == 0
        (tmp_path / "docker" / "config.json").write_text("{}")
        remove(engine, tag)
        assert image("pull", tag).code == 0
        assert image("inspect", tag, "--json").document["compressed"] > 0
        assert image("verify", tag).code == 0


# --- what can go wrong on the way ----------------------------------------------------------


def test_not_published(registry: str, image: Command) -> None:
    done = image("pull", f"{registry}/nobody/nothing:1")
    refused(done, ExitCode.NETWORK, "no ", "in the registry")
    refused(image("push", f"{registry}/nobody/nothing:1"), ExitCode.DATA, "no image")
    refused(image("inspect", "nothing:1"), ExitCode.DATA, "no image nothing:1")
    refused(image("pull", "Nothing:1"), ExitCode.USAGE, "not an image name")


def test_a_registry_that_is_not_there(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    image: Command,
    name: Callable[[str], str],
) -> None:
    tag = name(f"127.0.0.1:{kit.free_port()}")
    kit.make(engine, programs["busybox"], tag)
    for verb in ("push", "pull", "verify"):
        refused(image(verb, tag), ExitCode.NETWORK, "does not answer", "connection refused")
    assert f"{tag}@sha256:" in image("verify", tag).err
    # Without the tag's registry, the digest that was published can still be compared.
    assert image("verify", f"{tag}@sha256:{'1' * 64}").code == ExitCode.FOUND


def test_the_default_image_is_not_published_yet(image: Command) -> None:
    assert not names.PUBLISHED, "then pull it here instead"
    done = image("pull")
    refused(done, ExitCode.NETWORK, "no release is published there yet", "image build")
    assert f"{names.IMAGE}:{__version__}" in done.err or "ghcr.io" in done.err


def test_a_name_that_does_not_resolve(image: Command) -> None:
    """.invalid never resolves (RFC 2606): what an offline machine sees for every registry."""
    done = image("pull", "registry.invalid/verl-p40:1")
    refused(done, ExitCode.NETWORK, "cannot resolve registry.invalid")


def test_plain_http_and_unknown_certificates_off_loopback(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    image: Command,
    name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    own = kit.own_address()
    with kit.serve(programs["registry"], tmp_path / "plain", host=own) as address:
        kit.make(engine, programs["busybox"], name(address))
        for verb in ("push", "pull", "verify"):
            done = image(verb, name(address))
            refused(done, ExitCode.NETWORK, "plain HTTP", f'"insecure-registries": ["{address}"]')
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=test", "-addext", f"subjectAltName=IP:{own}"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    tls = (certificate, key)
    with kit.serve(programs["registry"], tmp_path / "tls", host=own, tls=tls) as address:
        kit.make(engine, programs["busybox"], name(address))
        for verb in ("push", "pull", "verify"):
            done = image(verb, name(address))
            refused(
                done,
                ExitCode.NETWORK,
                "signed by unknown authority",
                f"/etc/docker/certs.d/{address}/ca.crt",
            )


def test_a_full_disk(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tag = name(registry)
    kit.make(engine, programs["busybox"], tag, extra=os.urandom(8 << 20))
    assert image("push", tag).code == 0
    with kit.small_engine(tmp_path_factory.mktemp("full"), "4m") as small:
        done = image("pull", tag, DOCKER_HOST=small)
        refused(done, ExitCode.DISK, "no space left", "docker system df")
        client = docker.DockerClient(base_url=small)
        try:
            assert client.images.list() == []
        finally:
            client.close()


# --- no engine -----------------------------------------------------------------------------


def test_no_engine(image: Command, tmp_path: Path) -> None:
    missing = f"unix://{tmp_path / 'docker.sock'}"
    for arguments in (("inspect", "x"), ("push", "x"), ("pull", "x"), ("verify", "x")):
        done = image(*arguments, DOCKER_HOST=missing)
        refused(done, ExitCode.ENVIRONMENT, "does not exist", str(tmp_path), "systemctl start")
    closed = f"tcp://127.0.0.1:{kit.free_port()}"
    done = image("inspect", "x", DOCKER_HOST=closed)
    refused(done, ExitCode.ENVIRONMENT, "nothing listens", closed)
    done = image("inspect", "x", DOCKER_HOST="tcp://engine.invalid:2375")
    refused(done, ExitCode.ENVIRONMENT, "engine.invalid", "does not resolve")
    done = image("inspect", "x", DOCKER_HOST="gopher://x")
    refused(done, ExitCode.ENVIRONMENT, "gopher://x")


def test_something_else_than_an_engine(image: Command, registry: str) -> None:
    done = image("inspect", "x", DOCKER_HOST=f"tcp://{registry}")
    refused(done, ExitCode.ENVIRONMENT, "is not a Docker Engine")


def test_the_docker_commands_context_is_used(
    engine: docker.DockerClient, engine_host: str, image: Command, tmp_path: Path
) -> None:
    """Rootless Docker and Docker Desktop set a context, not DOCKER_HOST."""
    config = {**os.environ, "DOCKER_CONFIG": str(tmp_path / "docker")}
    config.pop("DOCKER_HOST", None)
    create = ["docker", "context", "create", "mine", "--docker", f"host={engine_host}"]
    subprocess.run(create, env=config, check=True, capture_output=True)
    lost = ["docker", "context", "create", "lost", "--docker", f"host=unix://{tmp_path}/no.sock"]
    subprocess.run(lost, env=config, check=True, capture_output=True)
    done = image("inspect", "nothing:1", DOCKER_HOST="", DOCKER_CONTEXT="mine")
    refused(done, ExitCode.DATA, "no image nothing:1 in this engine")
    subprocess.run(
        ["docker", "context", "use", "lost"], env=config, check=True, capture_output=True
    )
    done = image("inspect", "nothing:1", DOCKER_HOST="")
    refused(done, ExitCode.ENVIRONMENT, f"{tmp_path}/no.sock does not exist")
    done = image("inspect", "x", DOCKER_HOST="", DOCKER_CONTEXT="unheard-of")
    refused(done, ExitCode.ENVIRONMENT, "context `unheard-of` does not exist")


def _as_nobody(host: str, answer: Any) -> None:
    os.environ["DOCKER_HOST"] = host
    os.setgroups([])
    os.setuid(65534)
    try:
        with connect():
            answer.put("connected")
    except MachineError as error:
        answer.put(f"{error.message}\n{error.fix}")


def test_no_permission(engine_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own socket, used by somebody who is not in its group."""
    if os.geteuid() != 0:
        pytest.skip("becoming nobody needs root")
    import requests  # noqa: F401 - nobody may not be able to read this environment

    monkeypatch.setenv("DOCKER_HOST", engine_host)
    with connect():
        pass
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    process = context.Process(target=_as_nobody, args=(engine_host, answer))
    process.start()
    text = answer.get(timeout=30)
    process.join(30)
    assert text.startswith("no permission to use the Docker Engine's socket "), text
    assert "usermod -aG docker" in text
