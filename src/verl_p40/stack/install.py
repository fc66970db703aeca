"""Building an environment of the training stack: download, create, install, name, in this order.

Nothing appears under the environment's own name before it is complete: the folder is built as
``.build-<name>`` and renamed. What a killed build left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from verl_p40.errors import DiskError, MachineError
from verl_p40.stack import fetch, lockfile, paths, pins
from verl_p40.stack.fetch import Wanted
from verl_p40.stack.pins import FlavorName
from verl_p40.stack.progress import Report
from verl_p40.stack.record import MARKER, EnvRecord
from verl_p40.stack.uv import uv_binary

TEST_LOCK = "train-test.txt"
INSTALLED_PER_WHEEL_BYTE = 1.9
"""Bytes on disk for a byte of wheel: 6.2 GB from 3.3 GB, measured for the CPU flavor."""


def require_platform() -> None:
    """Refuse what the locks were not made for.

    Raises:
        MachineError: not Linux on x86_64.
    """
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "AMD64"}:
        raise MachineError(
            f"the training stack is for Linux on x86_64, this is {sys.platform} on "
            f"{platform.machine()}",
            fix="use the rest of verl-p40 here, and train on a Linux machine",
        )


def choose_python(flavor: FlavorName, asked: str | None = None) -> str:
    """The Python version (``3.10``) to build a flavor with: ``asked``, ours, or one installed.

    Raises:
        MachineError: none that the flavor supports is on this machine.
    """
    supported = pins.load().flavor[flavor].python
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    candidates = [asked] if asked else [own, *(v for v in supported if v != own)]
    for version in candidates:
        if version in supported and (version == own or _find_python(version)):
            return version
    wanted = asked if asked in supported else " or ".join(supported)
    there = f"Python {own} runs this" + (f", {asked} was asked for" if asked else "")
    raise MachineError(
        f"the {flavor} stack needs Python {wanted}; {there}",
        fix=f"install python{supported[0]} (it must be on PATH) and run it again",
    )


def _find_python(version: str) -> str | None:
    """The path of an installed CPython ``version``, None where there is none."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    found = _uv(["python", "find", "--no-python-downloads", "--no-project", version])
    return found.stdout.strip() if found.returncode == 0 else None


def _uv(arguments: list[str], show: bool = False) -> subprocess.CompletedProcess[str]:
    # A user's UV_* or PIP_* settings (another index, no hashes, ...) are not for these calls.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("UV_", "PIP_"))}
    env.pop("VIRTUAL_ENV", None)
    env.pop("PYTHONPATH", None)
    return subprocess.run(
        [uv_binary(), "--no-config", *arguments],
        env=env,
        text=True,
        check=False,
        stdout=subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
    )


def build(prefix: Path, flavor: FlavorName, python: str, report: Report) -> None:
    """Make the environment at ``prefix``, which must not exist. The caller holds its lock.

    Raises:
        NetworkError, DiskError, MachineError: and nothing is left but finished downloads.
    """
    started = time.monotonic()
    lock_name = pins.load().flavor[flavor].lock
    interpreter = _find_python(python)
    if interpreter is None:
        raise MachineError(f"Python {python} is not installed", fix=f"install python{python}")
    building = prefix.with_name(f".build-{prefix.name}")
    _remove(building)
    report.say(f"training stack ({flavor}, Python {python}): looking up {lock_name}")
    wanted = fetch.resolve(lock_name, python, flavor)
    installed = int(sum(item.size for item in wanted) * INSTALLED_PER_WHEEL_BYTE)
    _check_disks(prefix.parent, fetch.bytes_missing(wanted), installed)
    todo = fetch.missing(wanted)
    if todo:
        gigabytes = fetch.bytes_missing(wanted) / 1e9
        report.say(f"downloading {len(todo)} of {len(wanted)} packages, {gigabytes:.2f} GB to go")
    fetch.fetch_lock(wanted, report)
    try:
        report.say(f"installing {len(wanted)} packages, about {installed / 1e9:.1f} GB")
        _succeed(_uv(["venv", "--quiet", "--relocatable", "--python", interpreter, str(building)]))
        _install(building, lock_name, wanted)
        record = EnvRecord(
            flavor=flavor,
            python=python,
            lock_digest=lockfile.digest(lockfile.lock_path(lock_name)),
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            bytes_on_disk=disk_usage(building),
        )
        write_record(building, record)
        building.rename(prefix)
    finally:
        _remove(building)
    size = record.bytes_on_disk / 1e9
    report.say(f"installed in {time.monotonic() - started:.0f} s, {size:.1f} GB: {prefix}")


def add_tests(prefix: Path, record: EnvRecord, report: Report) -> EnvRecord:
    """Install ``train-test.txt`` into a finished environment; the caller holds its lock."""
    report.say("adding the test tools to the training stack")
    wanted = fetch.resolve(TEST_LOCK, record.python)
    fetch.fetch_lock(wanted, report)
    _install(prefix, TEST_LOCK, wanted)
    lock = lockfile.lock_path(TEST_LOCK)
    updated = record.model_copy(update={"test_digest": lockfile.digest(lock)})
    write_record(prefix, updated)
    return updated


def write_record(prefix: Path, record: EnvRecord) -> None:
    """Write ``verl-p40-env.json``, whole or not at all."""
    fresh = prefix / f"{MARKER}.new"
    fresh.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    fresh.replace(prefix / MARKER)


def _check_disks(env_home: Path, downloads: int, installed: int) -> None:
    cache_home = paths.cache_home()
    if _device(env_home) == _device(cache_home):
        fetch.check_disk(env_home, downloads + installed, "the training stack")
        return
    fetch.check_disk(env_home, installed, "the training stack")
    fetch.check_disk(cache_home, downloads, "downloading the training stack")


def _device(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return folder.stat().st_dev


def _install(prefix: Path, lock_name: str, wanted: list[Wanted]) -> None:
    """Install a lock from the cache, offline, every file checked by hash.

    uv unpacks wheels into a cache of its own and links from there. That cache lives beside the
    environment for the length of the install: links stay links (no second copy), and patching
    verl later cannot reach into a cache that other environments share.
    """
    work = prefix.with_name(f".install-{prefix.name}")
    _remove(work)
    try:
        wheelhouse = work / "wheelhouse"
        wheelhouse.mkdir(parents=True)
        for item in wanted:
            (wheelhouse / item.filename).symlink_to(item.path.resolve())
        common = ["pip", "install", "--python", str(prefix / "bin" / "python")]
        common += ["--offline", "--no-index", "--find-links", str(wheelhouse)]
        common += ["--cache-dir", str(work / "uv"), "--require-hashes", "--no-deps"]
        common += ["--no-build-isolation"]
        lock = lockfile.lock_path(lock_name)
        if builder := _lines_of(lock, {"setuptools"}):
            # The packages without a wheel are built here, with the locked setuptools.
            first = work / "build.txt"
            first.write_text(builder, encoding="utf-8")
            _succeed(_uv([*common, "--quiet", "-r", str(first)]))
        show = sys.stderr.isatty()
        options = [] if show else ["--quiet"]
        _succeed(_uv([*common, *options, "-r", str(lock)], show=show))
    finally:
        _remove(work)


def _lines_of(lock: Path, names: set[str]) -> str:
    chosen = [line for line in lockfile.parse(lock) if line.name in names]
    return "".join(
        f"{line.requirement} {' '.join(f'--hash=sha256:{h}' for h in sorted(line.hashes))}\n"
        for line in chosen
    )


def _succeed(result: subprocess.CompletedProcess[str]) -> None:
    if result.returncode == 0:
        return
    words = " ".join((result.stderr or "see above").split())
    if "No space left" in words:
        raise DiskError(f"the disk filled up: {words}", fix="free some space, run it again")
    raise MachineError(f"uv could not install the training stack: {words}")


def disk_usage(folder: Path) -> int:
    """Bytes a folder takes, files with several names counted once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                status = Path(root, name).lstat()
                key = (status.st_dev, status.st_ino)
                if key not in seen:
                    seen.add(key)
                    total += status.st_blocks * 512
    return total


def prune(wanted: list[Wanted]) -> int:
    """Delete downloads from the cache; returns the bytes freed."""
    freed = 0
    for item in wanted:
        if item.path.exists():
            freed += item.path.stat().st_size
            shutil.rmtree(item.path.parent)
    return freed


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def leftovers(home: Path) -> list[Path]:
    """Folders of builds that were killed; a build that is running has one too."""
    return sorted([*home.glob(".build-*"), *home.glob(".install-*")])


def remove(prefix: Path) -> None:
    """Delete an environment; it stops being one before the first file goes."""
    (prefix / MARKER).unlink(missing_ok=True)
    _remove(prefix)
    _remove(prefix.with_name(f".build-{prefix.name}"))
    _remove(prefix.with_name(f".install-{prefix.name}"))
