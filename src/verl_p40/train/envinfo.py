"""``env.json``: on what, with what and by which command a run was made."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from verl_p40 import __version__
from verl_p40.stack import clone, paths
from verl_p40.stack.env import StackEnv


def collect(
    *,
    preset: str,
    overrides: Sequence[str],
    digest: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    stack: StackEnv,
    patch_digest: str,
    versions: Mapping[str, str],
    ray_tmp: Path,
) -> dict[str, Any]:
    """Everything a report needs to say how a run came about. No secret: only what we set."""
    return {
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "verl_p40": __version__,
        "git_commit": clone.revision(paths.package_dir().parent.parent),
        "preset": preset,
        "overrides": list(overrides),
        "config_digest": digest,
        "argv": sys.argv,
        "command": list(command),
        "environ": dict(environ),
        "cwd": str(Path.cwd()),
        "stack": {
            "prefix": str(stack.prefix),
            "flavor": stack.flavor,
            "lock_digest": stack.lock_digest,
            "python": stack.record.python,
        },
        "patch_digest": patch_digest,
        "versions": dict(versions),
        "machine": {
            "system": platform.platform(),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": _gpus(),
        },
        "supervisor_pid": os.getpid(),
        "ray_tmp": str(ray_tmp),
    }


def cpu_name() -> str:
    """The processor's model as Linux names it, else the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU, as nvidia-smi gives them."""
    out = _output(
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    )
    return out.splitlines() if out else []


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
