"""What the proofs share: a tiny model, verl's own config, and one CPU rank.

The tree under test is the ``verl`` that Python finds first (``verl-p40 patches prove`` puts it
on PYTHONPATH). Nothing of verl is imported when this file or a test file is: a missing patch
has to fail the test that proves it, not the collection of all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PROMPT_LENGTH = 8
RESPONSE_LENGTH = 6


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.stack)


@pytest.fixture(autouse=True, scope="session")
def one_rank() -> Iterator[None]:
    """The environment that verl's Ray worker group gives a single worker."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    yield
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=(
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    )


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen2 with random weights, large enough for BF16 rounding to show."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            initializer_range=0.3,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def value_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same body with a token classification head, whose weights are stored too."""
    import torch
    from transformers import Qwen2Config, Qwen2ForTokenClassification

    folder = tmp_path_factory.mktemp("value-model")
    torch.manual_seed(1)
    config = Qwen2Config.from_pretrained(model_dir, num_labels=1, classifier_dropout=0.0)
    model = Qwen2ForTokenClassification(config)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


ComposeConfig = Callable[..., Any]


@pytest.fixture
def compose(model_dir: Path) -> ComposeConfig:
    """Compose verl's own trainer config: ``compose("key=value", ...)``."""

    def compose_config(*overrides: str, name: str = "ppo_trainer") -> Any:
        from hydra import compose, initialize_config_module

        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose(name, overrides=list(overrides))

    return compose_config


@pytest.fixture
def worker_config(compose: ComposeConfig, model_dir: Path) -> ComposeConfig:
    """The config of a small CPU run, with nothing said about dtypes and attention."""

    def configure(*overrides: str) -> Any:
        from omegaconf import OmegaConf

        config = compose(
            f"actor_rollout_ref.model.path={model_dir}",
            f"critic.model.path={model_dir}",
            f"reward_model.model.path={model_dir}",
            f"data.max_prompt_length={PROMPT_LENGTH}",
            f"data.max_response_length={RESPONSE_LENGTH}",
            "data.train_batch_size=4",
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
            "actor_rollout_ref.rollout.name=hf",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
            "critic.model.enable_gradient_checkpointing=False",
            "critic.ppo_micro_batch_size_per_gpu=2",
            "reward_model.micro_batch_size_per_gpu=2",
            *overrides,
        )
        OmegaConf.resolve(config)
        OmegaConf.set_struct(config, False)
        return config

    return configure


@pytest.fixture
def batch() -> Any:
    """Two left-padded prompts and two responses, as the trainer hands them to workers."""
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    generator = torch.Generator().manual_seed(3)
    length = PROMPT_LENGTH + RESPONSE_LENGTH
    ids = torch.randint(3, 200, (4, length), generator=generator)
    mask = torch.ones(4, length, dtype=torch.long)
    mask[0, :3] = 0
    mask[1, -2:] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    tensors = TensorDict(
        {
            "input_ids": ids,
            "responses": ids[:, PROMPT_LENGTH:],
            "attention_mask": mask,
            "position_ids": positions,
        },
        batch_size=4,
    )
    data = DataProto(batch=tensors)
    data.meta_info["temperature"] = 1.0
    return data


@pytest.fixture
def prompts(batch: Any) -> Any:
    """The prompts of ``batch`` alone: what a rollout starts from."""
    prompts = batch.select(["input_ids", "attention_mask", "position_ids"])
    for key in ("input_ids", "attention_mask", "position_ids"):
        prompts.batch[key] = prompts.batch[key][:, :PROMPT_LENGTH]
    return prompts


@pytest.fixture
def half_precision_ops() -> Any:
    """A dispatch mode that records operators which made half-precision tensors."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16):
                    self.seen.append(str(func))
            return result

    return Recorder()
