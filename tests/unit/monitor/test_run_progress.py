from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_p40.monitor.progress import Progress, ending
from verl_p40.train.folder import RunFolder
from verl_p40.train.metrics import cut_after


def _step(run: RunFolder, step: int, **data: Any) -> None:
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": step, "data": data}) + "\n")


def test_the_last_step_that_was_trained(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    progress = Progress(run)
    assert progress.state().step == 0
    run.env.write_text(json.dumps({"total_steps": 60}))
    _step(run, 0, **{"val-core/x/reward/mean@1": 0.1})
    assert (progress.state().step, progress.state().total) == (0, 60)
    _step(run, 1, **{"critic/score/mean": 0.25, "timing_s/step": 6.5})
    _step(run, 1, **{"val-core/x/reward/mean@1": 0.3})
    state = progress.state()
    assert (state.step, state.reward, state.seconds_per_step) == (1, 0.25, 6.5)


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    progress = Progress(run)
    line = json.dumps({"step": 7, "data": {"critic/score/mean": 1.0}}) + "\n"
    run.metrics.write_text(line[:20])
    assert progress.state().step == 0
    run.metrics.write_text(line)
    assert progress.state().step == 7


def test_a_run_that_goes_on_from_a_checkpoint_steps_back(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    progress = Progress(run)
    for step in range(1, 13):
        _step(run, step, **{"critic/score/mean": step / 10})
    assert progress.state().step == 12
    cut_after(run.metrics, 8)
    assert progress.state().step == 8
    _step(run, 9, **{"critic/score/mean": 0.5})
    assert (progress.state().step, progress.state().reward) == (9, 0.5)


def test_how_a_run_ended(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert ending(run) == "ended without saying how"
    run.add_event("start", step=0)
    assert ending(run) == "ended without saying how"
    run.add_event(
        "failure", step=3, status="failed", exit="exit code 1", error="CUDA out of memory"
    )
    assert ending(run) == "failed at step 3: CUDA out of memory"
    run.add_event("resume", step=2)
    run.add_event("failure", step=5, status="interrupted", exit="SIGTERM")
    assert ending(run) == "interrupted at step 5"
    run.add_event("end", step=60, status="finished")
    assert ending(run) == "finished at step 60"
