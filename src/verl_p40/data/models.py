"""Making sure that a model of the hub is there before training: the light side.

verl hands a hub name to transformers in every worker at once, each of which would download. So a
name is resolved here, once, to a folder: one under ``VERL_P40_MODELS``, or the snapshot in the
Hugging Face cache, downloaded first where it is missing.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from verl_p40.data import child
from verl_p40.data.child import Progress
from verl_p40.errors import DataError, MachineError
from verl_p40.stack import paths
from verl_p40.stack.hold import exclusive

if TYPE_CHECKING:
    from verl_p40.stack.env import StackEnv

_HUB_NAME: Final = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
"""A repository's name on the hub: `owner/name`, or one of the oldest models' `name`."""

_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class Model:
    """A model's folder, ready to load, and how it came there."""

    name: str
    folder: Path
    source: Literal["models", "cache", "downloaded"]


def is_hub_name(value: object) -> bool:
    """Whether a config's model path is a name on the hub rather than a folder."""
    return (
        isinstance(value, str)
        and _HUB_NAME.fullmatch(value) is not None
        and not Path(value).is_dir()
    )


def hub_cache() -> Path:
    """The hub client's cache folder, by its own variables (``HF_HUB_CACHE``, ``HF_HOME``)."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"


def missing(folder: Path) -> str | None:
    """The first thing that a model's folder lacks to be loaded; None for a whole one.

    Weights are judged by the index where there is one: every shard that it names has to be there.
    """
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return "tokenizer.json"
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return None
        try:
            index = json.loads((folder / f"{name}.index.json").read_text(encoding="utf-8"))
            shards = sorted(set(index["weight_map"].values()))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"a readable {name}.index.json"
        return next((shard for shard in shards if not (folder / shard).is_file()), None)
    return "model.safetensors"


def in_models_folder(name: str) -> Path | None:
    """The folder of a model under ``VERL_P40_MODELS``, by its whole name or the last part.

    Raises:
        DataError: it is there and something of it is missing.
    """
    for candidate in dict.fromkeys((name, name.split("/")[-1])):
        folder = paths.models_home() / candidate
        if folder.is_dir():
            lacks = missing(folder)
            if lacks is not None:
                raise DataError(
                    f"{folder} is not a whole model: it has no {lacks}",
                    fix="copy the rest there, or move the folder away to download the model",
                )
            return folder
    return None


def in_cache(name: str) -> Path | None:
    """The snapshot of a model's main branch in the hub's cache, if it is whole.

    The layout (``models--owner--name/{refs,snapshots,blobs}``) is documented:
    https://huggingface.co/docs/huggingface_hub/guides/manage-cache
    """
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / commit
    return snapshot if commit and missing(snapshot) is None else None


def find(name: str) -> Model | None:
    """The model, where nothing has to be downloaded for it.

    Raises:
        DataError: as :func:`in_models_folder`.
    """
    folder = in_models_folder(name)
    if folder is not None:
        return Model(name, folder, "models")
    folder = in_cache(name)
    return Model(name, folder, "cache") if folder is not None else None


def ensure(name: str, *, stack_env: StackEnv, progress: Progress | None = None) -> Model:
    """Find a model of the hub, or download it into the cache: once, whoever asks meanwhile.

    Raises:
        DataError: the hub has no such model, or a folder of it is not whole.
        NetworkError: the hub cannot be reached, or is not to be (``HF_HUB_OFFLINE``).
        DiskError: it does not fit on the disk.
        MachineError: the cache cannot be written.
    """
    progress = progress or child.silent
    found = find(name)
    if found is not None:
        return found
    cache = hub_cache()
    _require_writable(cache, name)

    def waiting() -> None:
        progress(f"another process is downloading {name}: waiting for it", None)

    with exclusive(cache / f".verl-p40-{name.replace('/', '--')}.lock", waiting):
        found = find(name)
        if found is not None:
            return found
        result = child.call(stack_env, "verl_p40.data.model_files", [name], progress)
    return Model(name, Path(result["folder"]), "downloaded")


def _require_writable(cache: Path, name: str) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(cache, os.W_OK | os.X_OK) else "no permission to write"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise MachineError(
            f"{name} has to be downloaded, and the model cache {cache} cannot be written: {reason}",
            fix="set HF_HOME to a folder that can, or put the model into "
            f"{paths.models_home() / name}",
        )
