"""The environment of the training stack: finding it, making sure of it, running things in it.

An environment is a folder ``<env_home>/<flavor>-py3XX-<lock digest>/``. Its last-written file,
``verl-p40-env.json``, says what it was built from: no such file, no environment. The same file
marks an image's interpreter as a stack environment of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from verl_p40.errors import MachineError
from verl_p40.stack import lockfile, paths, pins
from verl_p40.stack.pins import FlavorName
from verl_p40.stack.record import MARKER, EnvRecord


@dataclass(frozen=True)
class StackEnv:
    """A ready environment: the pinned training stack with verl patched."""

    prefix: Path
    python: Path
    record: EnvRecord

    @property
    def flavor(self) -> FlavorName:
        return self.record.flavor

    @property
    def lock_digest(self) -> str:
        return self.record.lock_digest

    @property
    def pythonpath(self) -> Path:
        """The folder that makes ``import verl_p40`` work inside the environment."""
        return paths.package_dir().parent

    @property
    def site_packages(self) -> Path:
        """Where ``verl/`` is: the root that the patch queue's paths are relative to."""
        return self.prefix / "lib" / f"python{self.record.python}" / "site-packages"

    def environ(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The process environment to run with: ours, minus what would point Python elsewhere."""
        env = {k: v for k, v in os.environ.items() if k not in {"PYTHONHOME", "VIRTUAL_ENV"}}
        inherited = [p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]
        own = str(self.pythonpath)
        env["PYTHONPATH"] = os.pathsep.join([own, *(p for p in inherited if p != own)])
        env["PATH"] = os.pathsep.join([str(self.prefix / "bin"), env.get("PATH", os.defpath)])
        env["VERL_P40_ENV"] = str(self.prefix)
        env["VIRTUAL_ENV"] = str(self.prefix)
        env.update(extra or {})
        return env

    def command(self, module: str, args: Sequence[str] = ()) -> list[str]:
        """The command line that runs ``python -m module args...`` in the environment."""
        return [str(self.python), "-m", module, *args]

    def run_module(
        self,
        module: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        check: bool = False,
        capture: bool = False,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a module to its end; ``env`` is added to :meth:`environ`, ``timeout`` is seconds.

        Raises:
            subprocess.CalledProcessError: only with ``check``, on a non-zero exit code.
            subprocess.TimeoutExpired: after ``timeout``.
        """
        return subprocess.run(
            self.command(module, args),
            env=self.environ(env),
            cwd=cwd,
            check=check,
            text=True,
            capture_output=capture,
            timeout=timeout,
        )

    def popen_module(
        self,
        module: str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        start_new_session: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a module and return at once; line-buffered text pipes where asked for."""
        return subprocess.Popen(
            self.command(module, args),
            env=self.environ(env),
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            bufsize=1,
            start_new_session=start_new_session,
        )


def read_env(prefix: Path) -> StackEnv | None:
    """The environment at ``prefix``, or None where there is no finished one."""
    try:
        text = (prefix / MARKER).read_text(encoding="utf-8")
        record = EnvRecord.model_validate_json(text)
    except (OSError, ValidationError):
        return None
    python = prefix / "bin" / "python"
    return StackEnv(prefix, python, record) if python.exists() else None


def adopted() -> StackEnv | None:
    """The environment this process must use: $VERL_P40_ENV, or the one it runs in (the image).

    Raises:
        MachineError: $VERL_P40_ENV names a folder that is not a finished environment.
    """
    named = os.environ.get("VERL_P40_ENV")
    if named:
        found = read_env(Path(named))
        if found is None:
            raise MachineError(
                f"VERL_P40_ENV={named} is not a verl-p40 environment (no {MARKER} in it)",
                fix="unset VERL_P40_ENV, or run `verl-p40 stack install`",
            )
        return found
    return read_env(Path(sys.prefix))


def prefix_for(flavor: FlavorName, python: str) -> Path:
    """Where the environment of a flavor and a Python (``3.10``) is, built or not."""
    lock = lockfile.lock_path(pins.load().flavor[flavor].lock)
    name = f"{flavor}-py{python.replace('.', '')}-{lockfile.digest(lock)[:12]}"
    return paths.env_home() / name
