"""``service.py train|monitor|smoke [arguments]``: check the container, then become the command."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from verl_p40 import __version__
from verl_p40.cli.output import print_error
from verl_p40.data import prepare
from verl_p40.errors import ExitCode, MachineError, UsageError, VerlP40Error
from verl_p40.services import mounts, who
from verl_p40.services.mounts import Mount
from verl_p40.train import catalog, checks
from verl_p40.train.runspec import split_arguments

RUNS: Final = Mount("VERL_P40_RUNS", "runs", "VERL_P40_RUNS")
DATA: Final = Mount("VERL_P40_DATA", "data sets", "VERL_P40_DATA")
MODELS: Final = Mount("VERL_P40_MODELS", "models", "VERL_P40_MODELS")
HOME: Final = Mount("VERL_P40_HOME", "downloads", "VERL_P40_CACHE")
HUB: Final = Mount("HF_HOME", "the Hugging Face cache", "VERL_P40_CACHE")

SMALL_SHM: Final = 1_000_000_000
"""Bytes of /dev/shm below which Ray keeps its objects on the disk (or, with 30 % of the memory
less than that, in what there is): worth a word."""

USAGE: Final = "service.py train|monitor|smoke [arguments]"

_PRESET, _OVERRIDES = "VERL_P40_PRESET", "VERL_P40_OVERRIDES"

Say = Callable[[str], None]


@dataclass
class Start:
    """What the service becomes: ``command`` with ``environ`` on top of the container's."""

    command: list[str]
    environ: dict[str, str] = field(default_factory=dict)


def main(argv: Sequence[str]) -> int:
    """Check and become the command; returns only with an error, as an exit code."""
    try:
        if argv and argv[0] in ("-h", "--help"):
            print(
                f"usage: {USAGE}\n\nExample: docker compose run --rm train service train cpu-demo"
            )
            return ExitCode.OK
        start = ready(argv, _say)
        program = executable()
        os.environ.update(start.environ)
        _say(f"verl-p40 {__version__}: {shlex.join(start.command)}")
        os.execv(program, [program, *start.command])
    except VerlP40Error as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _say(text: str) -> None:
    print(text, flush=True)


def executable() -> str:
    """``verl-p40`` beside this interpreter, or on PATH.

    Raises:
        MachineError: there is none.
    """
    beside = Path(sys.executable).parent / "verl-p40"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("verl-p40")
    if found is None:
        raise MachineError("verl-p40 is not installed beside this Python or on PATH")
    return found


def ready(argv: Sequence[str], say: Say) -> Start:
    """Try everything that a service needs; what it then has to become.

    Raises:
        UsageError: no such service, or a variable that is unset or malformed.
        MachineError, DiskError: a folder that cannot be used, with the remedy.
    """
    service, arguments = (argv[0] if argv else ""), list(argv[1:])
    if service not in _READY:
        raise UsageError(
            f"no service {service!r}" if service else "no service was named", fix=USAGE
        )
    if os.getegid() == 0:
        # What this uid writes into a volume, another uid of group 0 can go on with.
        os.umask(0o002)
    _require_scratch()
    start = _READY[service](arguments, say)
    start.environ = who.additions(os.environ)
    # As a user of Compose types it, where the run says how to go on.
    start.environ["VERL_P40_COMMAND"] = f"docker compose run --rm {service} service"
    return start


def _train(arguments: list[str], say: Say) -> Start:
    words = arguments or default_words(say)
    mounts.require_writable(RUNS)
    mounts.require_writable(HOME)
    mounts.require_writable(HUB)
    _check_models()
    _check_data(words, say)
    _check_shm(say)
    return Start(["train", *words])


def _monitor(arguments: list[str], say: Say) -> Start:
    mounts.require_writable(RUNS)
    return Start(["monitor", *arguments])


def _smoke(arguments: list[str], say: Say) -> Start:
    for mount in (RUNS, HOME, HUB):
        mounts.require_writable(mount)
    _check_shm(say)
    return Start(["smoke", *arguments])


_READY: Final[Mapping[str, Callable[[list[str], Say], Start]]] = {
    "train": _train,
    "monitor": _monitor,
    "smoke": _smoke,
}


def default_words(say: Say) -> list[str]:
    """Preset and overrides from the environment; without a preset the one for this device.

    Raises:
        UsageError: overrides that a shell could not split into words.
    """
    preset = os.environ.get(_PRESET, "").strip()
    if not preset:
        preset = "p40-ppo" if checks.cuda_devices() else "cpu-demo"
        if preset == "cpu-demo":
            say(f"no CUDA device, and {_PRESET} is not set: {preset}")
    text = os.environ.get(_OVERRIDES, "")
    try:
        return [preset, *shlex.split(text)]
    except ValueError as error:
        raise UsageError(
            f"{_OVERRIDES} is {text!r}: {str(error).lower()}",
            fix=f"{_OVERRIDES}=\"data.train_batch_size=16 'data.val_files=[a.parquet,b.parquet]'\"",
        ) from error


def _require_scratch() -> None:
    """/tmp: Ray's sessions, scratch files."""
    folder = Path(os.environ.get("TMPDIR") or "/tmp")
    found = mounts.refusal(folder)
    if found is not None:
        raise mounts.explain(Mount("TMPDIR", "temporary files"), found)


def _check_models() -> None:
    """Models may be read-only, and need not be there; but not unreadable."""
    folder = MODELS.path()
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise MachineError(
            f"cannot read {folder}, the folder of {MODELS.holds}: it belongs to "
            f"{mounts.owner(folder)}, and this service runs as {os.geteuid()}:{os.getegid()}",
            fix=f"on the host: chmod -R a+rX {mounts.source(folder) or folder}",
        )


def _check_data(words: Sequence[str], say: Say) -> None:
    """Data that cannot be written is used as it is, if it is there and whole, or not ours."""
    folder = DATA.path()
    found = mounts.refusal(folder)
    if found is None:
        return
    kind = _kind(words)
    own = any(word.lstrip("+").startswith("data.train_files=") for word in words)
    if kind is None or own or prepare.is_ready(kind):
        reason = "is read-only" if found.read_only else "cannot be written"
        say(f"{folder} {reason}: the data in it is used as it is")
        return
    error = mounts.explain(DATA, found)
    made = f"; the {kind} data is not (whole) in it, and has to be made"
    fix = error.fix
    if found.read_only:
        fix = f"VERL_P40_DATA_MODE=rw in .env, or make it before: verl-p40 data {kind}"
    raise type(error)(error.message + made, fix=fix)


def _kind(words: Sequence[str]) -> str | None:
    """The data set that the preset in ``words`` wants made; None where it makes none."""
    try:
        preset, _ = split_arguments([word for word in words if not word.startswith("--")])
        kind = catalog.load(preset or catalog.DEFAULT_PRESET).about.data
    except VerlP40Error:
        # What is wrong with the words, `verl-p40 train` says better.
        return None
    return None if kind == "none" else kind


def _check_shm(say: Say) -> None:
    shm = Path("/dev/shm")
    found = mounts.refusal(shm)
    if found is not None and not shm.is_dir():
        raise MachineError("there is no /dev/shm, where Ray keeps its objects", fix="shm_size: 2gb")
    size = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
    if found is not None or size < SMALL_SHM:
        say(
            f"/dev/shm has {size / 1e6:.0f} MB: Ray keeps what does not fit on the disk, slowly "
            "(VERL_P40_SHM_SIZE=2gb in .env, or docker run --shm-size=2gb)"
        )
