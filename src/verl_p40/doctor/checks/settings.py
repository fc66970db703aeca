"""Settings of the user that do nothing or are wrong, in the environment and in scripts."""

from __future__ import annotations

import os
from pathlib import Path

from verl_p40.audit.settings import SettingFinding, check_command, check_environment
from verl_p40.doctor.machine import Machine
from verl_p40.doctor.model import Outcome, check, na, note, ok, warning

_MAX_SCRIPTS = 20
_MAX_BYTES = 2_000_000
_WORDS = ("verl.trainer", "verl-p40", "actor_rollout_ref.", "main_ppo")

BAD = ("harmful", "wrong")


@check("environment", "Settings in the environment", replayable=False)
def environment(machine: Machine) -> Outcome:
    """Variables that nobody reads, or that end a run."""
    return _judge(check_environment(os.environ), "verl-p40 audit --environment", "the environment")


@check("scripts", "Settings in scripts", limit=30, replayable=False)
def scripts(machine: Machine) -> Outcome:
    """The scripts that were named, else those here that start verl, and Compose's .env."""
    chosen = [Path(name) for name in machine.subject.scripts] or _here()
    if not chosen:
        return na("no script here starts verl", "verl-p40 doctor --script train.sh")
    findings: list[SettingFinding] = []
    worst = chosen[0]
    for path in chosen:
        found = check_command(_read(path))
        if len([f for f in found if f.kind in BAD]) > len([f for f in findings if f.kind in BAD]):
            worst = path
        findings += found
    where = ", ".join(path.name for path in chosen[:3]) + (" ..." if len(chosen) > 3 else "")
    return _judge(findings, f"verl-p40 audit {worst}", where)


def _here() -> list[Path]:
    found: list[Path] = []
    for path in sorted([*Path.cwd().glob("*.sh"), Path.cwd() / ".env"]):
        if len(found) == _MAX_SCRIPTS or not path.is_file() or path.stat().st_size > _MAX_BYTES:
            continue
        text = _read(path)
        if path.name == ".env" or any(word in text for word in _WORDS):
            found.append(path)
    return found


def _read(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_BYTES)


def _judge(findings: list[SettingFinding], more: str, where: str) -> Outcome:
    told = [finding for finding in findings if finding.kind != "ok-note"]
    details = tuple(f"{f.kind}: {f.setting}: {f.message}" for f in findings)
    if not told:
        return ok(f"{where}: nothing that is wrong or does nothing", details=details)
    first = min(told, key=lambda f: (*BAD, "no-op").index(f.kind))
    what = {
        "harmful": "runs, but not as meant",
        "wrong": "ends the run",
        "no-op": "read by nobody",
    }[first.kind]
    others = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    instead = (f"instead: {first.replacement}",) if first.replacement else ()
    build = warning if first.kind in BAD else note
    return build(f"{first.setting}: {what}{others}", *instead, more, details=details)
