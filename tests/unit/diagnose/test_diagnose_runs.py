"""A run folder: its attempts apart, and the planner's word on what ran out of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from verl_p40.cli.main import run as cli
from verl_p40.diagnose import advice
from verl_p40.diagnose.attempts import read, to_diagnose
from verl_p40.diagnose.memory import CudaOom
from verl_p40.errors import ExitCode
from verl_p40.plan import fit
from verl_p40.train.compose import compose, to_yaml
from verl_p40.train.failures import DISK_FULL
from verl_p40.train.folder import RunFolder

FLASH = "RuntimeError: FlashAttention only supports Ampere GPUs or newer.\n"
STEPS = "".join(f"step:{n} - critic/score/mean:0.5 - timing_s/gen:4.1\n" for n in (1, 2, 3))
DISK = "OSError: [Errno 28] No space left on device\n"
OOM = """\
Traceback (most recent call last):
  File "/env/verl/workers/actor/dp_actor.py", line 430, in update_policy
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.84 GiB. GPU 0 has a total \
capacity of 22.38 GiB of which 512.00 MiB is free. Including non-PyTorch memory, this process has \
21.86 GiB memory in use. Of the allocated memory 20.10 GiB is allocated by PyTorch, and 1.20 GiB \
is reserved by PyTorch but unallocated.
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    path = tmp_path / "p40-ppo"
    path.mkdir()
    return RunFolder(path)


def attempt(
    folder: RunFolder, text: str, *, begin: str = "start", end: str = "", **more: object
) -> None:
    """What `verl-p40 train` leaves of one attempt."""
    with folder.log.open("a") as log:
        log.write(
            f"=== verl-p40 2026-11-30T10:00:00+00:00 {begin} at step 0: python -m verl\n{text}"
        )
    folder.add_event(begin, step=0)
    if end:
        folder.add_event(end, step=3, **more)


def diagnose(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, object]]:
    with pytest.raises(SystemExit) as caught:
        cli(["diagnose", str(folder.path), "--json"])
    return int(caught.value.code or 0), json.loads(capsys.readouterr().out)


def test_an_earlier_failure_is_not_harmless_because_a_later_attempt_went_on(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(folder, FLASH, end="failure", error=FLASH.strip())
    attempt(folder, STEPS, begin="resume", end="end", total=3)
    code, document = diagnose(folder, capsys)
    assert code == ExitCode.OK
    (cause,) = document["causes"]
    assert cause["kind"] == "flash-attn-arch-unsupported"
    assert cause["evidence"][0]["where"] == f"{folder.log}:2"
    assert document["attempt"]["number"] == 1
    assert document["earlier_attempts"] == []


def test_the_last_failed_attempt_is_read_and_the_earlier_one_mentioned(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(folder, STEPS + FLASH, end="failure", error=FLASH.strip())
    attempt(folder, STEPS + DISK, begin="resume", end="failure", error=DISK.strip())
    _, document = diagnose(folder, capsys)
    (cause,) = document["causes"]
    assert cause["kind"] == "disk-full"
    assert cause["evidence"][0]["where"] == f"{folder.log}:10"
    assert document["lines"] == 5
    assert [(a["number"], a["error"]) for a in document["earlier_attempts"]] == [(1, FLASH.strip())]
    with pytest.raises(SystemExit):
        cli(["diagnose", str(folder.path)])
    out = capsys.readouterr().out
    assert out.startswith("attempt 2 of 2 (resume, ")
    assert f"attempt 1 before it failed at step 3: {FLASH.strip()}" in out


def test_an_attempt_that_was_killed_says_nothing_and_is_read(folder: RunFolder) -> None:
    attempt(folder, STEPS, end="stopped")
    attempt(folder, FLASH)
    first, second = read(folder)
    assert (first.status, second.status) == ("stopped", "")
    assert to_diagnose((first, second)) == second
    assert to_diagnose((first,)) == first


def test_a_log_that_was_cut_at_its_beginning_keeps_its_newest_attempts(folder: RunFolder) -> None:
    attempt(folder, FLASH, end="failure")
    attempt(folder, DISK, begin="resume", end="failure")
    text = folder.log.read_text()
    folder.log.write_text(text[text.index("\n=== verl-p40") + 1 :])
    (only,) = read(folder)
    assert (only.action, only.start, only.line) == ("resume", 0, 1)


def test_a_folder_without_events_is_read_whole(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.log.write_text(FLASH)
    code, document = diagnose(folder, capsys)
    assert (code, document["attempt"]) == (ExitCode.OK, None)


def test_a_run_that_ran_out_of_memory_is_asked_of_the_planner(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], verl_config: Path
) -> None:
    """The override that frees most of the phase in which it struck, with its number."""
    config = compose("p40-ppo", ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
                                 "actor_rollout_ref.actor.fsdp_config.optimizer_offload=false"],
                     verl_config).config  # fmt: skip
    folder.config.write_text(to_yaml(config))
    attempt(folder, OOM, end="failure")
    _, document = diagnose(folder, capsys)
    (cause,) = document["causes"]
    head, first, *_ = cause["fix"]
    needed = fit.make_plan(config, int(22.38 * 2**30))
    phase = next(p for p in needed.phases if p.name == "actor update")
    assert head.startswith(
        f"# by the planner actor update needs {needed.needed(phase) / 2**30:.2f} GiB"
    )
    override, _, what = first.partition("   # frees ")
    key, _, value = override.partition("=")
    merged = OmegaConf.merge(config, OmegaConf.from_dotlist([override]))
    changed = cast("dict[str, Any]", OmegaConf.to_container(merged))
    after = fit.make_plan(changed, int(22.38 * 2**30))
    saved = needed.needed(phase) - after.needed(
        next(p for p in after.phases if p.name == "actor update")
    )
    assert float(what.split()[0]) == pytest.approx(saved / 2**30, abs=0.01)
    assert saved > 2**30
    assert key and value


@pytest.mark.parametrize("text", ["", "a: [", "actor_rollout_ref: {}\n", "trainer: 3\n"])
def test_a_config_that_cannot_be_planned_leaves_the_advice_by_the_numbers(
    folder: RunFolder, text: str
) -> None:
    folder.config.write_text(text)
    oom = CudaOom("cuda-oom", tried=1 << 30, total=24 << 30, unused=4 << 30)
    (fix,) = advice.for_run(folder)(oom)
    assert "expandable_segments" in fix
    assert advice.for_run(None)(oom) == (fix,)


def test_a_full_disk_that_only_the_supervisor_could_name(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log ends where there was no room: the name of it is in the events, or appended."""
    cut = STEPS + "Error executing job with overrides: []\n" + "config line\n" * 300
    attempt(folder, cut + "Traceback (most rec", end="failure", error=DISK_FULL)
    _, found = diagnose(folder, capsys)
    assert cast(Any, found)["causes"][0]["kind"] == "disk-full"
    with folder.log.open("a") as log:
        log.write(f"\n{DISK_FULL}\n")
    with pytest.raises(SystemExit):
        cli(["diagnose", str(folder.log), "--json"])
    assert json.loads(capsys.readouterr().out)["causes"][0]["kind"] == "disk-full"
