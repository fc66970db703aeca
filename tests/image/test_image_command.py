"""`verl-p40 image` with a real engine and a real registry on loopback."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import pytest
import registrykit as kit
from docker.errors import ImageNotFound

from verl_p40 import __version__
from verl_p40.cli.main import run
from verl_p40.errors import ExitCode, MachineError
from verl_p40.image import contents as inside
from verl_p40.image import names
from verl_p40.image.engine import connect
from verl_p40.patches.queue import load_queue

BUILD_VARIABLES = (
    *("VERL_P40_BASE_IMAGE", "VERL_P40_FLAVOR", "VERL_P40_PYPI_INDEX", "VERL_P40_TORCH_INDEX"),
    "HF_ENDPOINT",
)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass
class Done:
    """How a call of the command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Done]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("debian")
    return {
        "registry": kit.program("docker-registry", "usr/bin/docker-registry", folder / "registry"),
        "busybox": kit.program("busybox-static", "bin/busybox", folder / "busybox"),
    }


@pytest.fixture(scope="session")
def registry(programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with kit.serve(programs["registry"], tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture
def image(
    engine_host: str,
    docker_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Command:
    """Calls `verl-p40 image`, as its entry point does, without anyone's docker login."""
    own = tmp_path / "docker"
    own.mkdir()
    (own / "config.json").write_text("{}")
    (own / "cli-plugins").symlink_to(docker_config / "cli-plugins")
    for variable in ("DOCKER_CONTEXT", "FORCE_COLOR", *names.VARIABLES.values(), *BUILD_VARIABLES):
        monkeypatch.delenv(variable, raising=False)

    def call(*arguments: str, **environ: str) -> Done:
        with monkeypatch.context() as patch:
            settings = {
                "DOCKER_CONFIG": str(own),
                "DOCKER_HOST": engine_host,
                "NO_COLOR": "1",
                **environ,
            }
            for variable, value in settings.items():
                patch.setenv(variable, value)
            capfd.readouterr()
            with pytest.raises(SystemExit) as ended:
                run(["image", *arguments])
        shown = capfd.readouterr()
        return Done(int(ended.value.code or 0), shown.out, shown.err)

    return call


@pytest.fixture
def name(engine: docker.DockerClient) -> Iterator[Callable[[str], str]]:
    """Names images of a repository of this test; they are removed, and no container is left."""
    repository = f"verl-p40-test/{uuid.uuid4().hex[:12]}"
    try:
        yield lambda registry: f"{registry}/{repository}:1" if registry else f"{repository}:1"
    finally:
        for found in engine.images.list():
            for tag in [*found.tags, *(found.attrs["RepoDigests"] or ())]:
                if repository in tag:
                    remove(engine, tag)
        left = engine.containers.list(all=True, filters={"label": inside.TEMPORARY})
        assert left == [], "a container was left behind"


def remove(engine: docker.DockerClient, tag: str) -> None:
    with contextlib.suppress(ImageNotFound):
        engine.images.remove(tag, force=True)


def refused(done: Done, code: ExitCode, *words: str) -> None:
    """The call ended with ``code``, one line that says ``words``, and one that says what to do."""
    assert done.code == code, done
    assert done.out == ""
    error, fix = done.err.strip().splitlines()[-2:]
    assert error.startswith("error: ") and fix.startswith("  fix: "), done.err
    for word in words:
        assert word in f"{error}\n{fix}"


# --- push, pull, run, verify ---------------------------------------------------------------


def test_pushed_removed_pulled_verified_and_run(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    tag = name(registry)
    built = kit.make(engine, programs["busybox"], tag, extra=os.urandom(200_000))
    pushed = image("push", tag, "--json")
    assert pushed.code == 0 and pushed.err == ""
    digest = pushed.document["digest"]
    assert DIGEST.fullmatch(digest)
    assert pushed.document["pinned"] == f"{tag.removesuffix(':1')}@{digest}"

    remove(engine, tag)
    with pytest.raises(ImageNotFound):
        engine.images.get(built)
    refused(image("verify", tag), ExitCode.DATA, "no image", "verl-p40 image pull")

    pulled = image("pull", tag)
    assert pulled.code == 0
    assert f"@{digest}" in pulled.out and f"VERL_P40_IMAGE={tag}" in pulled.out
    layers = re.findall(r"(\w{12}): pull complete.*\((\d) of (\d) layers\)", pulled.err)
    assert [(int(at), int(of)) for _, at, of in layers][-1] == (3, 3), pulled.err
    assert engine.images.get(tag).id == built
    assert "VERL_P40_IMAGE=" not in image("pull", tag, VERL_P40_IMAGE=tag).out
    again = image("pull", tag, "--json")
    assert again.document["digest"] == digest and "up to date" in again.document["status"]

    release = tmp_path / "environment.json"
    release.write_text(json.dumps(kit.environment()))
    for reference in (tag, f"{tag}@{digest}", f"{tag.removesuffix(':1')}@{digest}"):
        verified = image("verify", reference, "--against", str(release))
        assert verified.code == 0, verified
        assert f"is the image that was published: {digest}" in verified.out
        assert verified.out.count("same  ") == 4 and "differs" not in verified.out

    output = engine.containers.run(tag, remove=True, network_mode="none")
    assert json.loads(output) == kit.environment()
    assert engine.containers.run(tag, ["id", "-u"], remove=True).strip() == b"1000"


def test_pull_by_digest(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
) -> None:
    tag = name(registry)
    built = kit.make(engine, programs["busybox"], tag)
    digest = image("push", tag, "--json").document["digest"]
    remove(engine, tag)
    pinned = f"{tag.removesuffix(':1')}@{digest}"
    assert image("pull", pinned, "--json").document["digest"] == digest
    assert engine.images.get(pinned).id == built
    assert image("verify", pinned).code == 0
    other = f"{tag.removesuffix(':1')}@sha256:{'0' * 64}"
    refused(image("pull", other), ExitCode.NETWORK, "no ", "in the registry")


def test_the_tag_was_replaced_in_the_registry(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
) -> None:
    """Same tag, other content: what is here is no longer what is published, and the reverse."""
    tag = name(registry)
    kit.make(engine, programs["busybox"], tag, extra=b"as released")
    first = image("push", tag, "--json").document["digest"]
    kit.make(engine, programs["busybox"], tag, extra=b"tampered with")
    here = image("verify", f"{tag}@{first}", "--json")
    assert here.code == ExitCode.FOUND
    (digest_check, *others) = here.document["checks"]
    assert digest_check["name"] == "digest" and not digest_check["ok"]
    assert all(check["ok"] for check in others), "its words are the same: the digest tells"

    second = image("push", tag, "--json").document["digest"]
    assert second != first
    remove(engine, tag)
    assert image("pull", tag).code == 0
    assert image("verify", tag).code == 0
    shown = image("verify", f"{tag}@{first}")
    assert shown.code == ExitCode.FOUND
    assert f"the image here is {second}; the one asked for is {first}" in shown.out
    assert "NOT the image that was published: 1 difference" in shown.out


def test_an_image_built_here_is_not_the_published_one(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
) -> None:
    tag = name(registry)
    kit.make(engine, programs["busybox"], tag, extra=b"published")
    assert image("push", tag).code == 0
    remove(engine, tag)
    kit.make(engine, programs["busybox"], tag, extra=b"mine")
    done = image("verify", tag)
    assert done.code == ExitCode.FOUND and "built on this machine" in done.out


def test_every_difference_is_named(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    honest = kit.environment()
    queue = honest["patches"][0]
    lying = {**queue, "digest": "f" * 64, "patches": queue["patches"][1:]}
    document = kit.environment(
        flavor="cu118", patches=[lying], packages={"verl": "0.4.1", "torch": "2.5.1"}
    )
    tag = name(registry)
    kit.make(engine, programs["busybox"], tag, document=document, stated=kit.labels(honest))
    assert image("push", tag).code == 0
    release = tmp_path / "environment.json"
    release.write_text(json.dumps(honest))
    done = image("verify", tag, "--against", str(release), "--json")
    assert done.code == ExitCode.FOUND
    found = {check["name"]: check["differences"] for check in done.document["checks"]}
    assert found["digest"] == []
    stated = "\n".join(found["labels"])
    for label in ("flavor is cpu", "torch is 2.6.0", f"patches-digest is {load_queue().digest}"):
        assert f"label io.verl-p40.{label}" in stated
    assert len(found["labels"]) == 3
    assert f"patch {queue['patches'][0]} is not in the image" in found["patches"]
    assert found["environment.json"] == [
        "flavor: cu118, should be cpu",
        f"patches[0].digest: {'f' * 64}, should be {load_queue().digest}",
        f"patches[0].patches: a list of {len(queue['patches']) - 1}, "
        f"should be a list of {len(queue['patches'])}",
        "packages.torch: 2.5.1, should be 2.6.0+cpu",
    ]


def test_another_versions_queue_is_not_compared(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
) -> None:
    tag = name(registry)
    document = kit.environment(verl_p40="9.9.9")
    document["patches"][0]["digest"] = "e" * 64
    kit.make(engine, programs["busybox"], tag, document=document)
    assert image("push", tag).code == 0
    done = image("verify", tag)
    assert done.code == 0
    assert "note  the image is of verl-p40 9.9.9" in done.out


# --- inspect -------------------------------------------------------------------------------


def test_inspect(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
) -> None:
    tag = name(registry)
    built = kit.make(engine, programs["busybox"], tag, extra=b"0" * 500_000)
    before = image("inspect", tag, "--json").document
    assert before["compressed"] is None and "never pushed" in before["compressed_reason"]
    digest = image("push", tag, "--json").document["digest"]

    found = image("inspect", tag, "--json").document
    assert found["id"] == built and found["tags"] == [tag]
    assert found["digests"] == [f"{tag.removesuffix(':1')}@{digest}"]
    assert (found["user"], found["entrypoint"]) == ("1000:0", ["/bin/busybox"])
    assert found["environment"] == kit.environment()
    assert found["patches_digest"] == load_queue().digest
    assert found["labels"]["io.verl-p40.flavor"] == "cpu"
    assert sum(step["size"] for step in found["steps"]) == found["size"]
    sizes = {step["instruction"].split()[-1]: step for step in found["steps"]}
    assert sizes["/bin/busybox"]["size"] == programs["busybox"].stat().st_size
    assert sizes["/extra"]["size"] == 500_000
    # Half a megabyte of one byte packs to next to nothing: the column is about the right layer.
    assert 0 < sizes["/extra"]["compressed"] < 5_000 < sizes["/bin/busybox"]["compressed"]
    stored = sum(step["compressed"] or 0 for step in found["steps"])
    assert stored == found["compressed"]
    assert [step for step in found["steps"] if step["instruction"].startswith("USER")]

    table = image("inspect", tag).out
    for words in (digest, "1000:0", "torch 2.6.0+cpu", load_queue().digest, "500.0 kB", "download"):
        assert words in table
    assert "\x1b" not in table
    offline = image("inspect", tag, "--local", "--json").document
    assert offline["compressed"] is None and offline["size"] == found["size"]


def test_an_image_of_something_else(
    engine: docker.DockerClient, image: Command, name: Callable[[str], str]
) -> None:
    tag = name("")
    root = io_tar({"hello": b"hello"})
    repository, _, version = tag.partition(":")
    engine.api.import_image_from_data(root, repository=repository, tag=version)
    shown = image("inspect", tag)
    assert shown.code == 0 and "not an image of verl-p40" in shown.out
    refused(image("verify", f"{tag}@sha256:{'0' * 64}"), ExitCode.DATA, "not an image of verl-p40")


@pytest.mark.parametrize(
    ("data", "words"), [(b"{", "not JSON"), (b"[]", "not a JSON object")], ids=["half", "list"]
)
def test_a_damaged_environment_file(
    engine: docker.DockerClient, image: Command, name: Callable[[str], str], data: bytes, words: str
) -> None:
    tag = name("")
    repository, _, version = tag.partition(":")
    root = io_tar({inside.PATH.lstrip("/"): data})
    engine.api.import_image_from_data(root, repository=repository, tag=version)
    refused(image("verify", f"{tag}@sha256:{'0' * 64}"), ExitCode.DATA, words)


def io_tar(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


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


def log_in(tmp_path: Path, registry: str, password: str) -> None:
    """What `docker login` writes."""
    secret = base64.b64encode(f"{kit.USER}:{password}".encode()).decode()
    (tmp_path / "docker" / "config.json").write_text(
        json.dumps({"auths": {registry: {"auth": secret}}})
    )


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


def test_no_permission(engine_host: str) -> None:
    """The engine's own socket, used by somebody who is not in its group."""
    if os.geteuid() != 0:
        pytest.skip("becoming nobody needs root")
    import requests  # noqa: F401 - nobody may not be able to read this environment

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


# --- progress ------------------------------------------------------------------------------


def on_terminal(*arguments: str, **environ: str) -> tuple[int, str, str]:
    """Call the command with a terminal for standard error: exit code, output, what was shown."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_p40.cli.main", "image", *arguments],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30", **environ},
        stdout=subprocess.PIPE,
        stderr=follower,
    )
    os.close(follower)
    shown = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:
            break  # Linux: the other end is closed
        if not data:
            break
        shown += data
    os.close(leader)
    assert process.stdout is not None
    out = process.stdout.read().decode()
    return process.wait(60), out, shown.decode(errors="replace")


def test_bars_on_a_terminal(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    engine_host: str,
    name: Callable[[str], str],
) -> None:
    tag = name(registry)
    kit.make(engine, programs["busybox"], tag, extra=os.urandom(4 << 20))
    code, out, shown = on_terminal("push", tag, DOCKER_HOST=engine_host)
    assert code == 0
    assert "pushed" in out and DIGEST.search(out)
    assert "\x1b[" in shown and "Pushed" in shown and re.search(r"\d(\.\d)?/\d\.\d MB", shown)


def test_ctrl_c_ends_a_transfer_that_hangs(engine_host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "verl_p40.cli.main", "image", "pull", f"{address}/x:1"],
            env={**os.environ, "DOCKER_HOST": engine_host},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = silent.accept()  # the engine asks, and is left waiting
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        connection.close()
    assert (process.returncode, out) == (ExitCode.INTERRUPTED, "")
    assert "Traceback" not in err


# --- build ---------------------------------------------------------------------------------

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
    repository = Path(__file__).resolve().parents[2]
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
    assert engine.containers.run(tag, remove=True).decode().split()[0] == secret
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
