from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from verl_p40.train.metrics import History, StepRow, Tail, cut_after, parse, row

TRAINED = {
    "critic/score/mean": 0.25,
    "critic/rewards/mean": 0.2,
    "actor/entropy": 1.5,
    "actor/reward_kl_penalty": 0.004,
    "critic/vf_loss": 0.01,
    "response_length/mean": 12.5,
    "timing_s/step": 0.8,
}
VALIDATED = {"val-core/openai/gsm8k/reward/mean@1": 0.5, "val-aux/openai/gsm8k/x/mean@1": 0.9}


def _line(step: int, data: dict[str, float]) -> bytes:
    return json.dumps({"step": step, "data": data}).encode() + b"\n"


def test_a_row_takes_the_reward_before_the_penalty() -> None:
    assert row(3, TRAINED) == StepRow(3, 0.25, None, 0.004, 1.5, 0.01, 12.5, 0.8)


def test_grpo_has_a_kl_loss_and_no_critic() -> None:
    got = row(1, {"critic/score/mean": 0.0, "actor/kl_loss": 0.02, "actor/ppo_kl": 0.1})
    assert (got.reward, got.kl, got.value_loss) == (0.0, 0.02, None)
    assert got.trained


def test_accuracy_is_the_mean_of_the_core_metrics() -> None:
    two = {**VALIDATED, "val-core/other/acc/mean@1": 1.0, "val-core/other/acc/best@4/mean": 0.9}
    assert row(0, VALIDATED).accuracy == 0.5
    assert row(0, two).accuracy == 0.75
    assert not row(0, VALIDATED).trained


def test_the_tail_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.lines() == []
    whole = _line(1, TRAINED)
    path.write_bytes(whole + b'{"step": 2, "da')
    assert tail.lines() == [whole[:-1]]
    assert tail.rest() == b'{"step": 2, "da'
    assert tail.lines() == []
    with path.open("ab") as file:
        file.write(b'ta": {}}\n')
    (line,) = tail.lines()
    assert parse(line) == (2, {})


def test_a_log_that_is_moved_away_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(b"an earlier attempt\none\n")
    with path.open("ab", buffering=0) as writer:
        tail = Tail(path, len(b"an earlier attempt\n"))
        assert tail.lines() == [b"one"]
        path.rename(tmp_path / "train.log.1")
        # The writer goes on in the moved file, and nothing may have its name yet.
        writer.write(b"two\nthr")
        assert tail.lines() == [b"two"]
        assert tail.all() == b"one\ntwo\nthr"
        writer.write(b"ee\n")
        path.write_bytes(b"four\n")
        assert tail.lines() == [b"three", b"four"]
        assert tail.all() == b"four\n"
    tail.close()


def test_a_log_that_is_cut_to_nothing_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(b"an earlier attempt\none\n")
    with path.open("ab", buffering=0) as writer:
        tail = Tail(path, len(b"an earlier attempt\n"))
        assert tail.lines() == [b"one"]
        os.truncate(path, 0)
        assert tail.lines() == []
        writer.write(b"two\n")
        assert tail.lines() == [b"two"]
        assert tail.all() == b"two\n"
    tail.close()


def test_records_of_a_step_merge(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(_line(0, VALIDATED) + _line(1, TRAINED) + _line(1, VALIDATED))
    history = History.read(path)
    assert [(r.step, r.reward, r.accuracy) for r in history.rows()] == [
        (0, None, 0.5),
        (1, 0.25, 0.5),
    ]
    assert history.last_step == 1


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"step": "x", "data": {}}', b"\xff\xfe"])
def test_damaged_lines_are_passed_over(damage: bytes) -> None:
    history = History()
    rows = history.extend([damage, _line(4, TRAINED)])
    assert [r.step for r in rows] == [4]


def test_cutting_keeps_whole_lines_up_to_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = _line(0, VALIDATED) + _line(1, TRAINED) + _line(2, TRAINED)
    path.write_bytes(kept + _line(3, TRAINED) + _line(4, TRAINED) + b'{"step": 5')
    assert cut_after(path, 2) == 4
    assert path.read_bytes() == kept
    assert cut_after(path, 2) == 0
    assert cut_after(path, -1) == 2
    assert path.read_bytes() == b""
    assert cut_after(tmp_path / "absent", 3) == 0
