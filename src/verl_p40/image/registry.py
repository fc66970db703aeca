"""What a registry says about a published image: its layers as they are stored, compressed.

The engine keeps only unpacked layers and passes no manifest on, so this asks the registry itself,
read-only, as the OCI distribution specification has it (v1.1, "Pull"; token protocol: the
distribution project's ``spec/auth/token.md``), with the credentials of the docker configuration.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from dataclasses import dataclass
from typing import Any

from verl_p40.errors import NetworkError
from verl_p40.image.names import DOCKER_HUB, Reference

TIMEOUT = (10, 30)
"""Seconds to connect, seconds of silence."""
LIMIT = 4 * 2**20
"""Bytes a manifest or config may have: what registries accept at most."""
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Stored:
    """An image as the registry holds it."""

    layers: tuple[int, ...]
    """Compressed size of each layer, in bytes, in the order of the build."""
    steps: tuple[bool, ...]
    """Of each step of the image's history, whether it made a layer."""

    @property
    def size(self) -> int:
        return sum(self.layers)

    def by_step(self) -> list[int | None]:
        """Compressed size of each step's layer, None for a step without; empty if they differ."""
        if sum(self.steps) != len(self.layers):
            return []
        sizes = iter(self.layers)
        return [next(sizes) if made else None for made in self.steps]


def stored(image: Reference, architecture: str = "amd64") -> Stored:
    """Ask the registry of ``image`` for its manifest and config.

    Raises:
        NetworkError: it does not answer, refuses, or sends something else than asked for.
    """
    import requests

    with requests.Session() as session:
        try:
            return _stored(_Asker(session, image), image, architecture)
        except requests.RequestException as error:
            raise NetworkError(f"{image.registry} does not answer: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise NetworkError(f"{image.registry} sent no proper manifest: {error!r}") from error


def _stored(ask: _Asker, image: Reference, architecture: str) -> Stored:
    manifest = ask.json(f"manifests/{image.version}", image.digest)
    if manifest.get("mediaType") in INDEXES or "manifests" in manifest:
        digest = next(
            entry["digest"]
            for entry in manifest["manifests"]
            if entry.get("platform", {}).get("architecture") == architecture
        )
        manifest = ask.json(f"manifests/{digest}", digest)
    digest = manifest["config"]["digest"]
    config = ask.json(f"blobs/{digest}", digest)
    return Stored(
        tuple(int(layer["size"]) for layer in manifest["layers"]),
        tuple(not step.get("empty_layer", False) for step in config.get("history", ())),
    )


class _Asker:
    """Reads documents of one repository."""

    def __init__(self, session: Any, image: Reference) -> None:
        self._session = session
        self._image = image
        host = "registry-1.docker.io" if image.registry == DOCKER_HUB else image.registry
        scheme = "http" if is_loopback(host) else "https"
        self._base = f"{scheme}://{host}/v2/{image.path}"
        self._session.headers["Accept"] = ", ".join((*MANIFESTS, *INDEXES))

    def json(self, what: str, digest: str = "") -> dict[str, Any]:
        url = f"{self._base}/{what}"
        answer = self._session.get(url, timeout=TIMEOUT, stream=True)
        if answer.status_code == 401:
            self._authorise(answer.headers.get("WWW-Authenticate", ""))
            answer = self._session.get(url, timeout=TIMEOUT, stream=True)
        if answer.status_code != 200:
            raise NetworkError(f"{self._image.registry} answers {answer.status_code} to {what}")
        data = answer.raw.read(LIMIT + 1, decode_content=True)
        if len(data) > LIMIT:
            raise ValueError(f"{what} is larger than {LIMIT} bytes")
        if digest and f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise ValueError(f"{what} is not what its digest says")
        document = json.loads(data)
        if not isinstance(document, dict):
            raise ValueError(f"{what} is not a JSON object")
        return document

    def _authorise(self, challenge: str) -> None:
        kind, _, rest = challenge.partition(" ")
        login = _credentials(self._image.registry)
        if kind.lower() == "basic":
            self._session.auth = login
            return
        fields = dict(_CHALLENGE.findall(rest))
        realm = fields.pop("realm", "")
        if kind.lower() != "bearer" or not realm.startswith(("https://", "http://")):
            raise NetworkError(f"{self._image.registry} wants a login of another kind: {kind}")
        query = {key: fields[key] for key in ("service", "scope") if key in fields}
        answer = self._session.get(realm, params=query, auth=login, timeout=TIMEOUT)
        answer.raise_for_status()
        token = answer.json()
        self._session.headers["Authorization"] = (
            f"Bearer {token.get('token') or token['access_token']}"
        )


def is_loopback(registry: str) -> bool:
    """Whether a registry is on this machine, where the engine allows plain HTTP."""
    host = re.sub(r":\d+$", "", registry).strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _credentials(registry: str) -> tuple[str, str] | None:
    """User and password of the docker configuration; None to ask as nobody."""
    from docker import auth
    from docker.credentials.errors import StoreError
    from docker.errors import DockerException

    try:
        found = auth.load_config().resolve_authconfig(registry)
    except (DockerException, StoreError):
        return None
    if not found:
        return None
    user = found.get("username") or found.get("Username")
    password = found.get("password") or found.get("Password")
    return (user, password) if user and password else None
