"""Keeps people and machines out of a report: who, where and with what secrets.

Whatever text a check, a library or the driver wrote goes through :class:`Scrubber` before it is
in the report. It replaces what it knows (names and folders of this machine, secrets in the
environment) and what looks like an address, an identifier or a token.
"""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import os
import pwd
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT_WORDS = frozenset(
    {
        *("verl", "p40", "verl-p40", "smoke", "train", "trainer", "monitor"),
        *("torch", "triton", "vllm", "ray", "cuda", "gpu", "cpu", "ok"),
    }
)
"""A user or host of such a name (a container's, say) names no person, and the words are ours."""

_PUBLIC_ROOTS = ("usr", "lib", "lib64", "proc", "sys", "dev", "bin")
"""Absolute paths below these say nothing about anyone."""
_PUBLIC_HOSTS = ("huggingface.co", "download.pytorch.org", "github.com", "nvidia.com")
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|AUTH", re.IGNORECASE)
_SHORTEST_SECRET = 6

_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w.<>~/-])(?:~|/(?!/))[^\s'\"`:;,()<>\[\]{}|=]*")
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"), "<secret>"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abps]-|npm_|pypi-)[\w-]{8,}"), "<secret>"),
    (re.compile(r"\bAKIA[0-9A-Z]{16}\b"), "<secret>"),
    (re.compile(r"\bbearer\s+[^\s'\"]+", re.IGNORECASE), "bearer <secret>"),
    (re.compile(r"\b([\w-]*(?:token|passw(?:or)?d|secret|api[_-]?key))(['\"]?\s*[=:]\s*['\"]?)[^\s'\",;]+", re.IGNORECASE), r"\1\2<secret>"),
    # wandb's API key.
    (re.compile(r"(?<![0-9a-zA-Z])[0-9a-f]{40}(?![0-9a-zA-Z])"), "<secret>"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "<email>"),
    (re.compile(r"\b(?:GPU-|MIG-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE), "<uuid>"),
    (re.compile(r"\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b", re.IGNORECASE), "<mac>"),
    (re.compile(r"\b(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\b", re.IGNORECASE), "<pci>"),
    (re.compile(r"\b(serial(?:\s+(?:number|no\.?))?\s*[:=]?\s*)(?=\S*\d)[\w-]+", re.IGNORECASE), r"\1<serial>"),
)  # fmt: skip
_IP4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)")
_IP6 = re.compile(
    r"(?<![\w:.])[0-9a-f]{0,4}(?::[0-9a-f]{0,4}){2,7}(?:\.\d{1,3}){0,3}(?![\w:])", re.I
)


@dataclass(frozen=True)
class Identity:
    """What must not be in a report. ``folders`` maps absolute paths to what they are called."""

    hosts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    folders: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_this_machine(
        cls, folders: Mapping[str, Path], environ: Mapping[str, str] | None = None
    ) -> Identity:
        """Read from the system and the environment; ``folders`` are ours, by the name to show."""
        environ = os.environ if environ is None else environ
        named = [(str(path), f"<{name}>") for name, path in folders.items()]
        named += [(str(path.resolve()), f"<{name}>") for name, path in folders.items()]
        return cls(
            hosts=tuple(_names(_hosts(environ))),
            users=tuple(_names(_users(environ))),
            secrets=tuple(
                value
                for name, value in environ.items()
                if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET
            ),
            folders=tuple(sorted(set(named), key=lambda pair: -len(pair[0]))),
        )


def _hosts(environ: Mapping[str, str]) -> Iterable[str]:
    full = socket.gethostname()
    yield full
    yield full.split(".")[0]
    with contextlib.suppress(OSError):
        yield socket.getfqdn()
    yield environ.get("HOSTNAME", "")


def _users(environ: Mapping[str, str]) -> Iterable[str]:
    for variable in ("USER", "LOGNAME", "USERNAME", "SUDO_USER"):
        yield environ.get(variable, "")
    with contextlib.suppress(KeyError, OSError):
        yield getpass.getuser()
    with contextlib.suppress(KeyError):
        entry = pwd.getpwuid(os.getuid())
        yield entry.pw_name
        yield entry.pw_gecos.split(",")[0]
    home = environ.get("HOME", "")
    if Path(home).parent.name == "home":
        yield Path(home).name


def _names(found: Iterable[str]) -> list[str]:
    """Without doubles, the project's own words and ``localhost``; longest first."""
    kept = {name.strip() for name in found}
    kept -= {""}
    names = [n for n in kept if n.lower() not in PROJECT_WORDS and not n.startswith("localhost")]
    return sorted(names, key=lambda name: (-len(name), name))


class Scrubber:
    """Replaces what identifies a person or a machine by what kind of thing it was."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        words = [(name, "<host>") for name in identity.hosts]
        words += [(name, "<user>") for name in identity.users]
        self._words = [
            (
                re.compile(rf"(?<![A-Za-z0-9_<]){re.escape(name)}(?![A-Za-z0-9_>])", re.IGNORECASE),
                tag,
            )
            for name, tag in sorted(words, key=lambda pair: -len(pair[0]))
        ]

    def text(self, text: str) -> str:
        """``text`` without what identifies anyone; tags in angle brackets stand in its place."""
        for secret in self._identity.secrets:
            text = text.replace(secret, "<secret>")
        for folder, tag in self._identity.folders:
            # A folder's name ends where a path goes on or ends: /runs is not in /runs-old.
            text = re.sub(rf"(?<![\w.-]){re.escape(folder)}(?![\w.-]*[\w-])", tag, text)
        text = _URL.sub(_url, text)
        for pattern, tag in _PATTERNS:
            text = pattern.sub(tag, text)
        text = _IP6.sub(_address, _IP4.sub(_address, text))
        text = _PATH.sub(_path, text)
        for word, tag in self._words:
            text = word.sub(tag, text)
        return text

    def document(self, node: Any) -> Any:
        """A JSON document with every string value scrubbed; keys are ours and stay."""
        if isinstance(node, str):
            return self.text(node)
        if isinstance(node, Mapping):
            return {key: self.document(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)):
            return [self.document(item) for item in node]
        return node


def _url(match: re.Match[str]) -> str:
    """Public hosts without credentials and query; of any other, nothing."""
    scheme, _, rest = match[0].partition("://")
    host = rest.split("/")[0].split("?")[0].rpartition("@")[2]
    public = any(host == name or host.endswith(f".{name}") for name in _PUBLIC_HOSTS)
    return f"{scheme}://{host}" if public else "<url>"


def _address(match: re.Match[str]) -> str:
    text = match[0].strip(".")
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return match[0]
    return match[0] if str(address) == "::" else match[0].replace(text, "<ip>")


def _path(match: re.Match[str]) -> str:
    text = match[0]
    parts = [part for part in text.split("/") if part]
    if not text.strip("~/") or (text[0] == "/" and parts[0] in _PUBLIC_ROOTS):
        return text
    return "<path>"
