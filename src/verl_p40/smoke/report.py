"""The report file: what was checked on what, in a form that can be attached to an issue."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from verl_p40 import __version__
from verl_p40.errors import DiskError, MachineError, VerlP40Error
from verl_p40.smoke.gpu import Seen
from verl_p40.smoke.model import Device, Result
from verl_p40.smoke.privacy import Identity, Scrubber
from verl_p40.stack import paths
from verl_p40.stack.env import StackEnv
from verl_p40.train.envinfo import cpu_name
from verl_p40.train.folder import write_whole

SCHEMA_VERSION = 1
"""Raised when a field of the report changes its meaning or goes; see docs/smoke.md."""

_PACKAGES = (
    *("verl", "torch", "triton", "transformers", "tokenizers", "ray", "tensordict", "numpy"),
    *("vllm", "xformers", "nvidia-ml-py"),
)


def default_path(now: datetime) -> Path:
    """``<runs>/smoke/smoke-<UTC time>.json``."""
    return paths.runs_home() / "smoke" / f"smoke-{now.strftime('%Y%m%dT%H%M%SZ')}.json"


def reserve(path: Path) -> None:
    """Make sure that the report can be written, before minutes are spent on it.

    Raises:
        MachineError: the folder cannot be made or written.
        DiskError: its disk is full.
    """
    if path.is_dir():
        raise MachineError(f"the report {path} is a folder", fix="give a file with --report")
    probe = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # As much as a report takes: a full disk often still has room for an empty file.
        probe.write_bytes(b" " * 65536)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        _remove(probe)


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write the report, whole or not at all.

    Raises:
        MachineError, DiskError: as :func:`reserve`.
    """
    try:
        write_whole(path, json.dumps(document, indent=2, default=str) + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _unwritable(path: Path, error: OSError) -> VerlP40Error:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(
            f"cannot write the report {path}: the disk is full",
            fix="free some space, or choose another place with --report",
        )
    reason = error.strerror or str(error)
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        reason = "a part of its path is a file, not a folder"
    return MachineError(
        f"cannot write the report {path}: {reason}",
        fix="choose another place with --report FILE, or set VERL_P40_RUNS",
    )


def build(
    results: Sequence[Result],
    *,
    device: Device,
    stack: StackEnv,
    seen: Seen,
    started: datetime,
    seconds: float,
    scrubber: Scrubber,
) -> dict[str, Any]:
    """The whole report, scrubbed. Its fields are described in docs/smoke.md."""
    verdicts: list[str] = [result.verdict for result in results]
    document = {
        "schema_version": SCHEMA_VERSION,
        "tool": "verl-p40 smoke",
        "verl_p40": __version__,
        "started": started.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seconds": round(seconds, 1),
        "verdict": "failed" if "failed" in verdicts else "ok",
        "counts": {verdict: verdicts.count(verdict) for verdict in ("ok", "skipped", "failed")},
        "device": device,
        "machine": _machine(seen),
        "stack": _stack(stack, results),
        "checks": [_entry(result) for result in results],
    }
    scrubbed: dict[str, Any] = scrubber.document(document)
    return scrubbed


def _entry(result: Result) -> dict[str, Any]:
    return {
        "name": result.check.name,
        "what": result.check.what,
        "verdict": result.verdict,
        "text": result.text,
        "seconds": round(result.seconds, 2),
        "shows": result.category,
        "details": dict(result.details),
        "output": list(result.output),
    }


def _machine(seen: Seen) -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_mib": psutil.virtual_memory().total // 2**20,
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        "driver": seen.driver,
        "gpus": [card.public() for card in seen.gpus],
    }


def _stack(stack: StackEnv, results: Sequence[Result]) -> dict[str, Any]:
    digests = [r.details.get("digest") for r in results if r.check.name == "patches"]
    return {
        "flavor": stack.flavor,
        "python": stack.record.python,
        "lock_digest": stack.lock_digest,
        "patch_digest": digests[0] if digests else None,
        "versions": _versions(stack.site_packages),
    }


def _versions(site_packages: Path) -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        for distribution in importlib.metadata.distributions(name=name, path=[str(site_packages)]):
            found[name] = distribution.version
    return found


def scrubber(stack: StackEnv, scratch: Path) -> Scrubber:
    """Knows this machine's names and folders."""
    home = Path("~").expanduser()
    folders = {
        "scratch": scratch,
        "stack": stack.prefix,
        "verl-p40": paths.package_dir().parent.parent,
        "runs": paths.runs_home(),
        "data": paths.data_home(),
        "cwd": Path.cwd(),
    }
    if home != Path("/"):
        folders["home"] = home
    return Scrubber(Identity.of_this_machine(folders))
