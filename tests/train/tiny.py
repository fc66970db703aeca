"""The smallest real assets that verl trains on: a random Qwen2, its tokenizer, two parquet files.

Run as a script inside the stack: ``python tiny.py FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

CHAT = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)

PRESET = """
defaults: [ppo_trainer, _cpu, _self_]
verl_p40:
  description: the smallest run that is one
  shown: CPU run
  data: none
  model: random weights
data:
  train_files: {assets}/train.parquet
  val_files: {assets}/test.parquet
  train_batch_size: 8
  max_prompt_length: 16
  max_response_length: 8
algorithm: {{use_kl_in_reward: true}}
actor_rollout_ref:
  # Seeds the workers: two runs are the same, whatever interrupts one of them.
  model: {{path: {assets}/model, external_lib: verl_p40.train.seed}}
  actor:
    ppo_mini_batch_size: 4
    ppo_micro_batch_size_per_gpu: 4
    optim: {{lr: 1.0e-3}}
  ref: {{log_prob_micro_batch_size_per_gpu: 8}}
  rollout: {{log_prob_micro_batch_size_per_gpu: 8}}
critic: {{ppo_micro_batch_size_per_gpu: 4}}
trainer:
  val_before_train: false
  total_epochs: 30
  total_training_steps: 4
  test_freq: 2
  save_freq: 2
  max_actor_ckpt_to_keep: 2
  max_critic_ckpt_to_keep: 2
"""
"""A preset of the user's own; ``{assets}`` is what :func:`make` has written."""


def make(folder: Path, *, rows: int = 64) -> None:
    """Write ``folder/{model,train.parquet,test.parquet}``. About 30,000 random weights."""
    make_model(folder / "model")
    make_rows(folder / "train.parquet", "train", rows)
    make_rows(folder / "test.parquet", "test", 8)


def make_model(folder: Path, dtype: str = "float32") -> None:
    """A random Qwen2 saved in ``dtype``; it lets a CPU do a step in a fraction of a second."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    characters = [chr(c) for c in range(32, 127)]
    words = ["<pad>", "<eos>", "<unk>", *characters]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.chat_template = CHAT
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    model.save_pretrained(folder)


def make_rows(path: Path, split: str, rows: int) -> None:
    """Sums in the GSM8K schema that verl's scorer reads."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(
        [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{i % 7} + {i % 5}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(i % 7 + i % 5)},
                "extra_info": {"split": split, "index": i},
            }
            for i in range(rows)
        ]
    )
    pq.write_table(table, path)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
