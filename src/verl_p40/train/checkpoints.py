"""Which checkpoint a run can go on from, told apart from a half-written one without torch."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file that names the checkpoint a resumed run loads."""

_STEP = re.compile(r"global_step_(\d+)")
_SHARD = re.compile(r"(?P<what>model|optim|extra_state)_world_size_(?P<size>\d+)_rank_\d+\.pt")


def steps(folder: Path) -> list[int]:
    """Steps that have a checkpoint folder, whole or not, ascending."""
    if not folder.is_dir():
        return []
    found = (_STEP.fullmatch(p.name) for p in folder.iterdir() if p.is_dir())
    return sorted(int(m.group(1)) for m in found if m)


def tracked(folder: Path) -> int | None:
    """The step in verl's tracker file; None where it is missing or damaged."""
    try:
        return int((folder / TRACKER).read_text())
    except (OSError, ValueError):
        return None


def is_whole(checkpoint: Path, *, critic: bool) -> bool:
    """True when every file that a resume reads was written to its end.

    torch.save writes a zip archive whose directory comes last, so a cut-off file is no zip.
    verl writes ``data.pt`` after every shard.
    """
    models = ["actor", "critic"] if critic else ["actor"]
    return _whole_file(checkpoint / "data.pt") and all(
        _whole_shards(checkpoint / name) for name in models
    )


def _whole_shards(folder: Path) -> bool:
    counts: dict[tuple[str, int], int] = {}
    for path in folder.glob("*.pt"):
        match = _SHARD.fullmatch(path.name)
        if match is None:
            continue
        if not _whole_file(path):
            return False
        key = match["what"], int(match["size"])
        counts[key] = counts.get(key, 0) + 1
    has_model = any(what == "model" for what, _ in counts)
    return has_model and all(count == size for (_, size), count in counts.items())


def _whole_file(path: Path) -> bool:
    return path.is_file() and zipfile.is_zipfile(path)


def newest(folder: Path, *, critic: bool) -> int | None:
    """The newest whole checkpoint, or None."""
    for step in reversed(steps(folder)):
        if is_whole(folder / f"global_step_{step}", critic=critic):
            return step
    return None


def prepare_resume(folder: Path, step: int | None, *, keep: int | None) -> list[int]:
    """Make verl load ``step``: its tracker says so, and what would mislead it is gone.

    Later folders are half-written ones. Earlier ones than the ``keep`` newest (None keeps all)
    are leftovers: verl deletes only those that its own process wrote.

    Returns:
        The steps whose folders were removed.
    """
    tracker = folder / TRACKER
    if step is None:
        tracker.unlink(missing_ok=True)
        doomed = steps(folder)
    else:
        if tracked(folder) != step:
            temporary = tracker.with_name(tracker.name + ".tmp")
            temporary.write_text(str(step))
            temporary.replace(tracker)
        present = steps(folder)
        older = [s for s in present if s <= step]
        doomed = [s for s in present if s > step]
        if keep:
            doomed = older[:-keep] + doomed
    for old in doomed:
        shutil.rmtree(folder / f"global_step_{old}", ignore_errors=True)
    return doomed


def remove_husks(folder: Path) -> None:
    """Remove what verl leaves of a checkpoint that it deleted: a folder with ``data.pt`` alone."""
    latest = tracked(folder)
    for step in steps(folder):
        checkpoint = folder / f"global_step_{step}"
        if latest is not None and step < latest and not any(checkpoint.glob("*/*")):
            shutil.rmtree(checkpoint, ignore_errors=True)
