"""Runs without a trainer, started and ended by tests."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

PROGRAM = Path(__file__).with_name("pretend_run.py")
Start = Callable[..., "subprocess.Popen[str]"]


def end(child: subprocess.Popen[str]) -> None:
    """End a pretended run in order."""
    child.send_signal(signal.SIGTERM)
    child.wait(timeout=10)
