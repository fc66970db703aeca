"""What of a model decides its memory: its sizes, from a ``config.json`` or a table of known ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from verl_p40.errors import DataError

_FAMILIES = {
    # model_type: (bias on q, k and v; norms on q and k heads)
    "llama": (False, False),
    "mistral": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
}
"""Decoders with RMSNorm, rotary positions, grouped heads and a gated MLP, whose tensors
transformers 4.51.3 makes alike (``models/{llama,mistral,qwen2,qwen3}/modeling_*.py``)."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. All counts are numbers of elements, not bytes."""

    name: str
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    """The longest sequence that it was made for."""
    tied: bool
    """The output projection is the embedding."""
    qkv_bias: bool
    head_norms: bool

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, V x h: the model's largest matrix."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer."""
        attention = self.hidden * (2 * self.query + 2 * self.key)
        bias = (self.query + 2 * self.key) if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.head_norms else 0)
        return attention + bias + norms + 3 * self.hidden * self.intermediate

    @property
    def body(self) -> int:
        """Parameters without an output head: what a value model shares with the policy."""
        return self.embedding + self.layers * self.layer + self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the policy (a tied head counts once)."""
        return self.body + (0 if self.tied else self.embedding)

    @property
    def value_parameters(self) -> int:
        """Parameters of the value model: ``ForTokenClassification``, a linear layer with bias."""
        return self.body + self.hidden + 1

    @property
    def linear_inputs_and_outputs(self) -> int:
        """Inputs plus outputs of all linear layers of one decoder layer: LoRA's size per rank.

        peft's ``all-linear`` adapts every ``nn.Linear`` but the output head.
        """
        h, q, k, f = self.hidden, self.query, self.key, self.intermediate
        return (h + q) + 2 * (h + k) + (q + h) + 2 * (h + f) + (f + h)


def from_config(raw: Mapping[str, Any], name: str) -> ModelShape:
    """Read a Hugging Face model config.

    Raises:
        DataError: another kind of model, or a size is missing; it is named.
    """
    family = str(raw.get("model_type") or "")
    if family not in _FAMILIES:
        raise DataError(
            f"{name}: no memory model for model_type {family or 'none'!r}",
            fix=f"one of {', '.join(sorted(_FAMILIES))}",
        )

    def size(key: str, default: int | None = None) -> int:
        value = raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(f"{name}: {key} is {value!r} in its config.json")
        return value

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    bias, head_norms = _FAMILIES[family]
    return ModelShape(
        name=name,
        family=family,
        hidden=hidden,
        intermediate=size("intermediate_size"),
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", hidden // heads),
        vocabulary=size("vocab_size"),
        positions=size("max_position_embeddings"),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias or bool(raw.get("attention_bias", False)),
        head_norms=head_norms,
    )


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("models.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return table


def known_ids() -> list[str]:
    return sorted(_table())


def known_config(model: str) -> dict[str, Any]:
    """The published config of a known model id.

    Raises:
        DataError: it is not in the table.
    """
    for candidate in (model, model.removesuffix("-Instruct")):
        if candidate in _table():
            return {k: v for k, v in _table()[candidate].items() if k != "parameters"}
    raise DataError(
        f"no config of {model} here, and none is fetched",
        fix="a folder with its config.json, or a known model: " + ", ".join(known_ids()),
    )


def published_parameters() -> dict[str, int]:
    return {name: int(entry["parameters"]) for name, entry in _table().items()}


def find(model: str) -> ModelShape:
    """The sizes of a model: a folder (or file) with its ``config.json``, or a known id.

    Raises:
        DataError: neither, or the config cannot be used.
    """
    path = Path(model).expanduser()
    file = path if path.suffix == ".json" else path / "config.json"
    if file.is_file():
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{file} is not a model's config: {error}") from error
        if not isinstance(raw, dict):
            raise DataError(f"{file} is not a model's config: not an object")
        return from_config(raw, path.name)
    if path.is_absolute():
        raise DataError(
            f"{file} does not exist", fix="a folder with a model's config.json, or a known id"
        )
    return from_config(known_config(model), model)
