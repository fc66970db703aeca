"""In a process of its own: what an engine of vLLM generates greedily in FP32, and what it launched.

``python vllm_child.py '{"enable_prefix_caching": true, ...}'``; the keys are ``vllm.LLM``'s, and
``limit``: bytes of shared memory a block that Triton is told the device has. Prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_USE_V1="0",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    # A newer card multiplies FP32 as TF32 in Triton's tl.dot unless told otherwise.
    TRITON_F32_DEFAULT="ieee",
)

NEW_TOKENS = 16
MAX_LENGTH = 512
COMMON, OWN = 150, (1, 17, 40, 64, 90, 127)
"""Tokens that all prompts begin with, and each prompt's own after them."""


def make_model(folder: Path) -> list[list[int]]:
    """A small Qwen2 of head size 64 in ``folder``; the prompts."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(29)
    config = Qwen2Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    draw = torch.Generator().manual_seed(5)
    common = torch.randint(0, 512, (COMMON,), generator=draw).tolist()
    return [common + torch.randint(0, 512, (own,), generator=draw).tolist() for own in OWN]


def expected_tokens(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """transformers in float64 on the CPU, a prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float64, attn_implementation="eager"
    )
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False,
                min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, pad_token_id=0,
            )  # fmt: skip
        found.append(out[0, len(prompt) :].tolist())
    return found


def tell_triton(limit: int) -> None:
    """Have Triton, and so vLLM's launch, see a device with ``limit`` bytes a block."""
    import triton

    utils = triton.runtime.driver.active.utils
    real = utils.get_device_properties
    utils.get_device_properties = lambda device: {**real(device), "max_shared_mem": limit}


def count_launches(into: list[tuple[int, int]]) -> None:
    """Note the block sizes of every launch of the prefix prefill."""
    from vllm.attention.ops import prefix_prefill

    real = prefix_prefill.fit_block_sizes

    def noted(*args: Any, **named: Any) -> tuple[int, int]:
        into.append(real(*args, **named))
        return into[-1]

    prefix_prefill.fit_block_sizes = noted


def main() -> None:
    import torch

    options = json.loads(sys.argv[1])
    limit = options.pop("limit", None)
    rounds = options.pop("rounds", 1)
    if limit:
        tell_triton(limit)
    import vllm

    launches: list[tuple[int, int]] = []
    count_launches(launches)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        prompts = make_model(folder)
        expected = expected_tokens(folder, prompts)
        share = 2**31 / torch.cuda.get_device_properties(0).total_memory
        engine = vllm.LLM(
            model=str(folder), dtype="float32", skip_tokenizer_init=True, swap_space=0, seed=0,
            max_model_len=MAX_LENGTH, max_num_seqs=len(prompts), gpu_memory_utilization=share,
            **{"enforce_eager": True, **options},
        )  # fmt: skip
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
        )
        got = []
        for _ in range(rounds):
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = engine.generate(asked, sampling, use_tqdm=False)
            got.append([list(output.outputs[0].token_ids) for output in outputs])
            if options.get("enable_sleep_mode"):
                engine.sleep(level=1)
                engine.wake_up(tags=["weights"])
                engine.wake_up(tags=["kv_cache"])
    print(json.dumps({"expected": expected, "got": got, "launches": launches}), flush=True)
    # With sleep mode the interpreter crashes while it takes itself down (docs/vllm.md).
    os._exit(0)


if __name__ == "__main__":
    main()
