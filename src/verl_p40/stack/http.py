"""HTTP as this project needs it: certificates, proxies, retries, and errors in one line.

Proxies come from the usual variables (requests reads them). A certificate bundle comes from
``REQUESTS_CA_BUNDLE``, ``CURL_CA_BUNDLE``, ``SSL_CERT_FILE``, ``PIP_CERT`` or the operating
system's own store, in this order, so that a company's certificate works as it does for curl.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import requests
from tenacity import RetryCallState, wait_random_exponential

from verl_p40 import __version__
from verl_p40.errors import NetworkError

RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "PIP_CERT")


@dataclass(frozen=True)
class RetryPolicy:
    """How long to bear with a bad line. Times are seconds.

    ``attempts`` counts failures in a row without a single new byte, so a connection that drops
    every few megabytes still finishes a large file.
    """

    attempts: int = 6
    first_wait: float = 0.5
    longest_wait: float = 20.0
    connect_timeout: float = 15.0
    read_timeout: float = 60.0

    @property
    def timeout(self) -> tuple[float, float]:
        return (self.connect_timeout, self.read_timeout)

    def wait(self, state: RetryCallState) -> float:
        return wait_random_exponential(multiplier=self.first_wait, max=self.longest_wait)(state)


class RetryableError(Exception):
    """A failure that a later attempt may not meet."""


def ca_bundle() -> str | bool:
    """The certificate bundle for ``requests``: a path, or True for the bundled one.

    Raises:
        NetworkError: a variable names a file that does not exist.
    """
    for variable in _CA_VARIABLES:
        value = os.environ.get(variable)
        if value:
            if not Path(value).exists():
                raise NetworkError(
                    f"{variable} names a certificate file that does not exist: {value}",
                    fix=f"correct or unset {variable}",
                )
            return value
    system = ssl.get_default_verify_paths().cafile
    return system if system and Path(system).exists() else True


def session() -> requests.Session:
    """A session with our certificates and a name servers can log."""
    made = requests.Session()
    made.headers["User-Agent"] = f"verl-p40/{__version__}"
    made.verify = ca_bundle()
    return made


def redact(url: str) -> str:
    """``url`` without a user name and password, for messages."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def check_status(response: requests.Response) -> None:
    """Raise for a status that is not success.

    Raises:
        RetryableError: the server asks to come back later, or failed on its own side.
        NetworkError: it will not give this address, now or later.
    """
    status = response.status_code
    if status < 400:
        return
    url = redact(response.url)
    if status in RETRIED_STATUS:
        raise RetryableError(f"HTTP {status} from {url}")
    fixes = {
        401: "check the user name and password in the index address",
        403: "the index refuses this file: ask its owner, or set another index",
        404: "check the index address (UV_DEFAULT_INDEX, PIP_INDEX_URL or pip.conf)",
    }
    raise NetworkError(f"HTTP {status} from {url}", fix=fixes.get(status, ""))


def explain(error: Exception) -> str:
    """The part of a requests error that tells a person something."""
    if isinstance(error, requests.exceptions.SSLError):
        return "the server's certificate is not trusted"
    if isinstance(error, requests.exceptions.ProxyError):
        return "the proxy refused the connection"
    if isinstance(error, requests.exceptions.Timeout):
        return "timed out"
    if isinstance(error, requests.exceptions.ConnectionError):
        return "no connection, or it was cut"
    return " ".join(str(error).split()) or type(error).__name__
