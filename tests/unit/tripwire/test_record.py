from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_p40.tripwire import record
from verl_p40.tripwire.record import Trip

TRIP = Trip(
    operator="aten._to_copy.default",
    made=("bfloat16[4, 96]",),
    inputs=("float32[4, 96]",),
    site="transformers/models/qwen2/modeling_qwen2.py:70 forward",
    via="verl/workers/actor/dp_actor.py:101 _forward_micro_batch",
    role="actor",
    pid=7,
)


def test_the_line_names_everything() -> None:
    assert TRIP.line() == (
        "half precision in actor: aten._to_copy.default made bfloat16[4, 96] from float32[4, 96] "
        "at transformers/models/qwen2/modeling_qwen2.py:70 forward "
        "(via verl/workers/actor/dp_actor.py:101 _forward_micro_batch)"
    )


def test_the_first_trip_stays(tmp_path: Path) -> None:
    assert record.read_trip(tmp_path) is None
    assert record.write_trip(tmp_path, TRIP)
    later = Trip(**{**TRIP.__dict__, "operator": "aten.mm.default"})
    assert not record.write_trip(tmp_path, later)
    assert record.read_trip(tmp_path) == TRIP
    text = (tmp_path / record.TRIP).read_text()
    assert text.count("\n") == 1
    assert json.loads(text)["role"] == "actor"
    assert [p.name for p in tmp_path.iterdir()] == [record.TRIP]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"operator": "x"}'])
def test_a_damaged_record_is_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / record.TRIP).write_text(damage)
    assert record.read_trip(tmp_path) is None


def test_counts_add_up_over_processes_and_clear(tmp_path: Path) -> None:
    assert not record.armed(tmp_path)
    counter = record.Counter(tmp_path)
    assert record.armed(tmp_path)
    counter.write(3)
    counter.write(5)
    (tmp_path / record.ARMED / "1.count").write_bytes((10).to_bytes(8, "little"))
    (tmp_path / record.ARMED / "2.count").write_bytes(b"half")
    assert record.operators(tmp_path) == 15
    record.write_trip(tmp_path, TRIP)
    record.clear(tmp_path)
    assert not record.armed(tmp_path)
    assert record.read_trip(tmp_path) is None
