"""Ground truths and rows in verl's schema."""

from __future__ import annotations

import pytest

from verl_p40.data.rows import INSTRUCTION, final_answer, make_row


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("48/2 = 24\n#### 72", "72"),
        ("#### 1,200", "1200"),
        ("#### -5", "-5"),
        ("#### 2.5", "2.5"),
        ("#### 35,000,000", "35000000"),
        ("#### 7 apples", "7"),
        ("no mark 72", None),
        ("####72", None),
        ("#### $72", None),
        ("#### ...", None),
        ("#### ,", None),
        ("", None),
    ],
)
def test_final_answer(answer: str, expected: str | None) -> None:
    assert final_answer(answer) == expected


def test_row_has_verls_columns() -> None:
    row = make_row("How many?", "1+1=2\n#### 2", "2", "test", 7)
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"How many? {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {
            "split": "test",
            "index": 7,
            "answer": "1+1=2\n#### 2",
            "question": "How many?",
        },
    }
