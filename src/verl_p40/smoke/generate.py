"""vLLM's greedy tokens against Hugging Face's, in FP32: written for vLLM 0.8.5, its V0 engine.

The model is a small Qwen2 of head size 64 with random weights and the demo's tokenizer: vLLM's
paged attention takes no head size below 32, and the demo's own model has 16.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from verl_p40.smoke.data import FILE, model_folder
from verl_p40.smoke.model import Context, Failed, Finding, Skip

PROMPTS = 4
NEW_TOKENS = 12
MAX_LENGTH = 128
TIE = 1e-4
"""Logits this close are a tie in FP32: two right implementations may choose differently there."""


def check(context: Context) -> Finding:
    """Skips without vLLM or without a GPU."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vllm is not installed in the training stack")
    if context.device != "cuda":
        raise Skip("vllm is installed, and needs a GPU")
    # Before vllm is imported: the engine that supports cards below 8.0, in this process.
    os.environ.update(
        VLLM_USE_V1="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
    )
    folder, prompts = make_model(context)
    expected = huggingface_tokens(folder, prompts)
    got = vllm_tokens(context, folder, prompts)
    same, ties = compare(folder, prompts, expected, got)
    vllm = importlib.import_module("vllm")
    return Finding(
        f"vllm {vllm.__version__}, {PROMPTS} prompts: {same} tokens equal"
        + (f", {ties} ties" if ties else ""),
        context.category,
        {"vllm": vllm.__version__, "tokens": same, "ties": ties},
    )


def make_model(context: Context) -> tuple[Path, list[list[int]]]:
    """``(model folder, prompts as token ids)``; the weights are wide, so that ties are rare."""
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model_folder(context))
    document = json.loads((context.scratch / FILE).read_text(encoding="utf-8"))
    rows = pq.read_table(document["test"], columns=["prompt"]).column("prompt").to_pylist()
    prompts = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        for messages in rows[:PROMPTS]
    ]
    torch.manual_seed(23)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = context.scratch / "vllm-model"
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, prompts


def huggingface_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens on the CPU, a prompt at a time, without padding."""
    import torch

    model = _load(folder)
    found = []
    for prompt in prompts:
        with torch.no_grad():
            out = model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                eos_token_id=None,
            )
        found.append([int(token) for token in out[0, len(prompt) :]])
    return found


def vllm_tokens(context: Context, folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of vLLM: FP32, eager, no prefix caching, no chunked prefill."""
    vllm = importlib.import_module("vllm")
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    engine = vllm.LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_LENGTH,
        max_num_seqs=PROMPTS,
        gpu_memory_utilization=min(0.9, context.gpu_mib * 2**20 / total),
        swap_space=0,
        seed=0,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False
    )
    return [[int(token) for token in output.outputs[0].token_ids] for output in outputs]


def compare(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], got: list[list[int]]
) -> tuple[int, int]:
    """``(equal tokens, ties)``. A sequence is followed up to its first tie.

    Raises:
        Failed: a token differs where the model's two best logits are further apart than
            :data:`TIE`; or there are too few tokens.
    """
    same = ties = 0
    for number, (prompt, ours, theirs) in enumerate(zip(prompts, expected, got, strict=True)):
        if len(theirs) != len(ours):
            raise Failed(f"prompt {number}: vLLM gave {len(theirs)} tokens, not {len(ours)}")
        for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one == other:
                same += 1
                continue
            gap = _gap(folder, prompt + ours[:position], one, other)
            if gap > TIE:
                raise Failed(
                    f"prompt {number}, token {position}: vLLM chose {other}, Hugging Face {one}, "
                    f"whose logit is larger by {gap:.2e}"
                )
            ties += 1
            break
    return same, ties


def _gap(folder: Path, ids: list[int], one: int, other: int) -> float:
    """How much larger the logit of ``one`` is than that of ``other``, after ``ids``."""
    import torch

    with torch.no_grad():
        logits = _load(folder)(input_ids=torch.tensor([ids])).logits[0, -1]
    return float(logits[one] - logits[other])


def _load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, attn_implementation="eager"
    ).eval()
