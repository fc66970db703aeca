"""The Docker Engine that the docker command would use, and its complaints as our errors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from verl_p40.errors import MachineError
from verl_p40.image.names import Reference
from verl_p40.image.problems import explain, no_engine

if TYPE_CHECKING:
    from docker import DockerClient

ANSWER = 20
"""Seconds an engine has for its first answer."""
QUIET = 900
"""Seconds an engine may say nothing while it works (a push of a big layer to a slow registry)."""
DEFAULT_HOST = "unix:///var/run/docker.sock"


@contextmanager
def connect() -> Iterator[DockerClient]:
    """The engine of ``DOCKER_HOST``, else of the docker command's current context.

    Raises:
        MachineError: there is none, or it may not be used.
    """
    import docker
    import requests
    from docker.errors import DockerException

    settings = _context()
    host = os.environ.get("DOCKER_HOST") or settings.get("base_url") or DEFAULT_HOST
    over_ssh = host.startswith("ssh://")  # through the ssh command, as the docker command does
    try:
        if settings:
            client = docker.DockerClient(timeout=ANSWER, use_ssh_client=over_ssh, **settings)
        else:
            client = docker.from_env(timeout=ANSWER, use_ssh_client=over_ssh)
        client.ping()
    except (DockerException, requests.RequestException, OSError) as error:
        raise no_engine(error, host) from error
    client.api.timeout = QUIET
    try:
        yield client
    finally:
        client.close()


def _context() -> dict[str, Any]:
    """Host and TLS of the docker command's context, empty for the default one.

    ``docker.from_env`` of docker-py 7.1 knows ``DOCKER_HOST`` only; rootless Docker and Docker
    Desktop make a context instead.
    """
    from docker.context import ContextAPI
    from docker.context.config import get_current_context_name

    if os.environ.get("DOCKER_HOST"):
        return {}
    name = os.environ.get("DOCKER_CONTEXT") or get_current_context_name()
    if name == "default":
        return {}
    context = ContextAPI.get_context(name)
    if context is None or not context.Host:
        raise MachineError(
            f"the docker context `{name}` does not exist",
            fix="docker context ls shows those that do; DOCKER_CONTEXT or docker context use picks",
        )
    settings = {"base_url": context.Host}
    if context.TLSConfig is not None:
        settings["tls"] = context.TLSConfig
    return settings


@contextmanager
def asking(image: Reference | str = "") -> Iterator[None]:
    """Turn docker-py's exceptions into ours, about ``image``."""
    import requests
    from docker.credentials.errors import StoreError
    from docker.errors import APIError, DockerException

    try:
        with warnings.catch_warnings():
            # docker-py warns that a credential helper is missing, and then raises that.
            warnings.filterwarnings("ignore", message="docker-credential-")
            yield
    except APIError as error:
        raise explain(str(error.explanation or error), image) from error
    except (DockerException, StoreError) as error:
        if "credential" in str(error).lower() or "docker-credential" in str(error):
            raise MachineError(
                f"the credential helper of the docker configuration fails: {error}",
                fix="install it, or take `credsStore`/`credHelpers` out of ~/.docker/config.json",
            ) from error
        raise explain(str(error), image) from error
    except requests.exceptions.Timeout as error:
        raise MachineError(
            f"the Docker Engine said nothing for {QUIET // 60} minutes", fix="look at its log"
        ) from error
    except requests.RequestException as error:
        raise MachineError(
            f"the connection to the Docker Engine broke: {error}",
            fix="was it stopped? sudo systemctl status docker",
        ) from error
