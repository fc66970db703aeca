"""Discovery, selection, isolation and time limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from verl_p40.doctor import Check, State, engine, fast, run_checks, select
from verl_p40.doctor.machine import Machine
from verl_p40.doctor.model import Outcome, failure, note, ok, worst
from verl_p40.doctor.recording import Recorded, Recording
from verl_p40.errors import MachineError, UsageError

NOBODY = Recorded(Recording())


def made(id: str, run: Callable[[Machine], Outcome], limit: float = 5.0) -> Check:
    return Check(id, "test", id, run, limit, True, True)


def test_every_module_is_found_in_the_order_of_the_groups() -> None:
    groups = list(dict.fromkeys(check.group for check in select()))
    assert tuple(groups) == engine.ORDER


def test_every_check_is_documented_or_its_title_says_it() -> None:
    for check in select():
        assert check.title
        assert 0 < check.limit <= 120
        assert check.id == check.id.lower()


def test_a_name_is_a_check_s_or_a_group_s() -> None:
    """But for a group of one check of its name."""
    ids, groups = {c.id for c in select()}, {c.group for c in select()}
    for name in ids & groups:
        assert [c.id for c in select() if c.group == name] == [name]


def test_the_issue_s_list() -> None:
    """Every check that issue 6 names has one here."""
    assert {check.id for check in select()} >= {
        *("gpus", "ecc", "gpu-memory", "driver", "kernel-module", "persistence", "power"),
        *("temperature", "throttle", "pcie", "topology", "gpu-processes", "nvidia-runtime"),
        *("docker", "compose", "cgroup", "image", "shm", "memory", "disk", "ulimits", "ports"),
        *("clock", "hf-cache", "hub", "python", "packages", "torch", "patches", "audit"),
        *("shadows", "environment", "scripts", "model", "data", "presets"),
    }


def test_a_crash_stops_nothing() -> None:
    def crash(machine: Machine) -> Outcome:
        raise ZeroDivisionError("by nought")

    def refuse(machine: Machine) -> Outcome:
        raise MachineError("cannot do it", fix="buy another")

    chosen = [made("a", crash), made("b", refuse), made("c", lambda machine: ok("fine"))]
    crashed, refused, fine = run_checks(chosen, NOBODY)
    assert crashed.outcome.state is State.WARNING
    assert "ZeroDivisionError: by nought" in crashed.outcome.text
    assert crashed.outcome.facts == {"crashed": True}
    assert (refused.outcome.text, refused.outcome.fix) == ("cannot do it", ("buy another",))
    assert fine.outcome.state is State.OK


def test_a_check_that_hangs_is_left_behind_and_the_others_do_not_wait() -> None:
    never = threading.Event()

    def hang(machine: Machine) -> Outcome:
        never.wait()
        return ok("never")

    started = time.monotonic()
    hung, fine = run_checks([made("a", hang, 0.3), made("b", lambda machine: ok("fine"))], NOBODY)
    assert time.monotonic() - started < 2
    assert (hung.outcome.state, fine.outcome.state) == (State.WARNING, State.OK)
    assert "verl-p40 doctor --only a -v" in hung.outcome.fix
    never.set()


def test_checks_run_beside_one_another() -> None:
    both = threading.Barrier(2, timeout=5)

    def meet(machine: Machine) -> Outcome:
        both.wait()
        return ok("met")

    reports = list(run_checks([made("a", meet), made("b", meet)], NOBODY))
    assert [report.outcome.text for report in reports] == ["met", "met"]


def test_selection() -> None:
    assert [check.id for check in select(["ecc"])] == ["ecc"]
    assert {check.group for check in select(["gpu", "nvidia"])} == {"gpu", "nvidia"}
    with pytest.raises(UsageError, match=r"'eccc'; nearest: .*ecc"):
        select(["eccc"])


def test_of_a_recording_only_what_it_can_answer() -> None:
    assert {c.id for c in select((), NOBODY)} == {c.id for c in select() if c.replayable}
    assert not {"packages", "environment"} & {c.id for c in select((), NOBODY)}


def test_fast_gives_failures_alone_and_starts_nothing_slow() -> None:
    machine = Recorded(
        Recording.model_validate(
            {"variables": {"NVIDIA_VISIBLE_DEVICES": "all"}, "files": {"/.dockerenv": ""}}
        )
    )
    found = fast(["nvidia", "gpu"], machine=machine)
    assert [report.check.id for report in found] == ["driver"]
    assert not [check.id for check in select() if check.fast and check.id in {"torch", "audit"}]


def test_the_worst_state() -> None:
    assert worst([]) is State.NA
    assert worst([State.OK, State.NOTE, State.NA]) is State.NOTE
    assert worst([failure("x").state, note("y").state]) is State.FAILURE
