"""From a preset and overrides to the one resolved config that verl is started with.

hydra composes in the light environment, from verl's own ``ppo_trainer.yaml`` (patched) and our
presets. Everything is resolved here, so the file in the run folder is the whole truth.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_p40.errors import UsageError
from verl_p40.stack import paths
from verl_p40.train import catalog

Config = dict[str, Any]

_LOCAL_PATHS = (
    "data.train_files",
    "data.val_files",
    "actor_rollout_ref.model.path",
    "critic.model.path",
    "critic.model.tokenizer_path",
    "reward_model.model.path",
    "reward_model.model.input_tokenizer",
    "custom_reward_function.path",
    "data.custom_cls.path",
)
"""Config keys holding a file, a folder, or (models) a hub name."""

_NOT_IN_DIGEST = ("verl_p40", "ray_init")
"""Sections that describe a run, or how Ray starts, without changing what is computed."""


@dataclass(frozen=True)
class Composed:
    """A preset with its overrides, resolved.

    ``config`` has no interpolation left.
    """

    preset: str
    source: str
    """The preset as it was asked for: its name, or the absolute path of the user's file."""
    about: catalog.About
    overrides: tuple[str, ...]
    config: Config


def digest(config: Mapping[str, Any]) -> str:
    """The sha256 of what a config computes: two commands with the same digest are the same run."""
    body = {k: v for k, v in config.items() if k not in _NOT_IN_DIGEST}
    canonical = json.dumps(body, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def compose(preset: str, overrides: Sequence[str], verl_config: Path) -> Composed:
    """Compose and resolve.

    Args:
        preset: a preset name, or the path of a ``.yaml`` file of the user's own.
        overrides: hydra overrides: ``key=value``, ``+key=value``, ``++key=value``, ``~key``.
        verl_config: the folder that holds verl's ``ppo_trainer.yaml``.

    Raises:
        UsageError: unknown preset, malformed override or unknown key, in one line.
    """
    path = catalog.locate(preset)
    composed = _composed(path, overrides, verl_config)
    config = _guarded(lambda: _resolve(composed), path.name)
    about = catalog.parse_about(config.get("verl_p40"), path.name)
    source = path.stem if path.parent == paths.presets_dir() else str(path)
    return Composed(path.stem, source, about, tuple(overrides), config)


class Variants:
    """One preset with a user's overrides, resolved with ever other ones on top of them.

    hydra takes a quarter of a second to compose; here it does so once, and the overrides of a
    variant are set in what it gave. The planner tries some twenty of them.
    """

    def __init__(self, preset: str, overrides: Sequence[str], verl_config: Path) -> None:
        """Compose; raises what :func:`compose` does."""
        self._path = catalog.locate(preset)
        self._composed = _composed(self._path, overrides, verl_config)

    def __call__(self, more: Sequence[str]) -> Config:
        """The resolved config with ``more``: ``key=value`` or ``+key=value``, the last one wins.

        Raises:
            UsageError: malformed override or unknown key, in one line.
        """
        variant = copy.deepcopy(self._composed)
        for override in map(_parse, more):
            _check_key(override, self._composed)
            if override.type is OverrideType.DEL:
                raise UsageError(f"override {override.input_line!r} deletes a key")
            OmegaConf.update(variant, override.key_or_group, override.value(), force_add=True)
        return cast("Config", _guarded(lambda: _resolve(variant), self._path.name))


def _composed(path: Path, overrides: Sequence[str], verl_config: Path) -> DictConfig:
    """What hydra composes, interpolations and all."""
    parsed = [_parse(text) for text in overrides]
    with _hydra(path.parent, verl_config) as search:
        plain = _guarded(lambda: hydra_compose(path.stem, overrides=[search]), path.name)
        for override in parsed:
            _check_key(override, plain)
        if not overrides:
            return cast("DictConfig", plain)
        try:
            return hydra_compose(path.stem, overrides=[search, *overrides])
        except (HydraException, OmegaConfBaseException) as error:
            raise UsageError(f"overrides: {_one_line(error)}") from error


def select(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value at a dotted key of a resolved config, or ``default``."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def assign(config: Config, key: str, value: Any) -> None:
    """Set a dotted key of a resolved config, making sections as needed."""
    *parents, last = key.split(".")
    node = config
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value


def to_yaml(config: Mapping[str, Any]) -> str:
    """The config as hydra reads it back: text that looks like an interpolation stays text."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dict(config))))


def from_yaml(text: str) -> Config:
    """Read back what :func:`to_yaml` wrote.

    Raises:
        ValueError: it is not a mapping in YAML.
    """
    try:
        loaded = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ValueError(_one_line(error)) from error
    if not isinstance(loaded, dict):
        raise ValueError("not a mapping")
    return {str(key): value for key, value in loaded.items()}


def _escaped(node: Any) -> Any:
    if isinstance(node, str):
        return node.replace("${", "\\${")
    if isinstance(node, Mapping):
        return {k: _escaped(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_escaped(v) for v in node]
    return node


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Dotted keys whose values differ between two resolved configs, sorted."""
    flat_a, flat_b = dict(_flatten(a)), dict(_flatten(b))
    keys = flat_a.keys() | flat_b.keys()
    missing = object()
    return sorted(k for k in keys if flat_a.get(k, missing) != flat_b.get(k, missing))


@contextmanager
def _hydra(config_dir: Path, verl_config: Path) -> Iterator[str]:
    """hydra set up for one composition; yields the override that adds the other folders."""
    places = [verl_config]
    if config_dir != paths.presets_dir():
        places.insert(0, paths.presets_dir())
    search = ",".join(f'"file://{place}"' for place in places)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir), job_name="verl_p40", version_base="1.3"):
            yield f"hydra.searchpath=[{search}]"
    finally:
        GlobalHydra.instance().clear()


@contextmanager
def _data_folder_named() -> Iterator[None]:
    """Presets name their files by $VERL_P40_DATA: it is set to the folder in force meanwhile."""
    before = os.environ.get("VERL_P40_DATA")
    os.environ["VERL_P40_DATA"] = str(paths.data_home())
    try:
        yield
    finally:
        if before is None:
            del os.environ["VERL_P40_DATA"]
        else:
            os.environ["VERL_P40_DATA"] = before


def _resolve(composed: DictConfig) -> Config:
    """A plain dict: interpolations resolved, local paths absolute."""
    with _data_folder_named():
        config = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(config, dict)
    result: Config = {str(k): v for k, v in config.items()}
    for key in _LOCAL_PATHS:
        value = select(result, key)
        if isinstance(value, str):
            assign(result, key, _absolute(value, key))
        elif isinstance(value, list):
            assign(result, key, [_absolute(v, key) for v in value])
    return result


def _absolute(value: Any, key: str) -> Any:
    """A local path made absolute; a hub name, a URL or a non-string is left alone.

    A hub name stays one wherever the model lies, for the run stays the same: see hubmodels.
    """
    if not isinstance(value, str) or "://" in value or not value:
        return value
    path = Path(value).expanduser()
    if path.is_absolute():
        return str(path)
    if "model" in key and not path.exists() and not value.startswith("."):
        return value
    return str(path.resolve())


def _parse(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise UsageError(
            f"override {text!r} is not key=value: {_one_line(error)}",
            fix="for example trainer.total_training_steps=20, or quote it: 'key=\"a b\"'",
        ) from error
    if override.is_sweep_override():
        raise UsageError(
            f"override {text!r} is a sweep over several values; one run has one value",
            fix="for a list write key=[a,b]",
        )
    return override


def _check_key(override: Override, config: DictConfig) -> None:
    """Refuse a key that no config has, unless the override says that it adds one (``+``)."""
    key = override.key_or_group
    if key.startswith("hydra.") or override.type in (
        OverrideType.ADD,
        OverrideType.FORCE_ADD,
    ):
        return
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    missing = object()
    if select({str(k): v for k, v in plain.items()}, key, missing) is not missing:
        return
    near = nearest_keys(key, [k for k, _ in _flatten(plain, sections=True)])
    adding = override.type is not OverrideType.DEL and f"+{override.input_line}"
    raise UsageError(
        f"unknown setting {key!r}" + (f"; nearest: {', '.join(near)}" if near else ""),
        fix=f"to add a key that verl's config lacks, write {adding}" if adding else "",
    )


def nearest_keys(key: str, known: Sequence[str], count: int = 3) -> list[str]:
    """Keys a user may have meant: the same last part elsewhere first, then similar spellings."""
    last = key.rsplit(".", 1)[-1]
    scored = []
    for candidate in known:
        tail = candidate.rsplit(".", 1)[-1]
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        tails = difflib.SequenceMatcher(None, last, tail).ratio()
        score = 0.5 * whole + 0.5 * tails + (0.15 if f"_{last}" in f"_{tail}" else 0)
        if score > 0.6:
            scored.append((score, candidate))
    return [name for _, name in sorted(scored, key=lambda s: (-s[0], s[1]))[:count]]


def _flatten(
    node: Mapping[Any, Any], prefix: str = "", *, sections: bool = False
) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            if sections:
                yield key, None
            yield from _flatten(value, f"{key}.", sections=sections)
        else:
            yield key, value


def _guarded(action: Any, where: str) -> Any:
    """Run ``action``, turning hydra's and OmegaConf's errors about a file into one line."""
    try:
        return action()
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"{where}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(line for line in lines[:2] if not line.startswith("full_key"))
    return re.sub(r"\s+", " ", text) or type(error).__name__
