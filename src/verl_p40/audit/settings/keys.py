"""Which configuration keys verl knows, from the generated key files."""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib.resources import files
from typing import Any

FREE = (
    "actor_rollout_ref.model.override_config",
    "critic.model.override_config",
    "reward_model.model.override_config",
    "actor_rollout_ref.actor.megatron.override_transformer_config",
    "actor_rollout_ref.rollout.engine_kwargs",
    "custom_reward_function.reward_kwargs",
    "reward_model.reward_kwargs",
    "trainer.controller_nsight_options",
    "trainer.worker_nsight_options",
    "hydra",
    "verl_p40",
    "model.override_config",
)
"""Sections whose children are handed on as they are: any name below them is legitimate."""

SAMPLING = frozenset(
    {
        "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty",
        "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos",
        "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "detokenize",
        "skip_special_tokens", "spaces_between_special_tokens", "logits_processors",
        "include_stop_str_in_output", "truncate_prompt_tokens", "output_kind", "guided_decoding",
        "logit_bias", "allowed_token_ids", "extra_args", "bad_words",
    }
)  # fmt: skip
"""Fields of vLLM 0.8.5.post1's SamplingParams: vllm_rollout_spmd.py:185 takes every rollout key of
such a name (a test compares this with vLLM's source where it is at hand)."""


class Keys:
    """The keys of one program's configuration (``ppo_trainer``, ``sft_trainer``, ``generation``)."""

    def __init__(self, document: dict[str, Any], program: str) -> None:
        self.program = program
        extra = document["patched"]["yaml"].get(program, {})
        self.defaults: dict[str, Any] = {**document["yaml"].get(program, {}), **extra}
        self.code = {
            *document["code"].get(program, []),
            *document["patched"]["code"].get(program, []),
        }
        self._sections = {
            ".".join(parts[:depth])
            for key in self.defaults
            for parts in [key.split(".")]
            for depth in range(1, len(parts))
        }

    def in_yaml(self, key: str) -> bool:
        """Whether plain ``key=value`` is accepted: a leaf, a section or below a free section."""
        return key in self.defaults or key in self._sections

    def read(self, key: str) -> bool:
        """Whether code reads a key that YAML does not have."""
        if key in self.code or any(known.startswith(f"{key}.") for known in self.code):
            return True
        if any(key == free or key.startswith(f"{free}.") for free in FREE):
            return True
        section, _, name = key.rpartition(".")
        return section == "actor_rollout_ref.rollout" and name in SAMPLING

    def known(self, key: str) -> bool:
        return self.in_yaml(key) or self.read(key)

    def nearest(self, key: str) -> str:
        """The real key that ``key`` most likely means; empty when none is near.

        The last part weighs most: people remember the name and forget the section.
        """
        everything = sorted({*self.defaults, *self.code})
        name = key.rpartition(".")[2]
        same = [other for other in everything if other.rpartition(".")[2] == name]
        pool = same or difflib.get_close_matches(key, everything, n=5, cutoff=0.75)
        return max(pool, key=lambda other: _likeness(key, other), default="")


def _likeness(key: str, other: str) -> float:
    return difflib.SequenceMatcher(None, key, other).ratio()


@cache
def load(program: str = "ppo_trainer", version: str = "0.4.1") -> Keys:
    """The keys of verl ``version``, our patch queue's included."""
    file = files("verl_p40.audit.settings") / "data" / f"verl-{version}-keys.json"
    return Keys(json.loads(file.read_text(encoding="utf-8")), program)
