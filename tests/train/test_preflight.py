"""What the preflight says about model and data, with the stack's own libraries. No Ray."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from verl_p40.train.inside import inspect

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1 + 2"}],
    "reward_model": {"style": "rule", "ground_truth": "3"},
}


@pytest.fixture
def config(assets: Path) -> dict[str, Any]:
    """The settings that the preflight reads, as verl's defaults have them."""
    return {
        "data": {
            "train_files": str(assets / "train.parquet"),
            "val_files": [str(assets / "test.parquet")],
            "prompt_key": "prompt",
            "reward_fn_key": "data_source",
            "max_prompt_length": 16,
            "filter_overlong_prompts": False,
            "truncation": "error",
            "trust_remote_code": False,
        },
        "actor_rollout_ref": {
            "model": {"path": str(assets / "model")},
            "rollout": {"name": "hf"},
        },
        "reward_model": {"enable": False},
    }


def _problem(config: dict[str, Any], **data: Any) -> tuple[str, str]:
    changed = copy.deepcopy(config)
    changed["data"].update(data)
    report = inspect(changed)
    assert report["problem"] is not None
    return report["problem"]["message"], report["problem"]["fix"]


def _write(path: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_good_data_is_counted(config: dict[str, Any]) -> None:
    report = inspect(config)
    assert report["problem"] is None
    assert report["rows"] == 64
    assert report["versions"]["verl"] == "0.4.1"


def test_a_missing_file(config: dict[str, Any], tmp_path: Path) -> None:
    message, fix = _problem(config, val_files=str(tmp_path / "no.parquet"))
    assert message == f"data.val_files: {tmp_path}/no.parquet does not exist"
    assert "verl-p40 data" in fix


def test_a_file_that_is_no_parquet(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("prompt,answer\n")
    message, _ = _problem(config, train_files=[str(tmp_path / "x.parquet")])
    assert "is not a parquet file" in message


@pytest.mark.parametrize("column", ["prompt", "data_source", "reward_model"])
def test_a_missing_column(config: dict[str, Any], tmp_path: Path, column: str) -> None:
    rows = [{k: v for k, v in ROW.items() if k != column}]
    message, _ = _problem(config, train_files=_write(tmp_path / "x.parquet", rows))
    assert f"has no column '{column}' (it has " in message


def test_a_prompt_that_is_no_conversation(config: dict[str, Any], tmp_path: Path) -> None:
    rows = [{**ROW, "prompt": "1 + 2"}]
    message, fix = _problem(config, train_files=_write(tmp_path / "x.parquet", rows))
    assert "holds str, not a list of messages" in message
    assert "'role': 'user'" in fix


@pytest.mark.parametrize("prompt", [None, []])
def test_one_bad_prompt_among_good_ones(
    config: dict[str, Any], tmp_path: Path, prompt: list[Any] | None
) -> None:
    rows = [ROW, {**ROW, "prompt": prompt}, ROW]
    message, _ = _problem(config, train_files=_write(tmp_path / "x.parquet", rows))
    assert "x.parquet: row 2: column 'prompt' holds " in message


def test_a_tokenizer_without_a_chat_template(config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = config["actor_rollout_ref"]["model"]["path"]
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((Path(source) / "config.json").read_bytes())
    config["actor_rollout_ref"]["model"]["path"] = str(tmp_path)
    message, _ = _problem(config)
    assert "train.parquet: the tokenizer cannot format a chat: " in message


def test_an_empty_file(config: dict[str, Any], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([ROW]).slice(0, 0)
    pq.write_table(table, tmp_path / "x.parquet")
    assert "has no rows" in _problem(config, train_files=str(tmp_path / "x.parquet"))[0]


def test_prompts_that_are_too_long(config: dict[str, Any], tmp_path: Path) -> None:
    """One token a character and one for the answer's beginning: 10 + 1 and 5 + 1."""
    long = {**ROW, "prompt": [{"role": "user", "content": "1234567890"}]}
    path = _write(tmp_path / "x.parquet", [long, ROW, long])
    message, fix = _problem(config, train_files=path, max_prompt_length=10)
    assert "2 of 3 prompts of x.parquet are longer than data.max_prompt_length (10" in message
    assert "the longest has 11" in message
    assert "filter_overlong_prompts=true" in fix
    changed = copy.deepcopy(config)
    changed["data"].update(train_files=path, max_prompt_length=10, filter_overlong_prompts=True)
    assert inspect(changed)["rows"] == 1
    message, fix = _problem(
        config, train_files=path, max_prompt_length=2, filter_overlong_prompts=True
    )
    assert "every prompt of" in message
    cut = copy.deepcopy(config)
    cut["data"].update(train_files=path, max_prompt_length=10, truncation="left")
    assert inspect(cut)["rows"] == 3


def test_a_folder_that_is_no_model(config: dict[str, Any], tmp_path: Path) -> None:
    config["actor_rollout_ref"]["model"]["path"] = str(tmp_path)
    message, _ = _problem(config)
    assert "is not a model folder" in message


def test_a_rollout_that_is_not_installed(config: dict[str, Any]) -> None:
    config["actor_rollout_ref"]["rollout"]["name"] = "sglang"
    message, fix = _problem(config)
    assert "rollout.name is sglang" in message
    assert fix == "actor_rollout_ref.rollout.name=hf"


def test_the_command_says_it_in_one_line_and_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    done = cli.run(str(cli.preset), "data.train_files=gone.parquet")
    assert done.returncode == 5, done.stdout
    (error,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert error == f"error: data.train_files: {tmp_path}/gone.parquet does not exist"
    assert not cli.runs.exists()
