"""``verl-p40 plan`` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_p40.cli import main
from verl_p40.train import source


@pytest.fixture(autouse=True)
def composed(verl_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "config_folder", lambda stack, say=None: verl_config)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main.run(["plan", *words])
    out, err = capsys.readouterr()
    return int(done.value.code or 0), out, err


def test_p40_ppo_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert "fits: actor update needs" in out
    for phase in ("load", "rollout", "log-prob", "reference", "values", "checkpoint"):
        assert phase in out


def test_what_does_not_fit_is_told_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "p40-ppo", "--model", "Qwen/Qwen2.5-1.5B")
    assert code == 1
    assert "does not fit" in out
    assert "actor_rollout_ref.actor.fsdp_config.offload_policy=true" in out


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "p40-ppo", "--json", "--gpu-memory", "24451")
    assert code == 0
    found = json.loads(out)
    assert found["card_bytes"] == 24451 * 2**20
    for phase in found["phases"]:
        assert sum(phase["parts"].values()) == phase["allocated_bytes"]
    peak = max(found["phases"], key=lambda p: p["allocated_bytes"])
    assert peak["name"] == found["peak_phase"]
    assert found["card_bytes"] - found["needed_bytes"] == found["margin_bytes"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("nonsense",), 2, "unknown preset"),
        (("p40-ppo", "--model", "someone/else"), 5, "someone/else"),
        (("p40-ppo", "actor_rollout_ref.rollout.name=sglang"), 2, "sglang"),
        (("p40-ppo", "critic.strategy=megatron"), 2, "megatron"),
        (("p40-ppo", "--gpu-memory", "0"), 2, "gpu-memory"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, text: str
) -> None:
    status, _, err = run(capsys, *words)
    assert status == code
    assert text in err


def test_the_cpu_demo_needs_no_card(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = run(capsys, "cpu-demo", "--model", "Qwen/Qwen2.5-0.5B")
    assert code == 0
    assert "peak: " in out
