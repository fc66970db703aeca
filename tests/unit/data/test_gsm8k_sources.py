"""Reading copies of GSM8K, and what is said of a bad one (no pyarrow needed for jsonl)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_p40.data.gsm8k import COUNTS, convert, find_splits, read_rows
from verl_p40.errors import DataError

GOOD = {"question": "How many?", "answer": "1+1=2\n#### 2"}


def score(response: str, truth: str) -> float:
    return float(response.split("#### ")[-1].replace(",", "") == truth)


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


@pytest.mark.parametrize("place", [".", "data", "grade_school_math/data"])
def test_finds_the_jsonl_of_openais_repository(tmp_path: Path, place: str) -> None:
    for split in COUNTS:
        write(tmp_path / place / f"{split}.jsonl", GOOD)
    found = find_splits(tmp_path)
    assert [files[0].name for files in found.values()] == ["train.jsonl", "test.jsonl"]


@pytest.mark.parametrize("place", [".", "main", "snapshots/0123abcd/main"])
def test_finds_the_hubs_parquet(tmp_path: Path, place: str) -> None:
    for split in COUNTS:
        write(tmp_path / place / f"{split}-00000-of-00001.parquet")
    found = find_splits(tmp_path)
    assert {split: len(files) for split, files in found.items()} == {"train": 1, "test": 1}


def test_a_missing_split_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", GOOD)
    with pytest.raises(DataError, match=r"train\.jsonl has no test split beside it"):
        find_splits(tmp_path)


def test_no_copy_no_folder_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no copy"):
        find_splits(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        find_splits(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a file"):
        find_splits(write(tmp_path / "train.jsonl", GOOD))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"question": "cut', r"row 2, column 18 is not JSON"),
        ("[1, 2]", r"row 2 is list, not an object"),
        ({"question": "Q"}, r"row 2 has no column 'answer' \(it has question\)"),
        ({"question": " ", "answer": "#### 1"}, r"row 2: column 'question' is empty"),
        ({"question": 3, "answer": "#### 1"}, r"row 2: column 'question' is int, not text"),
        ({"question": "Q", "answer": "1"}, r"row 2: column 'answer' has no number behind"),
        ({"question": "Q", "answer": "#### 1 #### 2"}, r"row 2: column 'answer' ends with another"),
    ],
)
def test_a_bad_row_is_named_by_file_row_and_column(
    tmp_path: Path, bad: object, message: str
) -> None:
    path = write(tmp_path / "train.jsonl", GOOD, bad, GOOD)
    with pytest.raises(DataError, match=message) as caught:
        convert(read_rows([path]), "train", score, None)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"question": "\xff"}\n')
    with pytest.raises(DataError, match=r"is not UTF-8"):
        convert(read_rows([path]), "train", score, None)


def test_rows_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", GOOD, GOOD)
    with pytest.raises(DataError, match="test split has 2 rows, and GSM8K has 1319") as caught:
        convert(read_rows([path]), "test", score, COUNTS["test"])
    assert "--any-count" in caught.value.fix
    assert len(convert(read_rows([path]), "test", score, None)) == 2
    with pytest.raises(DataError, match="at least one"):
        convert(iter([]), "test", score, None)


def test_index_and_split_count_through_all_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, GOOD, GOOD) for name in ("a.jsonl", "b.jsonl")]
    rows = convert(read_rows(paths), "train", score, 4)
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2, 3]
    assert {row["extra_info"]["split"] for row in rows} == {"train"}
