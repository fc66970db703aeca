"""Which presets a card and a host are enough for, by the memory planner."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_p40.errors import VerlP40Error
from verl_p40.patches.queue import load_queue
from verl_p40.plan import fit
from verl_p40.plan.fit import Plan
from verl_p40.stack import env, paths, pins
from verl_p40.stack.env import StackEnv
from verl_p40.train import catalog
from verl_p40.train.compose import compose, select
from verl_p40.train.source import config_folder

MAIN = "p40-ppo"
"""The preset whose plan the host's memory and disk are judged by."""

_hydra = threading.Lock()
"""hydra keeps its state in the process: one at a time."""


@dataclass(frozen=True)
class Planned:
    """A preset and its plan on a card; ``problem`` says why there is none.

    One for the CPU (``cpu``) has none as long as its model has not been made.
    """

    name: str
    plan: Plan | None
    problem: str = ""
    cpu: bool = False


def stack_env() -> StackEnv | None:
    """The environment that training would use: the adopted one, else a current one, else any.

    Raises:
        MachineError: VERL_P40_ENV names no environment.
    """
    found = env.adopted()
    if found is not None:
        return found
    ready = sorted(env.installed(), key=lambda each: not env.is_current(each))
    return ready[0] if ready else None


def verl_config() -> Path | None:
    """The folder of verl's config, if nothing has to be downloaded for it."""
    queue = load_queue()
    release = pins.load().find_release("verl")
    kept = paths.cache_home() / "trees"
    found = stack_env()
    if found is None and not any(
        kept.glob(f"verl-{release.version}-*-{queue.digest[:12]}/verl/trainer/config")
    ):
        return None
    try:
        return config_folder(found)
    except VerlP40Error:
        return None


def configs() -> Mapping[str, dict[str, Any] | str]:
    """Every preset composed, or why it cannot be; empty without verl's config. Once a process."""
    with _hydra:
        return _configs()


@lru_cache(maxsize=1)
def _configs() -> dict[str, dict[str, Any] | str]:
    folder = verl_config()
    return {} if folder is None else {n: _composed(n, folder) for n in catalog.names()}


def _composed(name: str, folder: Path) -> dict[str, Any] | str:
    try:
        return compose(name, (), folder).config
    except VerlP40Error as error:
        return error.message


@lru_cache(maxsize=8)
def plans(card: int) -> tuple[Planned, ...]:
    """Every preset planned on a card of ``card`` bytes; empty without verl's config."""
    return tuple(_plan(name, config, card) for name, config in configs().items())


def _plan(name: str, config: dict[str, Any] | str, card: int) -> Planned:
    if isinstance(config, str):
        return Planned(name, None, config)
    cpu = select(config, "trainer.device") == "cpu"
    try:
        return Planned(name, fit.make_plan(config, card), cpu=cpu)
    except VerlP40Error as error:
        return Planned(name, None, error.message, cpu)


def main_plan() -> Plan | None:
    """The plan of :data:`MAIN` on a P40 with ECC."""
    found = plans(fit.default_card())
    return next((each.plan for each in found if each.name == MAIN), None)
