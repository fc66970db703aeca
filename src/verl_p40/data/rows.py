"""A row of verl's GSM8K parquet, and the parquet file of such rows.

The columns, the instruction and the form of the ground truth are those that verl's
``verl/utils/reward_score/gsm8k.py`` and ``RLHFDataset`` read (verl 0.4.1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa

DATA_SOURCE: Final = "openai/gsm8k"
"""What verl chooses the scorer by."""

INSTRUCTION: Final = 'Let\'s think step by step and output the final answer after "####".'

_FINAL_ANSWER: Final = re.compile(r"#### (-?[0-9.,]+)")
"""The scorer's own notion of a marked answer."""

_NUMBER: Final = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def final_answer(answer: str) -> str | None:
    """The number after ``####``, without thousands separators; None where there is none.

    It is compared with a response as text, so it must be what the scorer takes out of a right
    response: ``"#### 1,200"`` gives ``"1200"``.
    """
    found = _FINAL_ANSWER.search(answer)
    if found is None:
        return None
    number = found.group(1).replace(",", "")
    return number if _NUMBER.fullmatch(number) else None


def make_row(
    question: str, answer: str, ground_truth: str, split: str, index: int
) -> dict[str, Any]:
    """One row in verl's schema; the prompt is ``question``, a space and the instruction."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"content": f"{question} {INSTRUCTION}", "role": "user"}],
        "ability": "math",
        "reward_model": {"ground_truth": ground_truth, "style": "rule"},
        "extra_info": {"answer": answer, "index": index, "question": question, "split": split},
    }


def arrow_schema() -> pa.Schema:
    """The Arrow schema of the file. Only importable in a stack environment (needs pyarrow)."""
    import pyarrow as pa

    text = pa.string()
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct([("content", text), ("role", text)]))),
            ("ability", text),
            ("reward_model", pa.struct([("ground_truth", text), ("style", text)])),
            (
                "extra_info",
                pa.struct(
                    [("answer", text), ("index", pa.int64()), ("question", text), ("split", text)]
                ),
            ),
        ]
    )


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows to ``path``; the same rows give the same bytes under the same pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(list(rows), schema=arrow_schema()), path)
