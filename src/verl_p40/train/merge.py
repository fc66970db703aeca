"""Merging a checkpoint's shards: run in the stack as ``python -m verl_p40.train.merge ORDER.json``.

The order is ``{actor, out, dtype, lora_alpha, prompt}``. Prints one JSON document on standard
output, told apart from what libraries print by its first key.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_p40.errors import DataError

MARK = '{"verl_p40_export":'
ADAPTER = "lora_adapter"
_TOKENS = 16
"""How many tokens of an answer show that the model can be used."""


def main(argv: Sequence[str]) -> int:
    """Do what the order says; the exit code is 0 where the report has no problem."""
    order = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    try:
        report = {"problem": None, **export(order)}
    except DataError as error:
        report = {"problem": {"message": error.message, "fix": error.fix}}
    sys.stdout.flush()
    print(MARK + json.dumps(report) + "}", flush=True)
    return 0


def export(order: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``out``: weights, config, tokenizer, generation config; load it and let it answer.

    Raises:
        DataError: the weights do not fit the dtype, or are not finite.
    """
    out = Path(order["out"])
    _merge(Path(order["actor"]), out)
    if (out / ADAPTER).is_dir():
        _merge_adapter(out, float(order["lora_alpha"]))
    _cast(out, order["dtype"])
    return _try(out, str(order["prompt"]))


def _merge(actor: Path, out: Path) -> None:
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        target_dir=str(out),
        local_dir=str(actor),
        hf_model_config_path=str(actor / "huggingface"),
    )
    FSDPModelMerger(config).merge_and_save()


def _merge_adapter(out: Path, alpha: float) -> None:
    """Add a LoRA adapter to its weights. verl's merger does not know its alpha, and writes 0."""
    peft = importlib.import_module("peft")
    described = out / ADAPTER / "adapter_config.json"
    config = json.loads(described.read_text(encoding="utf-8"))
    config["lora_alpha"] = alpha
    described.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    model = peft.PeftModel.from_pretrained(_load(out), str(out / ADAPTER)).merge_and_unload()
    _save(model, out)


def _cast(out: Path, dtype: str | None) -> None:
    import torch

    model = _load(out)
    wanted = getattr(torch, dtype) if dtype else model.dtype
    _check_finite(model, "holds weights that are not finite: training has diverged")
    if wanted == model.dtype:
        return
    model = model.to(wanted)
    _check_finite(model, f"has weights that are too large for {dtype}")
    _save(model, out)


def _check_finite(model: Any, problem: str) -> None:
    for name, weight in model.named_parameters():
        if not bool(weight.isfinite().all()):
            raise DataError(
                f"the checkpoint {problem} ({name})",
                fix="export an earlier step (--step), or another --dtype",
            )


def _load(out: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(out, torch_dtype="auto")


def _save(model: Any, out: Path) -> None:
    """In place of the weights that are there: a smaller model has fewer files."""
    for old in [*out.glob("*.safetensors"), *out.glob("*.safetensors.index.json")]:
        old.unlink()
    model.save_pretrained(out, safe_serialization=True)


def _try(out: Path, prompt: str) -> dict[str, Any]:
    """Load the folder as anyone would, and let it answer, greedily."""
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(out), _load(out)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt"
        )
    else:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    given = model.generate(
        ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=_TOKENS, do_sample=False
    )
    new = given[0, ids.shape[1] :]
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompt": prompt,
        "answer": tokenizer.decode(new, skip_special_tokens=True),
        "tokens": len(new),
        "bytes": sum(path.stat().st_size for path in out.rglob("*") if path.is_file()),
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
