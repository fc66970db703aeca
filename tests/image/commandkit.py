"""Calling `verl-p40 image` in tests, and what its answers are held against."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import registrykit as kit
from docker.errors import ImageNotFound

from verl_p40.errors import ExitCode


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


def log_in(tmp_path: Path, registry: str, password: str) -> None:
    """What `docker login` writes."""
    secret = base64.b64encode(f"{kit.USER}:{password}".encode()).decode()
    (tmp_path / "docker" / "config.json").write_text(
        json.dumps({"auths": {registry: {"auth": secret}}})
    )


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


def io_tar(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
