"""What needs the training stack: parquet, the hub's client, verl's scorer, the tokenizer.

Everything runs the way a user's command does: the light side starts the stack's Python.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hubserver import Hub, serving

from verl_p40.data import hub as hubs
from verl_p40.data import prepare, schema, scorer
from verl_p40.data.problems import make_problems
from verl_p40.data.rows import arrow_schema, make_row, write_parquet
from verl_p40.errors import DataError, NetworkError
from verl_p40.stack.env import StackEnv
from verl_p40.stack.record import EnvRecord

pytestmark = pytest.mark.stack

RAW = [
    {"question": f"What is {n} and 1200?", "answer": f"It is {n + 1200}.\n#### {n + 1200:,}"}
    for n in range(40)
]


@pytest.fixture
def env() -> StackEnv:
    record = EnvRecord(
        flavor="cpu",
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        lock_digest="0" * 64,
        created="2025-01-01T00:00:00Z",
    )
    return StackEnv(Path(sys.prefix), Path(sys.executable), record)


def parquet_bytes(rows: list[dict[str, Any]], path: Path) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path.read_bytes()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    body = parquet_bytes(RAW, tmp_path / "raw.parquet")
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with serving(Hub(dict.fromkeys(hubs.FILES.values(), body))) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def read(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    assert pq.read_schema(path).remove_metadata().equals(arrow_schema())
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def check_all_right(made: prepare.Prepared) -> None:
    score = scorer.load()
    for split, path in (("train", made.train), ("test", made.test)):
        rows = read(path)
        assert len(rows) == len(RAW)
        for index, (row, raw) in enumerate(zip(rows, RAW, strict=True)):
            truth = row["reward_model"]["ground_truth"]
            assert row == make_row(raw["question"], raw["answer"], truth, split, index)
            assert score(raw["answer"], truth) == 1.0
            assert score(f"#### {int(truth) + 1}", truth) == 0.0


def test_from_the_hugging_face_hub_and_then_from_its_cache(
    env: StackEnv, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    made = prepare.gsm8k(
        stack_env=env,
        out=tmp_path / "out",
        any_count=True,
        progress=lambda text, _: said.append(text),
    )
    check_all_right(made)
    assert any(hub.url in text for text in said)
    assert any("datasets/openai/gsm8k/resolve" in line for line in hub.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check_all_right(prepare.gsm8k(stack_env=env, out=tmp_path / "again", any_count=True))


def test_an_existing_folder_is_reused_without_a_network(
    env: StackEnv, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_P40_DATA", str(tmp_path / "data"))
    prepare.gsm8k(stack_env=env, any_count=True)
    hub.requests.clear()
    made = prepare.ensure("gsm8k", stack_env=env)
    assert made.reused and made.facts["rows"] == {"train": 40, "test": 40}
    assert hub.requests == []


def test_offline_and_not_cached_is_one_line(
    env: StackEnv, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NetworkError, match="HF_HUB_OFFLINE is set") as caught:
        prepare.gsm8k(stack_env=env, out=tmp_path / "out")
    assert "--local" in caught.value.fix and "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


def test_no_route_to_the_hub_is_one_line(
    env: StackEnv, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(NetworkError, match=r"cannot reach http://127\.0\.0\.1:1") as caught:
        prepare.gsm8k(stack_env=env, out=tmp_path / "out")
    assert "HF_ENDPOINT" in caught.value.fix and "\n" not in caught.value.message


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_hub_that_refuses_is_one_line(
    env: StackEnv, hub: Hub, tmp_path: Path, status: int
) -> None:
    hub.status = status
    with pytest.raises(NetworkError) as caught:
        prepare.gsm8k(stack_env=env, out=tmp_path / "out")
    assert hub.url in caught.value.message and "\n" not in caught.value.message


def test_a_part_of_gsm8k_is_refused_unless_asked_for(
    env: StackEnv, hub: Hub, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="has 40 rows, and GSM8K has 7473"):
        prepare.gsm8k(stack_env=env, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_from_a_local_copy(env: StackEnv, tmp_path: Path, form: str) -> None:
    local = tmp_path / "copy"
    local.mkdir()
    if form == "saved":
        from datasets import Dataset, DatasetDict

        both = {split: Dataset.from_list(RAW) for split in ("train", "test")}
        DatasetDict(both).save_to_disk(str(local))
    for split in ("train", "test"):
        if form == "jsonl":
            (local / f"{split}.jsonl").write_text("\n".join(map(json.dumps, RAW)))
        elif form == "parquet":
            parquet_bytes(RAW, local / f"{split}-00000-of-00001.parquet")
    made = prepare.gsm8k(stack_env=env, out=tmp_path / "out", local=local, any_count=True)
    check_all_right(made)
    assert prepare.gsm8k(stack_env=env, out=tmp_path / "out", local=local, any_count=True).reused


def test_a_damaged_parquet_is_named(env: StackEnv, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(DataError, match=r"train\.parquet is not a readable parquet file"):
        prepare.gsm8k(stack_env=env, out=tmp_path / "out", local=tmp_path)


def demo_rows(count: int) -> list[dict[str, Any]]:
    problems, _ = make_problems(1, count, 3)
    return [
        make_row(p.question, p.answer, str(p.result), "train", i) for i, p in enumerate(problems)
    ]


def test_the_same_rows_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_parquet(demo_rows(64), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from verl_p40.data.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    problems, _ = make_problems(1, 600, 3)
    train_tokenizer(t for p in problems for t in (p.question, p.answer)).save_pretrained(folder)
    return folder


def test_the_tokenizer_is_reproducible_and_gives_back_its_text(model: Path) -> None:
    from transformers import AutoTokenizer

    from verl_p40.data.tokenizer import train_tokenizer

    problems, _ = make_problems(1, 600, 3)
    again = train_tokenizer(t for p in problems for t in (p.question, p.answer))
    loaded = AutoTokenizer.from_pretrained(model)
    assert again.backend_tokenizer.to_str() == loaded.backend_tokenizer.to_str()
    text = demo_rows(1)[0]["prompt"][0]["content"] + "\n#### 1,234 é"
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.padding_side == "left"
    assert loaded.pad_token_id != loaded.eos_token_id
    chat = loaded.apply_chat_template(demo_rows(1)[0]["prompt"], add_generation_prompt=True)
    assert loaded.decode(chat).endswith("<|im_end|>\n<|im_start|>assistant\n")


def check(*args: object) -> tuple[int, dict[str, Any]]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = schema.main([*map(str, args), "--json"])
    return code, json.loads(said.getvalue())


def test_check_is_a_module_that_prints_one_line_of_json(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verl_p40.data.schema", str(tmp_path / "no.parquet"), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5
    assert "does not exist" in json.loads(done.stdout)["message"]


def test_check_counts_rows_and_tokens(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(demo_rows(50), path)
    code, report = check(path, "--model", model, "--max-prompt-length", 48)
    assert code == 0 and report["ok"] and report["rows"] == 50
    assert report["data_sources"] == {"openai/gsm8k": 50}
    assert 20 < report["longest_prompt"] <= 48 and report["over_limit"] == 0
    shorter = report["longest_prompt"] - 1
    code, report = check(path, "--model", model, "--max-prompt-length", shorter)
    assert code == 0 and report["over_limit"] >= 1
    code, report = check(path, "--model", model, "--max-prompt-length", 3)
    assert code == 5 and "every prompt is longer than 3 tokens" in report["message"]


TEXT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("prompt", None, "has no column 'prompt'"),
        ("data_source", None, "has no column 'data_source'"),
        ("reward_model", None, "has no column 'reward_model'"),
        ("prompt", ["a", "b", "c"], "row 1: column 'prompt' is str, not a list"),
        ("prompt", [TEXT, TEXT, []], "row 3: column 'prompt' has no message"),
        ("prompt", [TEXT, TEXT, None], "row 3: column 'prompt' is NoneType, not a list"),
        ("prompt", [[{"role": "user"}]] * 3, "row 1: column 'prompt' has a message without"),
        (
            "prompt",
            [TEXT, [{"role": "user", "content": " "}], TEXT],
            "row 2: column 'prompt' has an empty message",
        ),
        ("data_source", ["x", "", "x"], "row 2: column 'data_source' is empty"),
        ("reward_model", [{"style": "rule"}] * 3, "row 1: column 'reward_model' has no ground"),
        (
            "reward_model",
            [{"ground_truth": "1"}, {"ground_truth": "2"}, {"ground_truth": None}],
            "row 3: column 'reward_model' has an empty ground_truth",
        ),
    ],
)
def test_check_names_file_row_and_column(
    tmp_path: Path, column: str, values: list[Any] | None, message: str
) -> None:
    rows = demo_rows(3)
    for index, row in enumerate(rows):
        del row[column]
        if values is not None:
            row[column] = values[index]
    path = tmp_path / "bad.parquet"
    parquet_bytes(rows, path)
    code, report = check(path)
    assert code == 5 and not report["ok"]
    assert message in report["message"] and str(path) in report["message"]


def test_check_of_nothing(tmp_path: Path) -> None:
    code, report = check(tmp_path / "no.parquet")
    assert code == 5 and "does not exist" in report["message"]
    write_parquet([], tmp_path / "empty.parquet")
    code, report = check(tmp_path / "empty.parquet")
    assert code == 5 and "has no rows" in report["message"]
    (tmp_path / "text.parquet").write_text("hello")
    code, report = check(tmp_path / "text.parquet")
    assert code == 5 and "is not a readable parquet file" in report["message"]
