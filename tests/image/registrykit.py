"""A real registry, and small images that look like verl-p40's, for the tests of `image`.

The registry is the distribution project's own (Debian's package ``docker-registry``), run on a
free port. Where it is not installed the package is downloaded and unpacked into a temporary
folder; nothing of the system changes. The images hold a static BusyBox, so that they can run.
"""

from __future__ import annotations

import base64
import io
import json
import os
import secrets
import shutil
import socket
import subprocess
import tarfile
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import debiankit
import docker
import pytest

from verl_p40 import __version__
from verl_p40.image import contents
from verl_p40.patches.queue import load_queue
from verl_p40.stack import lockfile, pins

with warnings.catch_warnings():
    # Gone from Python 3.13 on; 3.10 and 3.11 are what this project runs on.
    warnings.simplefilter("ignore", DeprecationWarning)
    import crypt

USER, PASSWORD = "joe", "open sesame"


def program(package: str, inside: str, folder: Path) -> Path:
    """A program of a Debian package: the installed one, else unpacked into ``folder``."""
    installed = Path("/", inside)
    return installed if installed.is_file() else debiankit.unpacked(package, folder) / inside


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_address() -> str:
    """An address of this machine that is not a loopback one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


@contextmanager
def serve(
    binary: Path,
    folder: Path,
    *,
    host: str = "127.0.0.1",
    login: bool = False,
    token: dict[str, str] | None = None,
    tls: tuple[Path, Path] | None = None,
) -> Iterator[str]:
    """Run a registry that keeps its images in ``folder``; its ``host:port``."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    config: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "store")}},
        "http": {"addr": f"{host}:{port}"},
    }
    if login:
        hashed = crypt.crypt(PASSWORD, crypt.mksalt(crypt.METHOD_BLOWFISH, rounds=16))
        (folder / "htpasswd").write_text(f"{USER}:{hashed}\n")
        config["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}
    if token:
        config["auth"] = {"token": token}
    if tls:
        config["http"]["tls"] = {"certificate": str(tls[0]), "key": str(tls[1])}
    path = folder / "config.yml"
    path.write_text(json.dumps(config))  # JSON is YAML
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([binary, "serve", path], stdout=log, stderr=log)
    try:
        _wait(f"{'https' if tls else 'http'}://{host}:{port}/v2/", process, folder / "log")
        yield f"{host}:{port}"
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def serve_tokens(binary: Path, folder: Path) -> Iterator[str]:
    """A registry behind a token server: whoever is not logged in may only read.

    The tokens are JSON web tokens, signed with a key whose certificate the registry knows
    (distribution, ``spec/auth/jwt.md``).
    """
    folder.mkdir(parents=True)
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=tokens", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Tokens)
    server.key, server.certificate = key, certificate  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    token = {
        "realm": f"http://127.0.0.1:{server.server_port}/token",
        "service": "registry",
        "issuer": "tests",
        "rootcertbundle": str(certificate),
    }
    try:
        with serve(binary, folder, token=token) as address:
            yield address
    finally:
        server.shutdown()
        server.server_close()


class _Tokens(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        known = self.headers.get("Authorization") == f"Basic {login}"
        access = []
        for scope in query.get("scope", []):
            kind, name, actions = scope.rsplit(":", 2)
            allowed = [word for word in actions.split(",") if known or word == "pull"]
            access.append({"type": kind, "name": name, "actions": allowed})
        answer = json.dumps({"token": self._token(query["service"][0], access)}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _token(self, service: str, access: list[dict[str, Any]]) -> str:
        lines = self.server.certificate.read_text().strip().splitlines()  # type: ignore[attr-defined]
        header = {"typ": "JWT", "alg": "RS256", "x5c": ["".join(lines[1:-1])]}
        now = int(time.time())
        claims = {"iss": "tests", "sub": USER, "aud": service, "jti": os.urandom(8).hex()}
        claims |= {"iat": now, "nbf": now - 60, "exp": now + 600, "access": access}  # type: ignore[dict-item]
        signed = ".".join(_packed(json.dumps(part).encode()) for part in (header, claims))
        signature = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", self.server.key],  # type: ignore[attr-defined]
            input=signed.encode(),
            check=True,
            capture_output=True,
        ).stdout
        return f"{signed}.{_packed(signature)}"

    def log_message(self, *_: object) -> None:
        pass


def _packed(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return  # it answers, if only that one has to log in
        except urllib.error.URLError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                return
        time.sleep(0.1)
    pytest.fail(f"the registry does not come up:\n{log.read_text(errors='replace')[-1500:]}")


def environment(**changes: Any) -> dict[str, Any]:
    """What ``environment.json`` of this version's CPU image says, with few packages."""
    queue = load_queue()
    lock = lockfile.lock_path(pins.load().flavor["cpu"].lock)
    document = {
        "schema_version": 1,
        "verl_p40": __version__,
        "revision": "0123456789abcdef0123456789abcdef01234567",
        "target": "train",
        "flavor": "cpu",
        "base_image": "debian:12",
        "system": "Debian GNU/Linux 12 (bookworm)",
        "python": "3.11.2",
        "lock": {"file": lock.name, "sha256": lockfile.digest(lock)},
        "torch_architectures": [],
        "patches": [
            {
                "project": "verl",
                "version": queue.version,
                "digest": queue.digest,
                "patches": [patch.path for patch in queue.patches],
            }
        ],
        "packages": {"torch": "2.6.0+cpu", "verl": queue.version},
    }
    return {**document, **changes}


def labels(document: dict[str, Any], **changes: str) -> dict[str, str]:
    """The labels of an image that holds ``document``."""
    fields = {pair.label: str(contents.value(document, pair.field)) for pair in contents.PAIRS}
    fields["io.verl-p40.torch"] = "2.6.0"
    return {**fields, **changes}


def make(
    client: docker.DockerClient,
    busybox: Path,
    tag: str,
    *,
    document: dict[str, Any] | None = None,
    stated: dict[str, str] | None = None,
    extra: bytes = b"",
) -> str:
    """Build an image on the spot (the engine's own builder); its id."""
    document = environment() if document is None else document
    lines = [
        "FROM scratch",
        "COPY busybox /bin/busybox",
        "COPY environment.json /opt/verl-p40/environment.json",
        "COPY extra /extra",
        "USER 1000:0",
        'ENTRYPOINT ["/bin/busybox"]',
        'CMD ["cat", "/opt/verl-p40/environment.json"]',
    ]
    files = {
        "Dockerfile": "\n".join(lines).encode(),
        "busybox": busybox.read_bytes(),
        "environment.json": json.dumps(document).encode(),
        "extra": extra,
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    packed.seek(0)
    image, _ = client.images.build(
        fileobj=packed,
        custom_context=True,
        tag=tag,
        rm=True,
        forcerm=True,
        labels=labels(document) if stated is None else stated,
    )
    return str(image.id)


@contextmanager
def small_engine(folder: Path, size: str) -> Iterator[str]:
    """A Docker Engine of its own whose disk is a tmpfs of ``size``; its socket."""
    dockerd = shutil.which("dockerd")
    if dockerd is None or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("a second engine with a small disk needs dockerd, ip (iproute2) and root")
    data = folder / "data"
    data.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", data], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    address = folder / "s"
    # Not --bridge=none: dockerd then deletes docker0, which the other engine uses.
    bridge = f"vp40-{secrets.token_hex(3)}"
    command = [dockerd, f"--host=unix://{address}", f"--data-root={data}"]
    command += [f"--exec-root={folder / 'exec'}", f"--pidfile={folder / 'pid'}"]
    command += [f"--bridge={bridge}", "--iptables=false"]
    process = None
    try:
        for words in (
            f"link add {bridge} type bridge",
            f"address add 172.31.253.1/30 dev {bridge}",
        ):
            subprocess.run(["ip", *words.split()], check=True)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not address.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = (folder / "log").read_text(errors="replace")[-1500:]
                pytest.fail(f"dockerd does not come up:\n{tail}")
            time.sleep(0.2)
        yield f"unix://{address}"
    finally:
        if process is not None:
            process.terminate()
            process.wait(60)
        subprocess.run(["ip", "link", "delete", bridge], check=True)
        subprocess.run(["umount", data], check=True)
