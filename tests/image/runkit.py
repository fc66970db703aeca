"""What a container prints, to its last byte."""

from __future__ import annotations

from typing import Any

import docker
from docker.errors import ContainerError


def output(
    engine: docker.DockerClient, image: str, words: list[str] | None = None, **options: Any
) -> bytes:
    """Standard output of a command that ends by itself.

    docker-py's own ``run`` follows the log from the start, and the engine may end that stream before
    a container that ran for a moment has been read: here the log is read when it has ended.

    Raises:
        ContainerError: the command failed.
    """
    container = engine.containers.create(image, words, **options)
    try:
        container.start()
        code = container.wait()["StatusCode"]
        if code:
            raise ContainerError(
                container, code, words, image, container.logs(stdout=False, stderr=True)
            )
        return bytes(container.logs(stdout=True, stderr=False))
    finally:
        container.remove(force=True)
