"""A package index (the "simple" API): which one is in force, and what files it has.

JSON (PEP 691) where the server speaks it, else HTML (PEP 503). Files are chosen by their hash,
so which index serves them does not matter for what gets installed.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import requests
from packaging.utils import canonicalize_name
from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_attempt

from verl_p40.errors import MachineError, NetworkError
from verl_p40.stack import http, pins
from verl_p40.stack.http import RetryableError, RetryPolicy
from verl_p40.stack.uv import uv_binary

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True)
class IndexFile:
    """A file as an index lists it. ``size`` is in bytes, None where the index does not say."""

    filename: str
    url: str
    sha256: str | None
    size: int | None = None


def index_url(name: str) -> str:
    """The address of an index of ``pins.toml``.

    For ``packages``: ``UV_DEFAULT_INDEX``, ``UV_INDEX_URL``, ``PIP_INDEX_URL``, pip's
    configuration files, then whatever uv itself would use (its configuration or its default).

    Raises:
        MachineError: no address can be found.
    """
    url = pins.load().index[name].url()
    if not url and name == "packages":
        url = _from_pip_config() or _from_uv()
    if not url:
        raise MachineError(f"no address for the index `{name}`", fix="set UV_DEFAULT_INDEX")
    return url


def _pip_config_files() -> list[Path]:
    # pip's documented order, strongest first: $PIP_CONFIG_FILE, environment, user, machine.
    named = os.environ.get("PIP_CONFIG_FILE")
    config_home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
    files = [
        Path(sys.prefix) / "pip.conf",
        config_home / "pip" / "pip.conf",
        Path("~/.pip/pip.conf").expanduser(),
        Path("/etc/pip.conf"),
    ]
    return [Path(named), *files] if named else files


def _from_pip_config() -> str:
    for path in _pip_config_files():
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue  # pip's own complaint about its file is clearer than ours would be
        for section in ("install", "download", "global"):
            value = parser.get(section, "index-url", fallback="").strip()
            if value:
                return value.rstrip("/")
    return ""


def _from_uv() -> str:
    """Ask uv: compiling nothing prints the index it would use (its configuration included)."""
    options = ["--emit-index-url", "--no-header", "--offline", "--quiet"]
    result = subprocess.run(
        [uv_binary(), "pip", "compile", "-", *options, "--python", sys.executable],
        input="",
        capture_output=True,
        text=True,
        check=False,
    )
    for line in result.stdout.splitlines():
        option, _, value = line.partition(" ")
        if option in {"--index-url", "--default-index", "-i"}:
            return value.strip().rstrip("/")
    return ""


class _Links(HTMLParser):
    """Collects the anchors of a PEP 503 page."""

    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.hrefs += [value for key, value in attrs if key == "href" and value]


class SimpleIndex:
    """One index over one session; ``files`` may be called from several threads."""

    def __init__(
        self, url: str, session: requests.Session, policy: RetryPolicy | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._session = session
        self._policy = policy or RetryPolicy()

    def files(self, project: str) -> list[IndexFile]:
        """All files of a project.

        Raises:
            NetworkError: the index cannot be reached or does not know the project.
        """
        page = f"{self.url}/{canonicalize_name(project)}/"
        retrying = Retrying(
            stop=stop_after_attempt(self._policy.attempts),
            wait=self._policy.wait,
            retry=retry_if_exception_type(RetryableError),
        )
        try:
            return retrying(self._get, page)
        except RetryError as error:
            cause = error.last_attempt.exception()
            raise NetworkError(
                f"the package index does not answer for `{project}`: {cause}",
                fix="check the network, the proxy variables and the index address, and run it again",
            ) from cause

    def _get(self, page: str) -> list[IndexFile]:
        try:
            response = self._session.get(
                page, headers={"Accept": _ACCEPT}, timeout=self._policy.timeout
            )
        except requests.exceptions.SSLError as error:
            raise NetworkError(
                f"{http.redact(page)}: {http.explain(error)}",
                fix="set SSL_CERT_FILE to the certificate bundle of your network",
            ) from error
        except requests.exceptions.RequestException as error:
            raise RetryableError(f"{http.redact(page)}: {http.explain(error)}") from error
        http.check_status(response)
        if response.headers.get("Content-Type", "").startswith(_JSON):
            return _from_json(response)
        return _from_html(response)


def _from_json(response: requests.Response) -> list[IndexFile]:
    try:
        return [
            IndexFile(
                filename=entry["filename"],
                url=urljoin(response.url, entry["url"]),
                sha256=entry.get("hashes", {}).get("sha256"),
                size=entry.get("size"),
            )
            for entry in response.json()["files"]
        ]
    except (requests.exceptions.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise RetryableError(f"{http.redact(response.url)}: not a package index page") from error


def _from_html(response: requests.Response) -> list[IndexFile]:
    links = _Links()
    links.feed(response.text)
    found = []
    for href in links.hrefs:
        url, fragment = urldefrag(urljoin(response.url, href))
        algorithm, _, value = fragment.partition("=")
        filename = unquote(urlsplit(url).path.rpartition("/")[2])
        found.append(IndexFile(filename, url, value if algorithm == "sha256" else None))
    return found
