"""Which checkpoint a run can go on from, told apart without torch from what must not be loaded."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_p40.train.checks import uses_critic
from verl_p40.train.compose import select

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file that names the checkpoint a resumed run loads."""
PARTIAL = ".partial"
"""What the name of a checkpoint that is being written ends with (the patch atomic-checkpoint)."""
ASIDE = ".set-aside"
"""What the name of a whole checkpoint that does not fit the run is made to end with."""

_STEP = re.compile(r"global_step_(\d+)")
_SHARD = re.compile(r"(?P<what>model|optim|extra_state)_world_size_(?P<size>\d+)_rank_\d+\.pt")
_FILES = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""verl's word in ``checkpoint.load_contents``, and what the name of its file begins with."""
_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
"""Keys of a Hugging Face config that weights of another model differ in."""


@dataclass(frozen=True)
class Expected:
    """What a run's checkpoints have to be.

    ``contents`` of each model are the kinds of files that verl reads; ``models`` the config.json
    of each model, where it is at hand; ``world`` the number of shards, 0 where any number goes.
    """

    contents: Mapping[str, tuple[str, ...]]
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    world: int = 0
    versions: Mapping[str, int] = field(default_factory=dict)
    """FSDP's version of each model: 1 (``strategy=fsdp``) or 2."""


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that is not loaded. ``half``: it was never written to its end."""

    step: int
    problem: str
    half: bool


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that can be loaded (None: none), and the newer ones that cannot."""

    step: int | None
    skipped: tuple[Skipped, ...] = ()


def expected(config: Mapping[str, Any]) -> Expected:
    """What the checkpoints of a run with this config have to be."""
    sections = {"actor": "actor_rollout_ref.actor"}
    paths = {"actor": "actor_rollout_ref.model.path", "critic": "critic.model.path"}
    if uses_critic(config):
        sections["critic"] = "critic"
    contents, models, versions = {}, {}, {}
    for name, section in sections.items():
        words = select(config, f"{section}.checkpoint.load_contents") or list(_FILES)
        contents[name] = tuple(_FILES[word] for word in words if word in _FILES)
        described = _read(Path(str(select(config, paths[name]))) / "config.json")
        if described:
            models[name] = described
        versions[name] = 2 if select(config, f"{section}.strategy") == "fsdp2" else 1
    world = int(select(config, "trainer.n_gpus_per_node")) * int(select(config, "trainer.nnodes"))
    return Expected(contents, models, world, versions)


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


def find(folder: Path, wanted: Expected, *, deep: bool = False) -> Found:
    """The newest checkpoint that a run can go on from.

    Args:
        deep: read every file and compare its checksums, which takes as long as loading it does.
    """
    skipped: list[Skipped] = []
    for step in reversed(steps(folder)):
        checkpoint = folder / f"global_step_{step}"
        half = _half(checkpoint, wanted)
        problem = half or _misfit(checkpoint, wanted) or (_damage(checkpoint) if deep else "")
        if not problem:
            return Found(step, tuple(skipped))
        skipped.append(Skipped(step, problem, bool(half)))
    return Found(None, tuple(skipped))


def problem(checkpoint: Path, wanted: Expected) -> str:
    """Why one checkpoint cannot be used; empty where it can."""
    return _half(checkpoint, wanted) or _misfit(checkpoint, wanted)


def newest(folder: Path, *, critic: bool) -> int | None:
    """The newest whole checkpoint of any model, or None."""
    names = ("actor", "critic") if critic else ("actor",)
    return find(folder, Expected(dict.fromkeys(names, ("model",)))).step


def _half(checkpoint: Path, wanted: Expected) -> str:
    """What is missing or cut off; empty where every file that a resume reads was written.

    torch.save writes a zip archive whose directory comes last, so a cut-off file is no zip.
    verl writes ``data.pt`` after every shard.
    """
    for name, kinds in wanted.contents.items():
        problem = _half_model(checkpoint / name, kinds)
        if problem:
            return problem
    return _cut_off(checkpoint / "data.pt")


def _half_model(folder: Path, kinds: Iterable[str]) -> str:
    counts: dict[tuple[str, int], int] = {}
    for path in folder.glob("*.pt"):
        match = _SHARD.fullmatch(path.name)
        if match is None:
            continue
        problem = _cut_off(path)
        if problem:
            return problem
        key = match["what"], int(match["size"])
        counts[key] = counts.get(key, 0) + 1
    for kind in kinds:
        if not any(what == kind for what, _ in counts):
            return f"{folder.name}/{kind}_world_size_*.pt is missing"
    for (kind, size), count in counts.items():
        if count != size:
            return f"{folder.name} has {count} of {size} files {kind}_world_size_{size}_rank_*.pt"
    return ""


def _cut_off(path: Path) -> str:
    name = path.name if path.name == "data.pt" else f"{path.parent.name}/{path.name}"
    if not path.is_file():
        return f"{name} is missing"
    return "" if zipfile.is_zipfile(path) else f"{name} is cut off"


def _misfit(checkpoint: Path, wanted: Expected) -> str:
    """Why verl would fail on it, or load what is not this run's."""
    for name in wanted.contents:
        folder = checkpoint / name
        sizes = {int(m["size"]) for p in folder.glob("*.pt") if (m := _SHARD.fullmatch(p.name))}
        if wanted.world and sizes != {wanted.world}:
            return f"{name} was saved by {max(sizes)} workers, and the run has {wanted.world}"
        version = _read(folder / "fsdp_config.json").get("FSDP_version")
        if version is not None and version != wanted.versions.get(name, version):
            return f"{name} was saved by FSDP {version}, and the run has {wanted.versions[name]}"
        saved = _read(folder / "huggingface" / "config.json")
        other = wanted.models.get(name, {})
        for key in _SIZES:
            if key in saved and key in other and saved[key] != other[key]:
                return (
                    f"{name} is of another model: {key} is {saved[key]}, and the run's is "
                    f"{other[key]}"
                )
    return ""


def _damage(checkpoint: Path) -> str:
    """The first file whose checksums (CRC-32, written by torch.save) do not fit its bytes."""
    for path in sorted(checkpoint.rglob("*.pt")):
        try:
            with zipfile.ZipFile(path) as archive:
                bad = archive.testzip()
        except (OSError, zipfile.BadZipFile) as error:
            return f"{path.relative_to(checkpoint)} cannot be read ({error})"
        if bad is not None:
            return f"{path.relative_to(checkpoint)} is damaged ({bad})"
    return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def prepare_resume(
    folder: Path, step: int | None, *, keep: int | None, aside: Iterable[int] = ()
) -> list[int]:
    """Make verl load ``step``: its tracker says so, and what would mislead it is gone.

    Later folders are half-written ones, but those ``aside``, which get another name. Earlier ones
    than the ``keep`` newest (None keeps all) are leftovers of a killed process.

    Returns:
        The steps whose folders were removed.
    """
    for number in aside:
        _set_aside(folder / f"global_step_{number}")
    remove_partial(folder)
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


def _set_aside(checkpoint: Path) -> None:
    number, name = 1, checkpoint.name + ASIDE
    while checkpoint.with_name(name).exists():
        number += 1
        name = f"{checkpoint.name}{ASIDE}-{number}"
    checkpoint.rename(checkpoint.with_name(name))


def remove_partial(folder: Path) -> None:
    """Remove what a killed save, or one that met a full disk, has left."""
    for path in folder.glob(f"global_step_*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def remove_husks(folder: Path) -> None:
    """Remove what verl leaves of a checkpoint that it deleted: a folder with ``data.pt`` alone."""
    latest = tracked(folder)
    for step in steps(folder):
        checkpoint = folder / f"global_step_{step}"
        if latest is not None and step < latest and not any(checkpoint.glob("*/*")):
            shutil.rmtree(checkpoint, ignore_errors=True)
