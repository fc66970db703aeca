"""GSM8K as verl's parquet, in a stack environment: ``python -m verl_p40.data.gsm8k DIR SOURCE``.

Gives the rows that verl's ``examples/data_preprocess/gsm8k.py`` gives (instruction, ground truth,
split, columns), after checking every one of them: a row that the scorer could never call right
stops the conversion, naming file, row and column.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from verl_p40.data import child, hub, scorer
from verl_p40.data.rows import final_answer, make_row, write_parquet
from verl_p40.errors import DataError

COUNTS: Final = {"train": 7473, "test": 1319}
"""Rows of GSM8K (https://github.com/openai/grade-school-math, README)."""

_SUBFOLDERS: Final = (".", "main", "data", "grade_school_math/data", "snapshots/*/main")
"""Where a copy keeps its splits: a folder of files, a clone of the hub's or of OpenAI's
repository, or the hub's cache."""

_FIX_LOCAL: Final = (
    "give the folder that holds train.jsonl and test.jsonl, or train-*.parquet and "
    "test-*.parquet, or a data set saved by datasets.save_to_disk"
)


@dataclass(frozen=True)
class Raw:
    """A row as GSM8K has it, and where it stands: ``number`` counts from 1."""

    file: Path
    number: int
    question: str
    answer: str


def find_splits(folder: Path) -> dict[str, list[Path]]:
    """The files of each split in a local copy, in order.

    Raises:
        DataError: no copy is there, or one split is missing.
    """
    if not folder.exists():
        raise DataError(f"--local {folder} does not exist", fix=_FIX_LOCAL)
    if not folder.is_dir():
        raise DataError(f"--local {folder} is a file, not a folder", fix=_FIX_LOCAL)
    if (folder / "dataset_dict.json").is_file():
        return {split: [_saved_split(folder, split)] for split in COUNTS}
    partly: str | None = None
    for pattern in _SUBFOLDERS:
        for place in [folder] if pattern == "." else sorted(folder.glob(pattern)):
            found = {split: _split_files(place, split) for split in COUNTS}
            if all(found.values()):
                return found
            for split, files in found.items():
                if files:
                    other = next(name for name in COUNTS if name != split)
                    partly = f"--local {folder}: {files[0].name} has no {other} split beside it"
    raise DataError(partly or f"--local {folder} holds no copy of GSM8K", fix=_FIX_LOCAL)


def _saved_split(folder: Path, split: str) -> Path:
    if not (folder / split / "state.json").is_file():
        raise DataError(f"--local {folder}: the saved data set has no split {split!r}")
    return folder / split


def _split_files(folder: Path, split: str) -> list[Path]:
    single = folder / f"{split}.jsonl"
    if single.is_file():
        return [single]
    shards = sorted(folder.glob(f"{split}-*.parquet"))
    single = folder / f"{split}.parquet"
    return shards or ([single] if single.is_file() else [])


def read_rows(files: Iterable[Path]) -> Iterator[Raw]:
    """Every row of the files in turn.

    Raises:
        DataError: naming file, row and column.
    """
    for path in files:
        if path.is_dir():
            items: Iterator[Any] = _read_saved(path)
        elif path.suffix == ".jsonl":
            items = _read_jsonl(path)
        else:
            items = _read_parquet(path)
        for number, item in enumerate(items, start=1):
            yield Raw(
                path,
                number,
                _text(path, number, item, "question"),
                _text(path, number, item, "answer"),
            )


def _text(path: Path, number: int, item: Any, column: str) -> str:
    if not isinstance(item, dict):
        raise DataError(f"{path}: row {number} is {type(item).__name__}, not an object")
    if column not in item:
        raise DataError(
            f"{path}: row {number} has no column {column!r} (it has {', '.join(sorted(item))})",
            fix="GSM8K has the columns question and answer",
        )
    value = item[column]
    if not isinstance(value, str) or not value.strip():
        kind = "is empty" if isinstance(value, str) else f"is {type(value).__name__}, not text"
        raise DataError(f"{path}: row {number}: column {column!r} {kind}")
    return value


def _read_jsonl(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        number = 0
        try:
            for line in lines:
                number += 1
                if line.strip():
                    yield json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: row {number + 1} is not UTF-8 text") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}: row {number}, column {error.colno} is not JSON: {error.msg}",
                fix="the file may be cut off: get it again",
            ) from error


def _read_parquet(path: Path) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        words = " ".join(str(error).split())
        raise DataError(
            f"{path} is not a readable parquet file: {words[:200]}",
            fix="the file may be cut off, or a Git LFS pointer: get it again",
        ) from error


def _read_saved(folder: Path) -> Iterator[Any]:
    from datasets import load_from_disk

    try:
        yield from load_from_disk(str(folder))
    except (ValueError, FileNotFoundError) as error:
        raise DataError(f"{folder} is not a saved data set: {error}") from error


def convert(
    rows: Iterable[Raw], split: str, score: scorer.Score, expected: int | None
) -> list[dict[str, Any]]:
    """Rows in verl's schema, each checked with verl's own scorer.

    Args:
        expected: how many rows there must be; None takes any number but 0.

    Raises:
        DataError: naming file, row and column; or the number of rows.
    """
    made: list[dict[str, Any]] = []
    raw: Raw | None = None
    for raw in rows:
        truth = final_answer(raw.answer)
        if truth is None:
            raise DataError(
                f"{raw.file}: row {raw.number}: column 'answer' has no number behind '####'",
                fix="GSM8K's answers end with a line like '#### 72'",
            )
        if score(raw.answer, truth) != 1.0:
            raise DataError(
                f"{raw.file}: row {raw.number}: column 'answer' ends with another number than "
                f"its first '#### {truth}': verl's scorer would never accept it"
            )
        made.append(make_row(raw.question, raw.answer, truth, split, len(made)))
        if len(made) % 500 == 0:
            child.say(f"{split}: {len(made)} rows", len(made) / expected if expected else None)
    if not made or (expected is not None and len(made) != expected):
        where = f"{raw.file.parent}: " if raw else ""
        wanted = f"GSM8K has {expected}" if expected else "at least one is needed"
        raise DataError(
            f"{where}the {split} split has {len(made)} rows, and {wanted}",
            fix="get the whole data set, or take a part of it on purpose with --any-count",
        )
    return made


def build(folder: Path, splits: dict[str, list[Path]], any_count: bool) -> dict[str, Any]:
    """Fill ``folder`` with ``train.parquet`` and ``test.parquet``; returns the counts."""
    score = scorer.load()
    rows = {}
    for split, files in splits.items():
        expected = None if any_count else COUNTS[split]
        made = convert(read_rows(files), split, score, expected)
        child.say(f"writing {split}.parquet", None)
        write_parquet(made, folder / f"{split}.parquet")
        rows[split] = len(made)
    return {"rows": rows}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="verl_p40.data.gsm8k")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local", type=Path)
    parser.add_argument("--source", choices=hub.SOURCES, default="hf")
    parser.add_argument("--any-count", action="store_true")
    args = parser.parse_args(argv)

    def work() -> dict[str, Any]:
        splits = find_splits(args.local) if args.local else hub.download(args.source)
        return build(args.folder, splits, args.any_count)

    return child.serve(work)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
