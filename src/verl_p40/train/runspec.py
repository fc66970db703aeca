"""From what the user typed to what will be started: config, run folder, where to go on."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from verl_p40.errors import UsageError
from verl_p40.stack import paths
from verl_p40.stack.pins import FlavorName
from verl_p40.train import catalog, checkpoints, checks, traps
from verl_p40.train.compose import (
    Composed,
    Config,
    assign,
    compose,
    differing_keys,
    digest,
    nearest_keys,
    select,
)
from verl_p40.train.folder import RunFolder, next_free
from verl_p40.tripwire import ARM_MODULE

Action = Literal["start", "restart", "resume", "finished"]

EXTENDABLE = frozenset(
    {
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.val_before_train",
        "trainer.logger",
        "trainer.log_val_generations",
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
        "trainer.max_actor_ckpt_to_keep",
        "trainer.max_critic_ckpt_to_keep",
        # Where the tripwire is hung in.
        "actor_rollout_ref.model.external_lib",
        "critic.model.external_lib",
        "reward_model.model.external_lib",
    }
)
"""Settings that may change between two attempts at one run: how long and how watched it is."""

_OURS = ("verl_p40.", "ray_init.", "trainer.default_local_dir")


@dataclass(frozen=True)
class Request:
    """What the user asked for. ``preset`` is empty when none was named."""

    preset: str
    overrides: tuple[str, ...]
    run: str | None = None
    runs_dir: Path | None = None
    new: bool = False
    tripwire: bool = False
    retries: int | None = None
    """How often to try again without getting further; None: what the environment says."""


@dataclass(frozen=True)
class RunSpec:
    """What will be done. ``config`` is complete: paths of the run folder included.

    ``step`` is where the run goes on from (0: from the beginning); ``chained`` the external
    library whose place the tripwire has taken.
    """

    composed: Composed
    config: Config
    digest: str
    run: RunFolder
    action: Action
    step: int
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """What looks like a fault in this run's metrics and is none."""
    tripwire: bool
    chained: str | None

    @property
    def device(self) -> str:
        return str(select(self.config, "trainer.device"))

    @property
    def cards(self) -> int:
        """Cards (on the CPU: workers) of this machine that verl uses."""
        return int(select(self.config, "trainer.n_gpus_per_node"))

    @property
    def rollout(self) -> str:
        return str(select(self.config, "actor_rollout_ref.rollout.name"))

    @property
    def flavor(self) -> FlavorName:
        return "cpu" if self.device == "cpu" else "cu118"

    def command(self, python: Path | str, *more: str) -> tuple[str, ...]:
        """The command that trains, as it can be typed. ``more``: overrides of this attempt's."""
        extra = [*more]
        if self.action == "resume" and select(self.config, "trainer.val_before_train"):
            # The step it resumes from has been validated in its own time.
            extra.append("trainer.val_before_train=false")
        return (
            str(python),
            "-m",
            "verl.trainer.main_ppo",
            "--config-path",
            str(self.run.path),
            "--config-name",
            self.run.config.stem,
            f"hydra.run.dir={self.run.path / 'hydra'}",
            *extra,
        )

    def user_command(self, *extra: str) -> str:
        """The ``verl-p40 train`` command that goes on with this run."""
        words = ["train", "--run", self.run.name]
        if self.run.path.parent != paths.runs_home():
            words += ["--runs-dir", str(self.run.path.parent)]
        if self.tripwire:
            words.append("--tripwire")
        return f"{_own_command()} {shlex.join([*words, *extra])}"


def _own_command() -> str:
    """``verl-p40``, or its path where a shell would not find it (a newcomer's ``.venv``).

    ``VERL_P40_COMMAND`` says how it is typed where that is another story (in a container).
    """
    named = os.environ.get("VERL_P40_COMMAND")
    if named:
        return named
    started_as = Path(sys.argv[0])
    if started_as.name != "verl-p40" or shutil.which("verl-p40"):
        return "verl-p40"
    here, script = Path.cwd(), started_as.absolute()
    return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))


def split_arguments(words: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """``(preset, overrides)`` of the words after ``train``; the preset may be left out.

    Raises:
        UsageError: a second word that is not an override.
    """
    preset, overrides = "", []
    for position, word in enumerate(words):
        if "=" in word or word.startswith(("~", "+")):
            overrides.append(word)
        elif position == 0:
            preset = word
        else:
            raise UsageError(
                f"{word!r} is neither the preset (already {preset or 'left out'}) nor key=value",
                fix="verl-p40 train cpu-demo trainer.total_training_steps=20",
            )
    return preset, tuple(overrides)


def stored_request(request: Request) -> Request:
    """Fill in preset and overrides from the run that ``--run`` names, when none were given."""
    if request.preset or request.run is None:
        return request
    run = _folder(request, request.run)
    stored = run.read_env()
    if not run.started() or "preset" not in stored:
        return request
    return Request(
        preset=str(stored.get("preset_source") or stored["preset"]),
        overrides=(*map(str, stored.get("overrides", ())), *request.overrides),
        run=request.run,
        runs_dir=request.runs_dir,
        new=request.new,
        tripwire=request.tripwire,
        retries=request.retries,
    )


def make_runspec(request: Request, verl_config: Path) -> RunSpec:
    """Compose the config, check it against itself, and choose the run folder.

    Writes nothing. Raises UsageError, DataError or BusyError in one line each.
    """
    preset = request.preset or catalog.DEFAULT_PRESET
    composed = compose(preset, request.overrides, verl_config)
    config = composed.config
    chained = None
    if request.tripwire:
        chained = select(config, "actor_rollout_ref.model.external_lib")
        for key in ("actor_rollout_ref.model", "critic.model", "reward_model.model"):
            assign(config, f"{key}.external_lib", ARM_MODULE)
    _ensure_file_logger(config)
    _check_estimator(config)
    warnings = [*checks.check_batches(config), *traps.check_traps(config)]
    identity = digest(config)
    default = f"{composed.preset}-{identity[:6]}"
    base = _folder(request, default if request.run is None else request.run)
    run = next_free(base) if request.new else base
    assign(config, "trainer.default_local_dir", str(run.checkpoints))
    run.check_free()
    newest = checkpoints.find(run.checkpoints, checkpoints.expected(config)).step
    action, step = _where(run, config, newest)
    return RunSpec(
        composed=composed,
        config=config,
        digest=identity,
        run=run,
        action=action,
        step=step,
        warnings=tuple(warnings),
        notes=tuple(traps.explain(config)),
        tripwire=request.tripwire,
        chained=str(chained) if chained and chained != ARM_MODULE else None,
    )


def go_on(spec: RunSpec, config: Config) -> tuple[RunSpec, tuple[checkpoints.Skipped, ...]]:
    """The spec of the next attempt at the same run, and the checkpoints that it passes over.

    Args:
        config: the spec's, models of the hub given by their folders.
    """
    if not spec.run.started():
        return spec, ()
    found = checkpoints.find(spec.run.checkpoints, checkpoints.expected(config), deep=True)
    action, step = _where(spec.run, spec.config, found.step)
    return dataclasses.replace(spec, action=action, step=step), found.skipped


def _folder(request: Request, name: str) -> RunFolder:
    if not name or name in (".", "..") or "/" in name or name.startswith("."):
        raise UsageError(
            f"run name {name!r} is not the name of a folder",
            fix="letters, digits, dots and dashes; choose where runs are with --runs-dir",
        )
    home = request.runs_dir.expanduser().resolve() if request.runs_dir else paths.runs_home()
    return RunFolder(home / name)


def _ensure_file_logger(config: Config) -> None:
    """The supervisor reads metrics.jsonl, whichever other loggers are asked for."""
    logger = select(config, "trainer.logger") or []
    names = [logger] if isinstance(logger, str) else list(logger)
    if "file" not in names:
        assign(config, "trainer.logger", [*names, "file"])


_ESTIMATORS = (
    "gae",
    "grpo",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "opo",
)
"""``RayPPOTrainer.__init__`` of verl 0.4.1 knows these; anything else is NotImplementedError."""


def _check_estimator(config: Mapping[str, Any]) -> None:
    name = str(select(config, "algorithm.adv_estimator"))
    if name not in _ESTIMATORS:
        near = nearest_keys(name, _ESTIMATORS)
        raise UsageError(
            f"algorithm.adv_estimator is {name!r}" + (f"; nearest: {near[0]}" if near else ""),
            fix=f"one of {', '.join(_ESTIMATORS)}",
        )


def _where(run: RunFolder, config: Config, newest: int | None) -> tuple[Action, int]:
    """What is to be done in ``run``, whose ``newest`` checkpoint can be loaded; from which step."""
    if not run.started():
        if run.path.exists() and any(p.name[0] != "." for p in run.path.iterdir()):
            raise UsageError(
                f"{run.path} exists and is not a run folder",
                fix="choose another name with --run, or another place with --runs-dir",
            )
        return "start", 0
    _check_same(run, config)
    if select(config, "trainer.resume_mode") == "disable":
        return "restart", 0
    ended = run.finished_at()
    wanted = _wanted_steps(run, config)
    if ended is not None and (wanted is None or ended >= wanted):
        return "finished", ended
    if newest is None:
        if ended is not None:
            raise UsageError(
                f"{run.path} is finished at step {ended} and kept no checkpoint to go on from",
                fix="start another run with --new, and set trainer.save_freq",
            )
        return "restart", 0
    if wanted is not None and newest >= wanted:
        # Killed between its last checkpoint and its end: verl would train a step too many.
        return "finished", newest
    return "resume", newest


def _wanted_steps(run: RunFolder, config: Config) -> int | None:
    """The planned last step, None while only the data can tell (it is read later)."""
    fixed = select(config, "trainer.total_training_steps")
    if fixed is not None:
        return int(fixed)
    before = run.read_env().get("rows")
    return checks.available_steps(config, int(before)) if before else None


def _check_same(run: RunFolder, config: Config) -> None:
    """Refuse to go on with a run under a config that would make it another one."""
    keys = [
        key
        for key in differing_keys(run.read_config(), config)
        if not key.startswith(_OURS) and key not in EXTENDABLE
    ]
    if keys:
        shown = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
        raise UsageError(
            f"{run.path} was started with other settings: {shown}",
            fix="start another run with --new, or leave --run out",
        )


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
