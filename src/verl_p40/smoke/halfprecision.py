"""The demo's model computes in FP32 under the precision tripwire, and the tripwire works."""

from __future__ import annotations

from typing import Any

from verl_p40.smoke.data import model_folder
from verl_p40.smoke.model import Context, Failed, Finding
from verl_p40.smoke.torchbuild import limit_memory

QUESTIONS = ("Ann has 3 apples and buys 4 more. How many has she?", "What is 2 times 5?")
NEW_TOKENS = 6


def check(context: Context) -> Finding:
    """Generate, forward, backward and an optimizer step; then two planted half precisions."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl_p40.tripwire.mode import HalfPrecisionError, Tripwire

    limit_memory(context)
    folder = model_folder(context)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    try:
        with Tripwire() as tripwire:
            model = AutoModelForCausalLM.from_pretrained(
                folder, torch_dtype=torch.float32, attn_implementation="eager"
            ).to(context.device)
            _train(model, tokenizer, context.device)
            operators = tripwire.operators
    except HalfPrecisionError as error:
        raise Failed(str(error)) from error
    if not operators:
        raise Failed("the tripwire saw no operator at all")
    _planted(context.device)
    return Finding(
        f"{operators:,} operators, none in half precision; a planted cast and autocast were caught",
        context.category,
        {"operators": operators},
    )


def _train(model: Any, tokenizer: Any, device: str) -> None:
    import torch

    batch = tokenizer(list(QUESTIONS), return_tensors="pt", padding=True, padding_side="left")
    ids, mask = batch["input_ids"].to(device), batch["attention_mask"].to(device)
    with torch.no_grad():
        tokens = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    if not torch.isfinite(loss):
        raise Failed(f"the demo model's loss is {float(loss)}")


def _planted(device: str) -> None:
    """A tripwire that stays silent on these would prove nothing above."""
    import torch

    from verl_p40.tripwire.mode import HalfPrecisionError, Tripwire

    def cast() -> None:
        torch.ones(2, 2, device=device).to(torch.bfloat16)

    def autocast() -> None:
        value = torch.ones(2, 2, device=device)
        with torch.autocast(device, dtype=torch.bfloat16):
            torch.mm(value, value)

    for what in (cast, autocast):
        try:
            with Tripwire():
                what()
        except HalfPrecisionError:
            continue
        raise Failed(f"the tripwire did not see a planted bfloat16 ({what.__name__})")
