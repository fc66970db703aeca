"""Where things are: the repository's or the wheel's resources, and the user's folders.

``VERL_P40_HOME`` moves every folder that is kept between runs (environments and downloads).
Data, models and runs are the user's own and default to folders of the working directory:
``VERL_P40_DATA`` (``data``), ``VERL_P40_MODELS`` (``models``) and ``VERL_P40_RUNS`` (``runs``).
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).resolve().parent.parent
_BUNDLED = _PACKAGE / "_bundled"


def _resource(name: str) -> Path:
    bundled = _BUNDLED / name
    return bundled if bundled.is_dir() else _PACKAGE.parent.parent / name


def package_dir() -> Path:
    """The folder of the importable package ``verl_p40``."""
    return _PACKAGE


def patches_dir() -> Path:
    """The folder holding one patch queue a project (``verl/``, later ``vllm/``)."""
    return _resource("patches")


def locks_dir() -> Path:
    """The folder of the hashed requirement files."""
    return _resource("locks")


def presets_dir() -> Path:
    """The folder of the hydra preset files."""
    return _PACKAGE / "presets"


def env_home() -> Path:
    """Environments of the training stack: tens of thousands of files, gigabytes."""
    home = os.environ.get("VERL_P40_HOME")
    return Path(home) / "envs" if home else platformdirs.user_data_path("verl-p40") / "envs"


def cache_home() -> Path:
    """Downloads: pinned releases and wheels, each under its sha256. Safe to delete."""
    home = os.environ.get("VERL_P40_HOME")
    return Path(home) / "cache" if home else platformdirs.user_cache_path("verl-p40")


def _user_dir(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or default).expanduser().resolve()


def data_home() -> Path:
    return _user_dir("VERL_P40_DATA", "data")


def models_home() -> Path:
    return _user_dir("VERL_P40_MODELS", "models")


def runs_home() -> Path:
    return _user_dir("VERL_P40_RUNS", "runs")
