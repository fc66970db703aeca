"""The part of the preflight that needs the stack: run as ``python -m verl_p40.train.inside``.

Reads the config, looks at the parquet files' schema and the prompts' length in tokens, and
prints one JSON document on standard output. It is told apart from what libraries print by its
first key.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_p40.data.schema import prompt_lengths
from verl_p40.errors import DataError
from verl_p40.train.compose import select

MARK = '{"verl_p40_preflight":'


def main(argv: Sequence[str]) -> int:
    """``inside.py CONFIG.json``: print the report; the exit code is always 0."""
    config = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    report = inspect(config)
    sys.stdout.flush()
    print(MARK + json.dumps(report) + "}", flush=True)
    return 0


def inspect(config: Mapping[str, Any]) -> dict[str, Any]:
    """``{"problem": {message, fix} | None, "rows": usable training rows, "versions": {...}}``."""
    try:
        rows = _check_files(config)
        return {"problem": None, "rows": rows, "versions": _versions()}
    except DataError as error:
        problem = {"message": error.message, "fix": error.fix}
        return {"problem": problem, "rows": 0, "versions": {}}


def _check_files(config: Mapping[str, Any]) -> int:
    tokenizer = _tokenizer(config)
    rollout = select(config, "actor_rollout_ref.rollout.name")
    if rollout in ("vllm", "sglang"):
        _check_importable(rollout)
    rows = _check_split(config, "data.train_files", tokenizer)
    _check_split(config, "data.val_files", tokenizer)
    return rows


def _check_importable(name: str) -> None:
    import importlib.util

    if importlib.util.find_spec(name) is None:
        raise DataError(
            f"actor_rollout_ref.rollout.name is {name}, which this training stack does not have",
            fix="actor_rollout_ref.rollout.name=hf",
        )


def _tokenizer(config: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer

    model = str(select(config, "actor_rollout_ref.model.path"))
    if Path(model).is_absolute() and not (Path(model) / "config.json").is_file():
        raise DataError(
            f"actor_rollout_ref.model.path: {model} is not a model folder (no config.json)",
            fix="give a folder made by save_pretrained, or a hub name",
        )
    try:
        return AutoTokenizer.from_pretrained(
            model, trust_remote_code=bool(select(config, "data.trust_remote_code"))
        )
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"actor_rollout_ref.model.path: cannot load the tokenizer of {model}: {first[:300]}",
            fix="download the model into a folder and give its path, or set HF_ENDPOINT to a mirror",
        ) from error


def _check_split(config: Mapping[str, Any], key: str, tokenizer: Any) -> int:
    """Check one split's files; returns the rows that verl will use of it."""
    value = select(config, key)
    files = [value] if isinstance(value, str) else list(value or [])
    if not files:
        raise DataError(f"{key} is empty", fix=f"{key}=/path/to/file.parquet")
    return sum(_check_file(config, key, Path(str(file)), tokenizer) for file in files)


def _check_file(config: Mapping[str, Any], key: str, path: Path, tokenizer: Any) -> int:
    import pyarrow.parquet as pq
    from pyarrow.lib import ArrowException

    if not path.is_file():
        raise DataError(
            f"{key}: {path} does not exist",
            fix="`verl-p40 data demo` or `verl-p40 data gsm8k` makes the presets' files",
        )
    try:
        file = pq.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{key}: {path} is not a parquet file ({error})") from error
    with file:
        have = set(file.schema_arrow.names)
        prompt = str(select(config, "data.prompt_key"))
        for column in _wanted_columns(config):
            if column not in have:
                raise DataError(
                    f"{key}: {path} has no column {column!r} (it has {', '.join(sorted(have))})",
                    fix="verl's schema is prompt, data_source, reward_model: see docs/train.md, "
                    f"or name your prompt column with {_key_of(column, prompt)}",
                )
        if file.metadata.num_rows == 0:
            raise DataError(f"{key}: {path} has no rows")
        prompts = file.read(columns=[prompt]).column(prompt).to_pylist()
    return _check_prompts(config, key, path, prompts, tokenizer)


def _wanted_columns(config: Mapping[str, Any]) -> list[str]:
    columns = [
        str(select(config, "data.prompt_key")),
        str(select(config, "data.reward_fn_key")),
    ]
    if not select(config, "reward_model.enable"):
        # The rule-based scorer reads reward_model.ground_truth of every row.
        columns.append("reward_model")
    return columns


def _key_of(column: str, prompt: str) -> str:
    return "data.prompt_key" if column == prompt else "data.reward_fn_key"


def _check_prompts(
    config: Mapping[str, Any], key: str, path: Path, prompts: list[Any], tokenizer: Any
) -> int:
    limit = int(select(config, "data.max_prompt_length"))
    for number, messages in enumerate(prompts, start=1):
        if not _is_conversation(messages):
            raise DataError(
                f"{key}: {path}: row {number}: column {select(config, 'data.prompt_key')!r} holds "
                f"{type(messages).__name__}, not a list of messages with role and content",
                fix="write [{'role': 'user', 'content': text}] in every row",
            )
    lengths = prompt_lengths(path, tokenizer, prompts)
    over = sum(length > limit for length in lengths)
    if over and select(config, "data.filter_overlong_prompts"):
        if over == len(lengths):
            raise DataError(
                f"{key}: every prompt of {path} is longer than data.max_prompt_length ({limit} "
                f"tokens; the shortest has {min(lengths)})",
                fix=f"data.max_prompt_length={max(lengths)}",
            )
        return len(lengths) - over
    if over and select(config, "data.truncation") == "error":
        raise DataError(
            f"{key}: {over} of {len(lengths)} prompts of {path.name} are longer than "
            f"data.max_prompt_length ({limit} tokens; the longest has {max(lengths)})",
            fix=f"data.filter_overlong_prompts=true leaves them out; "
            f"data.max_prompt_length={max(lengths)} takes them in",
        )
    return len(lengths)


def _is_conversation(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("verl", "torch", "transformers", "ray", "tensordict", "datasets", "vllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
