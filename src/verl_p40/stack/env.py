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

from verl_p40.errors import MachineError, TreeError
from verl_p40.patches.marker import read_marker
from verl_p40.patches.queue import Queue, load_queue
from verl_p40.patches.tree import apply_queue, tree_state
from verl_p40.stack import install, lockfile, paths, pins
from verl_p40.stack.hold import exclusive
from verl_p40.stack.pins import FlavorName
from verl_p40.stack.progress import Report, Silent
from verl_p40.stack.record import MARKER, EnvRecord

_NOT_INHERITED = frozenset(
    # The last is for a user's own sources. The stack's 20,000 files would be compiled again by
    # every process: 13 of the 19 s of CPU that importing verl's trainer takes then.
    {"PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
)


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

    @property
    def has_tests(self) -> bool:
        """Whether the test tools of today's ``train-test.txt`` are installed."""
        lock = lockfile.lock_path(install.TEST_LOCK)
        return self.record.test_digest == lockfile.digest(lock)

    def environ(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The process environment to run with: ours, minus what would point Python elsewhere."""
        env = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
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


def ensure(
    flavor: FlavorName = "cpu",
    *,
    python: str | None = None,
    with_test: bool = False,
    report: Report | None = None,
) -> StackEnv:
    """The environment of a flavor, installed and patched first where that is not so yet.

    An adopted environment (see :func:`adopted`) is used whatever its flavor. Two processes may
    call this at once: the second waits for the first. When all is in place, nothing is written.

    Args:
        flavor: the variant of the stack.
        python: ``3.10`` or ``3.11``; by default that of this process where the flavor has it.
        with_test: with pytest, for tests that run inside the environment.
        report: told what happens.

    Raises:
        MachineError, NetworkError, DiskError: it cannot be installed here.
        TreeError: verl in there is neither the pinned release nor patched by us.
    """
    report = report or Silent()
    found = adopted()
    prefix = found.prefix if found else None
    if prefix is None:
        install.require_platform()
        python = install.choose_python(flavor, python)
        prefix = prefix_for(flavor, python)
        found = read_env(prefix)
    queue = load_queue()
    if found and _is_patched(found, queue) and (found.has_tests or not with_test):
        return found
    if found is None:
        assert python is not None
        prefix.parent.mkdir(parents=True, exist_ok=True)

    def waiting() -> None:
        report.say("another process is installing the training stack: waiting for it")

    with exclusive(lock_file(prefix), waiting):
        found = read_env(prefix)
        if found is None:
            assert python is not None
            if prefix.exists():
                install.remove(prefix)
            install.build(prefix, flavor, python, report)
            found = _built(prefix)
        if not _is_patched(found, queue):
            done = apply_queue(found.site_packages, queue)
            report.say(f"verl {queue.version}: {len(done.patches)} patches applied")
        if with_test and not found.has_tests:
            install.add_tests(prefix, found.record, report)
            found = _built(prefix)
    return found


def lock_file(prefix: Path) -> Path:
    """What a process holds while it changes the environment at ``prefix``."""
    return prefix.with_name(f".{prefix.name}.lock")


def _built(prefix: Path) -> StackEnv:
    found = read_env(prefix)
    if found is None:
        raise MachineError(f"{prefix} was built but its Python does not start")
    return found


def _is_patched(env: StackEnv, queue: Queue) -> bool:
    """Whether the whole of today's queue is applied, by the note that applying it left.

    Cheap on purpose: `verl-p40 stack status` compares every file.
    """
    marker = read_marker(env.site_packages / queue.project)
    every = tuple(patch.path for patch in queue.patches)
    return marker is not None and (marker.digest, marker.patches) == (queue.digest, every)


def state(env: StackEnv) -> str:
    """Whether verl in an environment is as it should be, every file compared: one line."""
    try:
        return tree_state(env.site_packages).describe()
    except TreeError as error:
        return error.message


def installed() -> list[StackEnv]:
    """Every finished environment under ``env_home``, by name."""
    home = paths.env_home()
    folders = sorted(home.iterdir()) if home.is_dir() else []
    return [env for folder in folders if (env := read_env(folder)) is not None]


def is_current(env: StackEnv) -> bool:
    """Whether an environment was built from today's lock."""
    lock = lockfile.lock_path(pins.load().flavor[env.flavor].lock)
    return env.lock_digest == lockfile.digest(lock)
