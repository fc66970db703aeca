from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runkit import PROGRAM, Start


@pytest.fixture
def start_run() -> Iterator[Start]:
    """Start a pretended run in a folder; returns once it holds it. It is ended with the test.

    ``prefix`` is a command before it: ``unshare --pid ...``.
    """
    running: list[subprocess.Popen[str]] = []

    def start(
        folder: Path, children: int = 2, *, prefix: tuple[str, ...] = ()
    ) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [*prefix, sys.executable, str(PROGRAM), str(folder), str(children)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(child)
        assert child.stdout is not None
        said = child.stdout.readline()
        if not said and prefix:
            pytest.skip(f"{prefix[0]} is not permitted here")
        assert int(said) > 0
        return child

    yield start
    for child in running:
        # With it its children, which are in its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
