"""Models that a config names by their name on the hub, as folders for the trainer.

``config.yaml`` keeps the name, so that a run is the same run wherever its model lies; the folder
is put in its place on the command line.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_p40.data import models
from verl_p40.data.models import Model
from verl_p40.stack.env import StackEnv
from verl_p40.train.checks import uses_critic
from verl_p40.train.compose import Config, assign, select
from verl_p40.train.preparation import ModelProgress
from verl_p40.train.view import View

Folders = Mapping[str, Path]
"""Setting → the folder to put there."""

_PLAIN = re.compile(r"[\w./:@%+-]+")
"""What hydra takes without quotes (and reads as a string, being a path)."""


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings that name a model of the hub, each with the name."""
    keys = ["actor_rollout_ref.model.path"]
    if uses_critic(config):
        keys += ["critic.model.path", "critic.model.tokenizer_path"]
    if select(config, "reward_model.enable"):
        keys += ["reward_model.model.path", "reward_model.model.input_tokenizer"]
    values = {key: select(config, key) for key in keys}
    return {key: value for key, value in values.items() if models.is_hub_name(value)}


def present(config: Mapping[str, Any]) -> Folders:
    """The folders of those that need no download."""
    return _folders(config, models.find)


def ensure(config: Mapping[str, Any], stack: StackEnv, view: View) -> Folders:
    """The folders of all, downloaded where they are missing.

    Raises:
        VerlP40Error: as :func:`verl_p40.data.models.ensure`.
    """

    def get(name: str) -> Model:
        view.phase(f"preparing the model {name}")
        model = models.ensure(name, stack_env=stack, progress=ModelProgress(view))
        view.note(f"model {name}: {model.folder}")
        return model

    return _folders(config, get)


def _folders(config: Mapping[str, Any], get: Callable[[str], Model | None]) -> Folders:
    wanted = settings(config)
    found = {name: get(name) for name in dict.fromkeys(wanted.values())}
    return {key: model.folder for key, name in wanted.items() if (model := found[name])}


def substituted(config: Mapping[str, Any], folders: Folders) -> Config:
    """The config with the folders in place of the names."""
    changed = copy.deepcopy(dict(config))
    for key, folder in folders.items():
        assign(changed, key, str(folder))
    return changed


def overrides(folders: Folders) -> list[str]:
    """The same for verl's command line."""
    return [f"{key}={_quoted(str(folder))}" for key, folder in folders.items()]


def _quoted(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
