"""What a Docker Engine or a registry complains about, as our errors.

The engine passes on what registries and the kernel said as free text, with status 500 for nearly
everything, so the text is what tells causes apart. Each pattern was provoked with engine 20.10 and
Debian's docker-registry 2.8.2 and is replayed in ``tests/unit/image/test_image_problems.py``; the
patterns marked *hub* are Docker Hub's and GitHub's words, taken from their documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from verl_p40.errors import (
    DataError,
    DiskError,
    MachineError,
    NetworkError,
    UsageError,
    VerlP40Error,
)
from verl_p40.image.names import Reference


@dataclass(frozen=True)
class Rule:
    """Words of the engine → our error; the texts know ``{image}``, ``{registry}``, ``{said}``."""

    name: str
    pattern: re.Pattern[str]
    error: type[VerlP40Error]
    message: str
    fix: str


def _rule(name: str, words: str, error: type[VerlP40Error], message: str, fix: str) -> Rule:
    return Rule(name, re.compile(words, re.IGNORECASE), error, message, fix)


RULES = (
    _rule(
        "no space",
        r"no space left on device|disk quota exceeded",
        DiskError,
        "no space left for the engine's images ({said})",
        "docker system df shows what takes it; docker image prune and docker builder prune free it",
    ),
    _rule(
        "rate limit",  # hub
        r"toomanyrequests|429 Too Many Requests",
        NetworkError,
        "{registry} limits how often you may ask ({said})",
        "wait, or docker login {registry}: named users may ask more often",
    ),
    _rule(
        "unauthorised",
        r"no basic auth credentials|unauthorized|authentication required|denied:|access denied"
        r"|insufficient[_ ]scope|(401|403) (Unauthorized|Forbidden)|incorrect username or password",
        NetworkError,
        "{registry} refuses {image} ({said})",
        "docker login {registry}, as a user who may read it (to pull) or write it (to push)",
    ),
    _rule(
        "other machine",
        r"no matching manifest|no match for platform",
        MachineError,
        "{image} is not made for this machine's processor ({said})",
        "the images are for x86-64 (linux/amd64)",
    ),
    _rule(
        "not published",
        r"manifest unknown|name unknown|repository name not known"
        r"|failed to resolve reference.*not found|manifest for .* not found",
        NetworkError,
        "no {image} in the registry",
        "check name and tag; verl-p40 image build makes the image of this clone",
    ),
    _rule(
        "plain HTTP",
        r"server gave HTTP response to HTTPS client",
        NetworkError,
        "{registry} speaks plain HTTP, and the engine trusts HTTPS only",
        'serve it with TLS, or add "insecure-registries": ["{registry}"] to '
        "/etc/docker/daemon.json and restart the engine",
    ),
    _rule(
        "certificate",
        r"x509:|certificate (signed|is |has )|tls: ",
        NetworkError,
        "the engine does not trust the certificate of {registry} ({said})",
        "put the authority that signed it into /etc/docker/certs.d/{registry}/ca.crt",
    ),
    _rule(
        "name resolution",
        r"no such host|server misbehaving|temporary failure in name resolution"
        r"|lookup \S+( on \S+)?: ",
        NetworkError,
        "the engine cannot resolve {registry}: offline, or a wrong name ({said})",
        "check the network and the name; behind a proxy the engine needs it too "
        "(docs.docker.com/engine/daemon/proxy)",
    ),
    _rule(
        "no answer",
        r"connection refused|i/o timeout|no route to host|network is unreachable|Client\.Timeout"
        r"|context deadline exceeded|handshake timeout|connection reset|unexpected EOF",
        NetworkError,
        "{registry} does not answer ({said})",
        "check that it runs and can be reached from the engine's host, then try again",
    ),
    _rule(
        "damaged",
        r"verification failed|digest mismatch|unexpected commit digest|invalid checksum",
        NetworkError,
        "what {registry} sent is not what its digest says ({said})",
        "try again; if it stays so, the registry or a proxy in between is broken",
    ),
    _rule(
        "registry failed",
        r"unexpected (HTTP )?status|(500|502|503|504) (Internal Server Error|Bad|Service|Gateway)",
        NetworkError,
        "{registry} failed ({said})",
        "try again; the registry's own log says why (a full disk looks like this from outside)",
    ),
    _rule(
        "not here",
        r"no such image|does not exist locally",
        DataError,
        "no image {image} in this engine",
        "verl-p40 image pull {image}, or verl-p40 image build",
    ),
    _rule(
        "bad name",
        r"invalid reference format|invalid repository name|invalid tag",
        UsageError,
        "`{image}` is not an image name ({said})",
        "[registry/]name[:tag][@sha256:...], the name in lower case",
    ),
)


def explain(said: str, image: Reference | str = "") -> VerlP40Error:
    """The error for what the engine said while it worked on ``image``."""
    said = " ".join(said.split()) or "nothing"
    registry = image.registry if isinstance(image, Reference) else "the registry"
    for rule in RULES:
        if rule.pattern.search(said):
            words = {"image": str(image), "registry": registry, "said": said}
            return rule.error(rule.message.format(**words), fix=rule.fix.format(**words))
    return MachineError(
        f"the Docker Engine says: {said}", fix="its log says more: journalctl -u docker"
    )


def no_engine(error: BaseException, host: str) -> VerlP40Error:
    """The error for an engine at ``host`` that could not be spoken to.

    docker-py buries the system's error in requests' and urllib3's; the innermost one decides.
    """
    innermost = [item for item in _buried(error) if isinstance(item, OSError)]
    path = host.removeprefix("unix://").removeprefix("http+unix://")
    if any(isinstance(item, PermissionError) for item in innermost):
        return MachineError(
            f"no permission to use the Docker Engine's socket {path}",
            fix="sudo usermod -aG docker $USER, then log in again (members of that group are "
            "as good as root), or use rootless Docker",
        )
    if any(isinstance(item, FileNotFoundError) for item in innermost):
        return MachineError(
            f"no Docker Engine: its socket {path} does not exist",
            fix="install Docker (docs.docker.com/engine/install) and start it: "
            "sudo systemctl start docker; or point DOCKER_HOST at an engine",
        )
    if any(isinstance(item, ConnectionRefusedError) for item in innermost):
        return MachineError(
            f"no Docker Engine: nothing listens at {path}",
            fix="start it: sudo systemctl start docker; or correct DOCKER_HOST",
        )
    text = str(error)
    if re.search(r"Failed to resolve|Name or service not known|name resolution", text):
        return MachineError(
            f"no Docker Engine: the name in {host} does not resolve", fix="correct DOCKER_HOST"
        )
    if re.search(r"timed out|timeout", text, re.IGNORECASE):
        return MachineError(
            f"the Docker Engine at {host} does not answer in time", fix="is it overloaded or gone?"
        )
    if "404" in text or "Expecting value" in text:
        return MachineError(
            f"what answers at {host} is not a Docker Engine", fix="correct DOCKER_HOST"
        )
    reason = text.removeprefix("Error while fetching server API version: ")
    return MachineError(
        f"no Docker Engine at {host}: {' '.join(reason.split())}",
        fix="docker version shows whether the docker command can reach it",
    )


def _buried(error: BaseException) -> Iterator[BaseException]:
    """``error`` and every exception that it was raised from or carries."""
    seen: set[int] = set()
    todo: list[BaseException] = [error]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        carried = (item.__cause__, item.__context__, getattr(item, "reason", None), *item.args)
        todo.extend(other for other in carried if isinstance(other, BaseException))
