"""Is a parquet file one that verl can train on? ``python -m verl_p40.data.schema PATH``.

Runs in a stack environment (pyarrow, and transformers when prompts are counted in tokens).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from verl_p40.errors import DataError, ExitCode

if TYPE_CHECKING:
    import pyarrow.parquet as pq

REQUIRED: Final = ("data_source", "prompt", "reward_model")
"""Columns that verl's trainer and reward manager read of every row (``ability`` and
``extra_info`` are read only where they exist)."""

_FIX_SCHEMA: Final = "see docs/data.md for the columns; `verl-p40 data gsm8k` makes such a file"
_BATCH: Final = 512


def check_parquet(
    path: Path,
    *,
    tokenizer_path: str | None = None,
    max_prompt_length: int | None = None,
    prompt_key: str = "prompt",
) -> dict[str, Any]:
    """Check every row of ``path``.

    Args:
        tokenizer_path: a folder or hub name for ``AutoTokenizer``; None counts no tokens.
        max_prompt_length: tokens that a prompt with the chat template may have.

    Returns:
        ``rows``, ``data_sources`` (name → rows), and with a tokenizer ``longest_prompt``,
        ``over_limit`` (rows over ``max_prompt_length``) and ``longest_row`` (from 1).

    Raises:
        DataError: the file is missing, unreadable or empty, lacks a column, or a row has a value
            that verl cannot use; with a limit, all prompts are over it. Rows count from 1.
    """
    if not path.is_file():
        raise DataError(
            f"{path} does not exist",
            fix="`verl-p40 data demo` or `verl-p40 data gsm8k` makes the presets' files",
        )
    sources: dict[str, int] = {}
    lengths: list[int] = []
    tokenizer = _tokenizer(tokenizer_path) if tokenizer_path else None
    with _open(path) as file:
        names = file.schema_arrow.names
        required = [prompt_key if name == "prompt" else name for name in REQUIRED]
        missing = [name for name in required if name not in names]
        if missing:
            raise DataError(
                f"{path} has no column {missing[0]!r} (it has {', '.join(names)})", fix=_FIX_SCHEMA
            )
        if file.metadata.num_rows == 0:
            raise DataError(f"{path} has no rows")
        for first, rows in _batches(path, file, required):
            for number, row in enumerate(rows, start=first):
                _check_row(path, number, row, prompt_key)
                sources[row["data_source"]] = sources.get(row["data_source"], 0) + 1
            if tokenizer is not None:
                lengths += prompt_lengths(path, tokenizer, [row[prompt_key] for row in rows])
        report: dict[str, Any] = {"path": str(path), "rows": file.metadata.num_rows}
    report["data_sources"] = sources
    if lengths:
        report.update(_length_report(path, lengths, max_prompt_length))
    return report


def _length_report(path: Path, lengths: list[int], limit: int | None) -> dict[str, Any]:
    over = sum(length > limit for length in lengths) if limit is not None else 0
    if over == len(lengths):
        raise DataError(
            f"{path}: every prompt is longer than {limit} tokens "
            f"(the shortest has {min(lengths)}, the longest {max(lengths)})",
            fix=f"data.max_prompt_length={max(lengths)}",
        )
    return {
        "longest_prompt": max(lengths),
        "longest_row": lengths.index(max(lengths)) + 1,
        "max_prompt_length": limit,
        "over_limit": over,
    }


def _open(path: Path) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        words = " ".join(str(error).split())
        raise DataError(f"{path} is not a readable parquet file: {words[:200]}") from error


def _batches(
    path: Path, file: pq.ParquetFile, columns: Sequence[str]
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    import pyarrow as pa

    first = 1
    try:
        for batch in file.iter_batches(batch_size=_BATCH, columns=list(columns)):
            rows = batch.to_pylist()
            yield first, rows
            first += len(rows)
    except (pa.ArrowException, OSError) as error:
        words = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read after row {first - 1}: {words[:200]}") from error


def _check_row(path: Path, number: int, row: dict[str, Any], prompt_key: str) -> None:
    def bad(column: str, what: str) -> DataError:
        return DataError(f"{path}: row {number}: column {column!r} {what}", fix=_FIX_SCHEMA)

    prompt = row[prompt_key]
    if not isinstance(prompt, list):
        raise bad(prompt_key, f"is {type(prompt).__name__}, not a list of chat messages")
    if not prompt:
        raise bad(prompt_key, "has no message")
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise bad(prompt_key, "has a message without role and content")
        if not isinstance(message["content"], str) or not message["content"].strip():
            raise bad(prompt_key, "has an empty message")
    if not isinstance(row["data_source"], str) or not row["data_source"]:
        raise bad("data_source", "is empty: verl chooses the scorer by it")
    reward = row["reward_model"]
    if not isinstance(reward, dict) or "ground_truth" not in reward:
        raise bad("reward_model", "has no ground_truth")
    if reward["ground_truth"] in (None, ""):
        raise bad("reward_model", "has an empty ground_truth: no response could be right")


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        words = " ".join(str(error).split())
        raise DataError(f"cannot load the tokenizer of {path}: {words[:200]}") from error


def prompt_lengths(path: Path, tokenizer: Any, prompts: Sequence[Any]) -> list[int]:
    """Tokens of each prompt (a list of chat messages) with the chat template, as verl counts them.

    Raises:
        DataError: the tokenizer has no chat template; ``path`` is named in it.
    """
    lengths: list[int] = []
    for start in range(0, len(prompts), _BATCH):
        try:
            encoded = tokenizer.apply_chat_template(
                prompts[start : start + _BATCH], add_generation_prompt=True
            )
        except ValueError as error:
            words = " ".join(str(error).split())
            raise DataError(f"{path}: the tokenizer cannot format a chat: {words[:200]}") from error
        lengths += [len(ids) for ids in encoded]
    return lengths


def main(argv: Sequence[str]) -> int:
    """Print the report, or one line with the problem; with ``--json`` one JSON object either way."""
    parser = argparse.ArgumentParser(prog="python -m verl_p40.data.schema", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--model", help="folder or hub name of the model, to count tokens")
    parser.add_argument("--max-prompt-length", type=int)
    parser.add_argument("--prompt-key", default="prompt")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        report = check_parquet(
            args.path,
            tokenizer_path=args.model,
            max_prompt_length=args.max_prompt_length,
            prompt_key=args.prompt_key,
        )
    except DataError as error:
        if args.json:
            print(json.dumps({"ok": False, "message": error.message, "fix": error.fix}))
        else:
            print(f"error: {error.message}", file=sys.stderr)
        return int(ExitCode.DATA)
    if args.json:
        print(json.dumps({"ok": True, **report}))
    else:
        print(", ".join(f"{key} {value}" for key, value in report.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
