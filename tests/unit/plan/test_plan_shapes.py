from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_p40.errors import DataError
from verl_p40.plan import shapes


@pytest.mark.parametrize(("name", "count"), shapes.published_parameters().items())
def test_parameters_are_those_published(name: str, count: int) -> None:
    assert shapes.find(name).parameters == count


def test_an_instruct_model_is_its_base() -> None:
    base, tuned = shapes.find("Qwen/Qwen2.5-3B"), shapes.find("Qwen/Qwen2.5-3B-Instruct")
    assert tuned.parameters == base.parameters
    assert tuned.name == "Qwen/Qwen2.5-3B-Instruct"


def test_a_folder_is_read(tmp_path: Path) -> None:
    raw = shapes.known_config("Qwen/Qwen2.5-0.5B")
    raw["num_hidden_layers"] = 2
    raw["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shape = shapes.find(str(tmp_path))
    assert shape.layers == 2
    assert shape.parameters == 2 * shape.embedding + 2 * shape.layer + shape.hidden


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(change: dict[str, object], words: str) -> None:
    raw = {**shapes.known_config("Qwen/Qwen2.5-0.5B"), **change}
    with pytest.raises(DataError, match=words):
        shapes.from_config(raw, "mine")


def test_an_unknown_id_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        shapes.find("someone/something-7B")
    assert "Qwen/Qwen2.5-0.5B" in caught.value.fix
    with pytest.raises(DataError, match="does not exist"):
        shapes.find(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(DataError, match="not a model's config"):
        shapes.find(str(tmp_path))
