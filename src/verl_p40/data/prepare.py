"""Making sure that a preset's data is there: the light side of ``verl-p40 data``.

Imports nothing of the training stack; what needs it runs in the stack environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from verl_p40.data import child, folder
from verl_p40.data.child import Progress
from verl_p40.data.demo_assets import recipe as demo_recipe
from verl_p40.errors import MachineError, UsageError
from verl_p40.stack import paths

if TYPE_CHECKING:
    from verl_p40.stack.env import StackEnv

Kind = Literal["demo", "gsm8k"]
KINDS: Final[tuple[Kind, ...]] = ("demo", "gsm8k")

DEFAULT_SEED: Final = 1


@dataclass(frozen=True)
class Prepared:
    """What is ready to train with. ``model`` is the demo's model folder, None for GSM8K."""

    folder: Path
    train: Path
    test: Path
    model: Path | None
    reused: bool
    facts: Mapping[str, Any]
    """What was measured when it was made: rows, and the demo model's greedy accuracy."""

    def as_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "train": str(self.train),
            "test": str(self.test),
            "model": str(self.model) if self.model else None,
            "reused": self.reused,
            **self.facts,
        }


def default_folder(kind: str) -> Path:
    """``data/demo`` or ``data/gsm8k`` (``VERL_P40_DATA``): where the presets look."""
    return paths.data_home() / kind


def ensure(kind: str, *, stack_env: StackEnv, progress: Progress | None = None) -> Prepared:
    """Make the data of a preset unless it is there: ``demo`` or ``gsm8k``, at its default place.

    A demo of any seed and a GSM8K from any source are reused; a missing GSM8K is downloaded.

    Raises:
        UsageError: an unknown kind.
        VerlP40Error: it cannot be made (no network, no space, ...).
    """
    if kind not in KINDS:
        raise UsageError(f"unknown data set {kind!r}", fix=f"one of: {', '.join(KINDS)}")
    ready = _ready(kind)
    if ready is not None:
        return ready
    make = demo if kind == "demo" else gsm8k
    return make(stack_env=stack_env, progress=progress)


def is_ready(kind: str) -> bool:
    """Whether the data of a preset is at its default place, every file whole."""
    return _ready(kind) is not None


def _ready(kind: str) -> Prepared | None:
    out = default_folder(kind)
    found = folder.read(out)
    if found is not None and _serves(kind, found) and folder.is_whole(out, found):
        return _prepared(out, found, True)
    return None


def _serves(kind: str, found: folder.Record) -> bool:
    """Whether a preset can train on it: the demo of any seed, GSM8K from any source."""
    if found.kind != kind:
        return False
    seed = found.recipe.get("seed")
    return kind != "demo" or (isinstance(seed, int) and found.recipe == demo_recipe(seed))


def demo(
    *,
    stack_env: StackEnv,
    out: Path | None = None,
    seed: int = DEFAULT_SEED,
    force: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Make the arithmetic problems and the warm-started model of ``seed``, or reuse them.

    Raises:
        DataError: ``out`` is someone else's folder, or the warm start failed.
        DiskError: the disk is full.
    """
    recipe = demo_recipe(seed)
    out = out or default_folder("demo")
    return _make(
        "demo", recipe, out, "verl_p40.data.demo_assets", [str(seed)], stack_env, force, progress
    )


def gsm8k(
    *,
    stack_env: StackEnv,
    out: Path | None = None,
    local: Path | None = None,
    source: str = "hf",
    any_count: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Prepared:
    """Make verl's parquet of GSM8K from a local copy or a hub, or reuse it.

    Raises:
        DataError: the copy is missing, incomplete or malformed (file, row, column).
        NetworkError: the hub cannot be reached.
        DiskError: the disk is full.
    """
    recipe: dict[str, Any] = {"version": 1, "any_count": any_count}
    args = ["--any-count"] if any_count else []
    if local is not None:
        local = local.expanduser().absolute()
        recipe.update(source="local", local=str(local), files=_fingerprint(local))
        args += ["--local", str(local)]
    else:
        recipe.update(source=source)
        args += ["--source", source]
    out = out or default_folder("gsm8k")
    return _make("gsm8k", recipe, out, "verl_p40.data.gsm8k", args, stack_env, force, progress)


def _fingerprint(local: Path) -> dict[str, list[int]]:
    """Size and modification time of a copy's files: a changed copy is converted again."""
    if not local.is_dir():
        return {}
    return {
        path.relative_to(local).as_posix(): [path.stat().st_size, path.stat().st_mtime_ns]
        for path in sorted(local.rglob("*"))
        if path.is_file()
    }


def _make(
    kind: Kind,
    recipe: Mapping[str, Any],
    out: Path,
    module: str,
    args: list[str],
    stack_env: StackEnv,
    force: bool,
    progress: Progress | None,
) -> Prepared:
    progress = progress or child.silent
    wanted = folder.digest(recipe)
    # An image's data folder may be read-only and already filled: that needs no lock to be used.
    existing = folder.read(out)
    if (
        existing is not None
        and not force
        and existing.digest == wanted
        and not os.access(out.parent, os.W_OK)
        and folder.is_whole(out, existing)
    ):
        return _prepared(out, existing, True)
    if out.parent.is_dir() and not os.access(out.parent, os.W_OK | os.X_OK):
        raise MachineError(
            f"the {kind} data is not (whole) in {out.parent}, which cannot be written",
            fix="make the folder writable, or set VERL_P40_DATA to another",
        )
    record, reused = folder.make(
        out,
        kind,
        recipe,
        lambda fresh: child.call(stack_env, module, [str(fresh), *args], progress),
        reuse=lambda found: not force and found.digest == wanted,
        on_wait=lambda: progress(f"another process is preparing {out}: waiting for it", None),
    )
    return _prepared(out, record, reused)


def _prepared(out: Path, record: folder.Record, reused: bool) -> Prepared:
    out = out.absolute()
    return Prepared(
        folder=out,
        train=out / "train.parquet",
        test=out / "test.parquet",
        model=out / "model" if record.kind == "demo" else None,
        reused=reused,
        facts=record.facts,
    )
