"""The files of a model, from the hub into its cache: ``python -m verl_p40.data.model_files NAME``.

Runs in a stack environment. One file after the other, weights last: a cache that has them all has
everything. A broken download goes on where it stopped.
"""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from verl_p40.data import child, hub, models
from verl_p40.errors import DataError, DiskError

_SMALL: Final = re.compile(r"[^/]+\.(json|txt|model|jinja|py)")
"""Configs, tokenizers and code: at the top of the repository; folders hold other formats."""
_SAFE: Final = re.compile(r"model[^/]*\.safetensors")
_PICKLED: Final = re.compile(r"pytorch_model[^/]*\.bin")
_SPARE: Final = 500_000_000
_EVERY: Final = 1.0
"""Seconds between two looks at what has arrived."""


@dataclass(frozen=True)
class File:
    """A file of a repository; ``size`` in bytes, 0 where the hub does not say."""

    name: str
    size: int


def main(argv: Sequence[str]) -> int:
    return child.serve(lambda: {"folder": str(download(argv[0]))})


def download(name: str) -> Path:
    """The snapshot folder of a model, complete.

    Raises:
        DataError: no such model, or one without weights that transformers loads.
        NetworkError, DiskError: it cannot be had, or not be kept.
    """
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    with hub.explained(name, "model"):
        child.say(f"downloading {name} from {hub.endpoint()}", None)
        files = wanted(_listed(name))
        total = sum(file.size for file in files)
        _require_space(name, total)
        done = 0
        folder = None
        for file in files:
            with _watched(name, done, total):
                folder = hub.patiently(partial(_fetch, name, file.name)).parent
            done += file.size
    lacks = "config.json" if folder is None else models.missing(folder)
    if folder is None or lacks is not None:
        raise DataError(
            f"{hub.endpoint()} has no whole model {name}: it has no {lacks}",
            fix="check actor_rollout_ref.model.path",
        )
    return folder


def _fetch(name: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, file))


def _listed(name: str) -> list[File]:
    from huggingface_hub import HfApi

    info = HfApi().model_info(name, files_metadata=True)
    return [File(entry.rfilename, int(entry.size or 0)) for entry in info.siblings or []]


def wanted(listed: Sequence[File]) -> list[File]:
    """What transformers loads, in order of download: safetensors where there are any."""
    small = [file for file in listed if _SMALL.fullmatch(file.name)]
    weights = [file for file in listed if _SAFE.fullmatch(file.name)]
    if not weights:
        weights = [file for file in listed if _PICKLED.fullmatch(file.name)]
    return [*sorted(small, key=lambda f: f.name), *sorted(weights, key=lambda f: f.name)]


def _require_space(name: str, total: int) -> None:
    cache = models.hub_cache()
    free = shutil.disk_usage(next(p for p in [cache, *cache.parents] if p.exists())).free
    if free < total + _SPARE:
        raise DiskError(
            f"{name} needs {total / 1e9:.1f} GB and the disk of {cache} has {free / 1e9:.1f} GB free",
            fix="free some space, or set HF_HOME to a folder on another disk",
        )


@contextmanager
def _watched(name: str, before: int, total: int) -> Iterator[None]:
    """Report what has arrived, from the size of the file that the client writes."""
    over = threading.Event()
    blobs = models.hub_cache() / f"models--{name.replace('/', '--')}" / "blobs"

    def watch() -> None:
        while not over.wait(_EVERY):
            arrived = before + sum(_size(path) for path in blobs.glob("*.incomplete"))
            if total:
                share = f"{arrived / 1e6:,.0f} of {total / 1e6:,.0f} MB"
                child.say(f"downloading {name}, {share}", min(arrived / total, 1.0))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
