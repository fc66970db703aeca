#!/usr/bin/env python3
"""HF rollout against vLLM rollout, FP32, same prompts: python benchmarks/rollout.py

Runs in the training stack's Python (in the image: `python`; else "$(verl-p40 stack path)/bin/python").
For 1, 8 and 32 sequences it generates full-length responses with transformers' generate(), as verl's
HF rollout does, with vLLM as verl's vLLM rollout does, and with vLLM and CUDA graphs, and prints tokens
a second, the ratio to HF, and the peak of the memory that the process had allocated on the GPU. Each
engine has a process of its own, and a run before the measured one.

    --model DIR       a model; default: Qwen2.5-0.5B's shape with random weights
    --engines hf,vllm,vllm-graphs
    --device cpu      HF alone, for trying the script
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES = ("hf", "vllm", "vllm-graphs")
QWEN_05B = {
    # config.json of Qwen/Qwen2.5-0.5B-Instruct
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_model(folder: Path, device: str) -> Path:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN_05B)).to(torch.float32)
    model.save_pretrained(folder)
    return folder


def make_prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(count)
    return torch.randint(10, vocabulary - 10, (count, length), generator=generator).tolist()


class HuggingFace:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.args = args
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            args.model, torch_dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model.to(args.device).eval()

    def generate(self, prompts: list[list[int]]) -> int:
        ids = self.torch.tensor(prompts, device=self.args.device)
        with self.torch.no_grad():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=True,
                min_new_tokens=self.args.response,
                max_new_tokens=self.args.response,
                pad_token_id=0,
            )
        return int(out[:, ids.shape[1] :].numel())


class Vllm:
    def __init__(self, args: argparse.Namespace, graphs: bool) -> None:
        os.environ.update(VLLM_USE_V1="0", VLLM_ENABLE_V1_MULTIPROCESSING="0")
        import vllm

        self.vllm, self.args = vllm, args
        self.engine = vllm.LLM(
            model=str(args.model),
            dtype="float32",
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            enforce_eager=not graphs,
            max_model_len=args.prompt + args.response,
            max_num_seqs=max(args.sequences),
            gpu_memory_utilization=args.gpu_memory_utilization,
            enable_prefix_caching=False,
            enable_chunked_prefill=False,
        )

    def generate(self, prompts: list[list[int]]) -> int:
        sampling = self.vllm.SamplingParams(
            temperature=1.0, max_tokens=self.args.response, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.engine.generate(asked, sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """In a process of its own: one engine, every number of sequences."""
    import torch

    on_gpu = args.device != "cpu"
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    engine = HuggingFace(args) if args.engine == "hf" else Vllm(args, args.engine != "vllm")
    rows = []
    for count in args.sequences:
        prompts = make_prompts(count, args.prompt, vocabulary)
        engine.generate(prompts)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        tokens = engine.generate(prompts)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.monotonic() - began
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        rows.append({"engine": args.engine, "sequences": count, "tokens": tokens,
                     "seconds": seconds, "peak_bytes": peak})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--response", type=int, default=256, help="tokens")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        args.sequences = [int(count) for count in args.sequences.split(",")]
        print(json.dumps(measure(args)), flush=True)
        # With sleep mode the interpreter crashes while it takes itself down (docs/vllm.md).
        os._exit(0)
    engines = ["hf"] if args.device == "cpu" else args.engines.split(",")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or make_model(Path(scratch, "model"), args.device)
        for engine in engines:
            command = [sys.executable, __file__, "--engine", engine, "--model", str(model)]
            command += ["--sequences", args.sequences, "--device", args.device]
            command += ["--prompt", str(args.prompt), "--response", str(args.response)]
            command += ["--gpu-memory-utilization", str(args.gpu_memory_utilization)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                sys.exit(f"{engine} failed with exit code {done.returncode}")
            rows += json.loads(done.stdout.splitlines()[-1])
    show(rows, args)


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    speed = {(row["engine"], row["sequences"]): row["tokens"] / row["seconds"] for row in rows}
    for row in rows:
        row["tokens_per_second"] = speed[row["engine"], row["sequences"]]
        hf = speed.get(("hf", row["sequences"]))
        row["ratio_to_hf"] = row["tokens_per_second"] / hf if hf else None
    if args.json:
        print(json.dumps({"where": where(args.device), "rows": rows}, indent=2))
        return
    print(f"{where(args.device)}; FP32, {args.prompt} + {args.response} tokens")
    print(f"{'engine':12} {'sequences':>9} {'tokens/s':>10} {'x HF':>7} {'peak GB':>8}")
    for row in rows:
        ratio = f"{row['ratio_to_hf']:.2f}" if row["ratio_to_hf"] else "-"
        peak = f"{row['peak_bytes'] / 1e9:.2f}" if row["peak_bytes"] is not None else "-"
        print(f"{row['engine']:12} {row['sequences']:9} {row['tokens_per_second']:10.1f} "
              f"{ratio:>7} {peak:>8}")  # fmt: skip


def where(device: str) -> str:
    import torch

    name = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
