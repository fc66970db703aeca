"""Which checks run, on which device, and why the others do not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl_p40.errors import MachineError, UsageError
from verl_p40.smoke import catalog, gpu
from verl_p40.smoke.gpu import Gpu, Seen
from verl_p40.smoke.model import Check
from verl_p40.smoke.run import Smoke, Where, busy, choose_device, training_run
from verl_p40.stack import paths
from verl_p40.stack.env import StackEnv

Probe = Callable[..., Check]

P40 = Gpu("Tesla P40", "", 22912, 0, 22912, "6.1")
"""As an idle card is seen; memory of a P40 with ECC on."""
WITH_P40 = Seen("535.129.03", "12.2", (P40,), "NVML")
NOTHING = Seen(problem="no NVIDIA driver on this machine")


def with_card(**fields: Any) -> Seen:
    return replace(WITH_P40, gpus=(replace(P40, **fields),))


@pytest.fixture
def smoke(stack: StackEnv, tmp_path: Path, listener: Any, monkeypatch: pytest.MonkeyPatch) -> Smoke:
    monkeypatch.setenv("VERL_P40_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(gpu, "_first_uuid", lambda: "")
    where = Where("cpu", NOTHING, "no GPU: no NVIDIA driver on this machine")
    return Smoke(stack, where, tmp_path, listener, available_mib=lambda: 8000, patience=0.0)


def on_gpu(smoke: Smoke, seen: Seen) -> Smoke:
    smoke.where, smoke.look = Where("cuda", seen), lambda: seen
    return smoke


def test_a_crash_and_a_failure_stop_nothing(smoke: Smoke, probe: Probe, listener: Any) -> None:
    results = smoke.run([probe("abort"), probe("failing"), probe("skipping"), probe("good")])
    assert [r.verdict for r in results] == ["failed", "failed", "skipped", "ok"]
    assert listener.begun == ["abort", "failing", "skipping", "good"]
    assert listener.ended == results
    assert listener.ticks > 0


def test_what_needs_a_failed_or_missing_check_is_skipped(smoke: Smoke, probe: Probe) -> None:
    results = smoke.run(
        [
            probe("failing"),
            replace(probe("good"), name="a", needs=("failing",)),
            replace(probe("good"), name="b", needs=("a",)),
            replace(probe("good"), name="c", needs=("elsewhere",)),
        ]
    )
    assert [(r.verdict, r.text) for r in results[1:]] == [
        ("skipped", "needs failing, which failed"),
        ("skipped", "needs a, which was skipped"),
        ("skipped", "needs elsewhere, which was left out"),
    ]


def test_without_a_gpu_its_checks_are_skipped_and_say_so(smoke: Smoke, probe: Probe) -> None:
    only, either = probe("good", gpu="only"), probe("needs_the_scratch", gpu="either")
    results = smoke.run([only, either])
    assert [r.verdict for r in results] == ["skipped", "ok"]
    assert results[0].text == "no GPU: no NVIDIA driver on this machine"
    assert (smoke.scratch / "seen").exists()


def test_too_little_memory_skips(smoke: Smoke, probe: Probe) -> None:
    (result,) = smoke.run([probe("good", ram_mib=9000)])
    assert (result.verdict, result.text) == (
        "skipped",
        "8,000 MiB of memory available, and it needs 9,000 MiB",
    )


def test_an_idle_card_is_used(smoke: Smoke, probe: Probe) -> None:
    (result,) = on_gpu(smoke, WITH_P40).run([probe("good", gpu="either", gpu_mib=3072)])
    assert (result.verdict, result.text) == ("ok", "computed on cuda")
    assert result.category == "run on Tesla P40"


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (with_card(used_mib=21500, free_mib=1412), "1,412 MiB free of 22,912, and it needs 3,072"),
        # Little is taken yet, and a run that has begun may take the rest.
        (with_card(used_mib=600, free_mib=22312, computing=1), "another process uses the GPU"),
        (with_card(used_mib=5000, free_mib=17912), "may yet take all of it: 17,912 MiB free"),
        (
            with_card(total_mib=2048, free_mib=1900),
            "too little GPU memory: 1,900 MiB free of 2,048",
        ),
        (Seen(driver="535.129.03", problem="NVML: Unknown Error"), "NVML: Unknown Error"),
    ],
)
def test_a_busy_card_is_left_alone(smoke: Smoke, probe: Probe, seen: Seen, words: str) -> None:
    check = probe("needs_the_scratch", gpu="either", gpu_mib=3072)
    (result,) = on_gpu(smoke, seen).run([check])
    assert result.verdict == "skipped"
    assert words in result.text
    assert not (smoke.scratch / "seen").exists()


def test_a_card_that_becomes_idle_is_waited_for(smoke: Smoke, probe: Probe) -> None:
    """The memory of the check before goes a moment after its process."""
    looks = [with_card(computing=1), with_card(computing=1), WITH_P40]
    on_gpu(smoke, WITH_P40)
    smoke.look, smoke.patience = (lambda: looks.pop(0) if len(looks) > 1 else looks[0]), 10.0
    (result,) = smoke.run([probe("good", gpu="either", gpu_mib=512)])
    assert result.verdict == "ok"


HOLD = """
import sys, time
from pathlib import Path
from verl_p40.train.folder import RunFolder
with RunFolder(Path(sys.argv[1])).hold():
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(("device", "left_alone"), [("cuda", True), ("cpu", False)])
def test_beside_a_training_run(
    smoke: Smoke, probe: Probe, tmp_path: Path, device: str, left_alone: bool
) -> None:
    """The run's lock tells, before it has taken any memory: nothing may be taken from under it."""
    run = tmp_path / "runs" / "p40-ppo-1"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(f"trainer:\n  device: {device}\n")
    assert training_run(paths.runs_home()) == ""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)],
        stdout=subprocess.PIPE,
        text=True,
        env=smoke.stack.environ(),
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        check = probe("good", gpu="either", gpu_mib=512)
        (result,) = on_gpu(smoke, WITH_P40).run([check])
    finally:
        holder.kill()
        holder.wait()
    assert result.verdict == ("skipped" if left_alone else "ok")
    assert left_alone == (result.text == "the run p40-ppo-1 is training on the GPU")


def test_the_cards_are_told_apart_by_what_cuda_calls_the_first(
    monkeypatch: pytest.MonkeyPatch, probe: Probe
) -> None:
    full = replace(P40, uuid="GPU-a", used_mib=22000, free_mib=912)
    idle = replace(P40, uuid="GPU-b")
    seen = replace(WITH_P40, gpus=(full, idle))
    check = probe("good", gpu_mib=512)
    monkeypatch.setattr(gpu, "_first_uuid", lambda: "GPU-b")
    assert busy(seen, check) == ""
    monkeypatch.setattr(gpu, "_first_uuid", lambda: "GPU-a")
    assert "912 MiB free" in busy(seen, check)
    monkeypatch.setattr(gpu, "_first_uuid", lambda: "GPU-c")
    assert "cannot tell" in busy(seen, check)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_p40.smoke import run

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(run, "cuda_devices", lambda: 0)
    monkeypatch.setattr(gpu, "look", lambda: NOTHING)
    assert choose_device("auto").device == "cpu"
    assert "no NVIDIA driver" in choose_device("auto").why
    with pytest.raises(MachineError, match="--device cuda, and no GPU"):
        choose_device("cuda")
    # A card that CUDA does not open is a finding for the checks, not a reason for the CPU.
    monkeypatch.setattr(gpu, "look", lambda: WITH_P40)
    assert choose_device("auto").device == "cuda"
    assert choose_device("cpu").device == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert choose_device("auto").why == "CUDA_VISIBLE_DEVICES hides every GPU"


def test_choosing() -> None:
    names = [check.name for check in catalog.CHECKS]
    assert len(set(names)) == len(names)
    assert [c.name for c in catalog.choose()] == names
    fast = catalog.choose(fast=True)
    assert not any(check.dear for check in fast)
    assert "triton" in [c.name for c in fast]
    # What a check needs comes along, in order.
    assert [c.name for c in catalog.choose(["checkpoint"])] == ["data", "ppo", "checkpoint"]
    assert [c.name for c in catalog.choose(["ppo"], ["data"])] == ["ppo"]
    assert "vllm" not in [c.name for c in catalog.choose(skip=["vllm"])]
    with pytest.raises(UsageError, match="no check 'mat-mul'; nearest: matmul"):
        catalog.choose(["mat-mul"])
    with pytest.raises(UsageError, match="every check is left out"):
        catalog.choose(["build"], ["build"])


def test_cheap_checks_come_first() -> None:
    dear = [check.dear for check in catalog.CHECKS]
    assert dear == sorted(dear)


def test_looking_is_quick_and_never_raises() -> None:
    began = time.monotonic()
    seen = gpu.look()
    assert seen.gpus or seen.problem
    assert time.monotonic() - began < 30
