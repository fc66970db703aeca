"""What engines and registries said, word by word, and what we make of it."""

from __future__ import annotations

import errno

import pytest

from verl_p40.errors import ExitCode
from verl_p40.image.names import parse
from verl_p40.image.problems import RULES, explain, no_engine

IMAGE = parse("127.0.0.1:5000/a/b:1")

# Docker Engine 20.10.24 with docker-registry 2.8.2, provoked on this kind of machine: a login
# asked for or wrong, unknown tags, closed ports, reserved names, a certificate for another
# address, plain HTTP off loopback, a registry and an engine on a full tmpfs.
RECORDED = [
    ("unauthorised", "no basic auth credentials"),
    ("unauthorised", 'Head "http://127.0.0.1:5056/v2/a/b/manifests/1": no basic auth credentials'),
    ("unauthorised", "unauthorized: authentication required"),
    (
        "unauthorised",
        "login attempt to http://127.0.0.1:5056/v2/ failed with status: 401 Unauthorized",
    ),
    ("unauthorised", "denied: requested access to the resource is denied"),
    (
        "not published",
        "manifest for 127.0.0.1:5055/a/b:nope not found: manifest unknown: manifest unknown",
    ),
    ("not published", "manifest unknown: manifest unknown"),
    (
        "certificate",
        'Get "https://192.0.2.2:5057/v2/": x509: certificate is valid for 127.0.0.1, not 192.0.2.2',
    ),
    (
        "certificate",
        'Get "https://192.0.2.2:5057/v2/": x509: certificate signed by unknown authority',
    ),
    (
        "plain HTTP",
        'Get "https://192.0.2.2:5058/v2/": http: server gave HTTP response to HTTPS client',
    ),
    (
        "no answer",
        'Get "http://127.0.0.1:5999/v2/": dial tcp 127.0.0.1:5999: connect: connection refused',
    ),
    (
        "name resolution",
        'Get "https://registry.invalid/v2/": dial tcp: lookup registry.invalid on 192.0.2.53:53: '
        "no such host",
    ),
    ("registry failed", "received unexpected HTTP status: 500 Internal Server Error"),
    (
        "no space",
        "write /var/lib/docker/tmp/GetImageBlob1227872605: no space left on device",
    ),
    (
        "no space",
        "Error processing tar file(exit status 1): write /bin/busybox: no space left on device",
    ),
    ("not here", "An image does not exist locally with the tag: 127.0.0.1:5055/zz/zz"),
    ("not here", "no such image: nope:1: No such image: nope:1"),
    ("bad name", "invalid reference format: repository name must be lowercase"),
]

# Not provoked here: the words of Docker Hub, of GitHub's registry, of newer engines (with
# containerd's image store) and of faults in between, from their documentation and sources.
UPSTREAM = [
    (
        "unauthorised",
        "pull access denied for a/b, repository does not exist or may require 'docker login': "
        "denied: requested access to the resource is denied",
    ),
    ("unauthorised", "denied: permission_denied: write_package"),
    (
        "unauthorised",
        "pull access denied, repository does not exist or may require authorization: server "
        "message: insufficient_scope: authorization failed",
    ),
    ("unauthorised", 'Get "https://r/v2/": unauthorized: incorrect username or password'),
    (
        "rate limit",
        "toomanyrequests: You have reached your pull rate limit. You may increase the limit by "
        "authenticating and upgrading: https://www.docker.com/increase-rate-limit",
    ),
    ("not published", 'failed to resolve reference "r.io/a/b:1": r.io/a/b:1: not found'),
    ("not published", "name unknown: repository name not known to registry"),
    (
        "other machine",
        "no matching manifest for linux/arm64/v8 in the manifest list entries",
    ),
    (
        "name resolution",
        'Get "https://r.io/v2/": dial tcp: lookup r.io: Temporary failure in name resolution',
    ),
    (
        "no answer",
        'Get "https://r.io/v2/": net/http: request canceled while waiting for connection '
        "(Client.Timeout exceeded while awaiting headers)",
    ),
    ("no answer", 'Get "https://r.io/v2/": net/http: TLS handshake timeout'),
    ("no answer", 'Get "https://r.io/v2/": dial tcp 192.0.2.1:443: i/o timeout'),
    ("damaged", "filesystem layer verification failed for digest sha256:00"),
    ("registry failed", "received unexpected HTTP status: 503 Service Unavailable"),
]


def rule_of(said: str) -> str:
    return next((rule.name for rule in RULES if rule.pattern.search(said)), "none")


@pytest.mark.parametrize(("name", "said"), RECORDED + UPSTREAM)
def test_the_cause_is_told(name: str, said: str) -> None:
    assert rule_of(said) == name
    error = explain(said, IMAGE)
    assert error.message and error.fix
    assert "{" not in error.message, "a placeholder was left"


def test_every_rule_has_been_seen() -> None:
    assert {rule.name for rule in RULES} == {name for name, _ in RECORDED + UPSTREAM}


def test_exit_codes_by_who_is_at_fault() -> None:
    codes = {name: explain(said, IMAGE).exit_code for name, said in RECORDED}
    assert codes["no space"] == ExitCode.DISK
    assert codes["not here"] == ExitCode.DATA
    assert codes["bad name"] == ExitCode.USAGE
    others = set(codes) - {"no space", "not here", "bad name"}
    assert {codes[name] for name in others} == {ExitCode.NETWORK}


def test_the_fix_names_the_registry() -> None:
    assert "docker login 127.0.0.1:5000," in explain("no basic auth credentials", IMAGE).fix
    error = explain("server gave HTTP response to HTTPS client", IMAGE)
    assert '"insecure-registries": ["127.0.0.1:5000"]' in error.fix


def test_unknown_words_are_passed_on() -> None:
    error = explain("the\n  frobnicator   jammed", IMAGE)
    assert error.message == "the Docker Engine says: the frobnicator jammed"
    assert error.exit_code == ExitCode.ENVIRONMENT


def buried(error: OSError) -> Exception:
    """As docker-py, requests and urllib3 wrap it."""
    inner = RuntimeError("Connection aborted.", error)
    return RuntimeError(f"Error while fetching server API version: {inner}", inner)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "no permission"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "does not exist"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "nothing listens"),
    ],
)
def test_no_engine_by_the_systems_reason(error: OSError, words: str) -> None:
    found = no_engine(buried(error), "unix:///run/user/1000/docker.sock")
    assert found.exit_code == ExitCode.ENVIRONMENT
    assert words in found.message and " /run/user/1000/docker.sock" in found.message
    assert found.fix


def test_no_engine_for_another_reason() -> None:
    found = no_engine(
        RuntimeError("Error while fetching server API version: odd\n thing"), "tcp://e:2375"
    )
    assert found.message == "no Docker Engine at tcp://e:2375: odd thing"
    timed_out = no_engine(RuntimeError("Read timed out. (read timeout=20)"), "tcp://e:2375")
    assert "does not answer in time" in timed_out.message
