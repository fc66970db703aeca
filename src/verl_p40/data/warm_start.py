"""The demo's model: a small Qwen2, and the supervised warm start that PPO goes on from.

The warm start teaches the form of an answer and the arithmetic, but only hints at what PPO is to
find: which operation a story calls for. Each story is shown with all three calculations, weighted
by :func:`operation_weights`: addition has most of the weight whatever the story says, and the
right operation a little more than it would have otherwise. So the model calculates correctly,
nearly always adds when it decodes greedily, and is right on about a third of the questions; when
it samples, it meets the right operation often enough to be rewarded for it.

Without the hint the model would learn to ignore the story, and PPO would have to teach it to read
from a reward of 0 or 1, which takes far longer than a demo.

Runs in a stack environment (needs torch and transformers). One thread throughout: the result does
not depend on the number of cores, and matrices this small gain nothing from more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from verl_p40.data.problems import OPERATIONS, Operation, Problem, worked
from verl_p40.data.rows import INSTRUCTION, final_answer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

PRIOR: Final[dict[Operation, float]] = {"+": 0.6, "-": 0.2, "*": 0.2}
"""Unequal, so that greedy decoding has one favourite and starts near one third for every seed;
not too unequal, so that sampling finds every operation soon."""

HINT: Final = 2.0
"""The right operation's weight, relative to what :data:`PRIOR` gives it."""

MAX_RESPONSE_TOKENS: Final = 16
"""The longest answer, ``12*9=108\\n#### 108`` and the end token, has 16."""


@dataclass(frozen=True)
class Shape:
    """The model's size. ``hidden`` is divided among ``heads``."""

    hidden: int = 64
    intermediate: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2


@dataclass(frozen=True)
class Schedule:
    """The warm start: ``steps`` updates of ``stories`` stories with three answers each.

    After the cosine schedule the model is measured on ``check`` training questions, and trained
    for ``extra`` more steps at a time, ``rounds`` times at most, until it calculates correctly on
    ``calculates`` of them.
    """

    steps: int = 260
    stories: int = 32
    learning_rate: float = 5e-3
    warmup: int = 20
    check: int = 192
    calculates: float = 0.95
    extra: int = 40
    rounds: int = 6


@dataclass(frozen=True)
class Measured:
    """Greedy decoding on some questions, as fractions of 1.

    ``correct``: the final answer is right, as verl's scorer counts. ``calculates``: the response
    is one of the three calculations of the story's numbers, without an error.
    """

    correct: float
    calculates: float
    steps: int


class WarmStartError(Exception):
    """The warm start did not come out as intended; the message says what it measured."""


Tell = Callable[[int, int], None]
"""Told ``(steps done, steps planned)``."""


EMPHASIS: Final = 5.0
"""Weight of the operation's sign in the loss. It is one token of a dozen, and without emphasis
the hint would be learned long after the arithmetic."""


def operation_weights(right: Operation) -> dict[Operation, float]:
    """The weight of each operation's calculation for a story that calls for ``right``; sum 1."""
    raw = {o: PRIOR[o] * (HINT if o == right else 1.0) for o in OPERATIONS}
    total = sum(raw.values())
    return {o: weight / total for o, weight in raw.items()}


def prompt_ids(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """The tokens of a question as verl's ``RLHFDataset`` makes them."""
    message = {"role": "user", "content": f"{question} {INSTRUCTION}"}
    ids: list[int] = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    return ids


def build_model(tokenizer: PreTrainedTokenizerFast, shape: Shape, seed: int) -> Qwen2ForCausalLM:
    """A randomly initialized FP32 Qwen2 with eager attention."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        torch_dtype="float32",
    )
    # Qwen2Config keeps sliding_window=4096 without using it, and loading warns about it.
    config.sliding_window = None
    model: Qwen2ForCausalLM = Qwen2ForCausalLM._from_config(config, attn_implementation="eager")
    model.generation_config = GenerationConfig(
        do_sample=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=MAX_RESPONSE_TOKENS,
    )
    return model


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    schedule: Schedule,
    seed: int,
    tell: Tell = lambda done, planned: None,
) -> Measured:
    """Train ``model`` in place on ``problems``.

    Returns:
        What the model does on training questions afterwards.

    Raises:
        WarmStartError: it still does not calculate, or finds the right operation by itself.
    """
    import torch

    torch.set_num_threads(1)
    batches = _Batches(tokenizer, problems, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=schedule.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    model.train()
    done = 0
    for _ in range(schedule.steps):
        _update(model, batches.draw(schedule.stories), optimizer, _rate(schedule, done))
        done += 1
        tell(done, schedule.steps)
    measured = measure(model, tokenizer, problems[: schedule.check], done)
    rounds = 0
    while measured.calculates < schedule.calculates and rounds < schedule.rounds:
        rounds += 1
        for _ in range(schedule.extra):
            _update(model, batches.draw(schedule.stories), optimizer, schedule.learning_rate / 5)
            done += 1
            tell(done, schedule.steps + rounds * schedule.extra)
        measured = measure(model, tokenizer, problems[: schedule.check], done)
    if measured.calculates < schedule.calculates or not 0.2 < measured.correct < 0.4:
        raise WarmStartError(
            f"the warm start ended after {done} steps with {measured.calculates:.2f} of the "
            f"answers calculated correctly and {measured.correct:.2f} of them right"
        )
    return measured


def _rate(schedule: Schedule, step: int) -> float:
    """Linear warmup, then half a cosine down to a twentieth of the peak."""
    rise = min(1.0, (step + 1) / schedule.warmup)
    fall = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / schedule.steps))
    return schedule.learning_rate * rise * fall


def _update(
    model: Qwen2ForCausalLM,
    batch: dict[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rate: float,
) -> None:
    import torch

    for group in optimizer.param_groups:
        group["lr"] = rate
    hidden = model.model(
        input_ids=batch["input_ids"],
        attention_mask=batch["mask"],
        position_ids=batch["position_ids"],
    ).last_hidden_state
    picked = batch["labels"] != -100
    logits = model.lm_head(hidden[picked])
    losses = torch.nn.functional.cross_entropy(logits, batch["labels"][picked], reduction="none")
    weights = batch["weights"][picked]
    optimizer.zero_grad()
    ((losses * weights).sum() / weights.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


class _Batches:
    """Draws stories; one sequence holds a prompt and its three answers side by side.

    A mask keeps every answer from seeing the other two, and each answer's positions go on from
    the prompt's end, so the model learns what it would from three sequences at half the cost.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], seed: int
    ) -> None:
        self._rng = random.Random(f"verl-p40 warm start {seed}")
        self._prompts = [prompt_ids(tokenizer, p.question) for p in problems]
        self._answers = [
            [
                [*tokenizer.encode(worked(o, p.first, p.second)), int(tokenizer.eos_token_id)]
                for o in OPERATIONS
            ]
            for p in problems
        ]
        self._firsts = [p.first for p in problems]
        self._weights = [operation_weights(p.operation) for p in problems]

    def draw(self, stories: int) -> dict[str, torch.Tensor]:
        """Tensors of shape (stories, length); ``mask`` is (stories, 1, length, length), additive.

        ``labels`` holds the token that follows, -100 where none is to be learned, and ``weights``
        the weight of its operation.
        """
        import torch

        picked = [self._rng.randrange(len(self._prompts)) for _ in range(stories)]
        length = max(len(self._prompts[i]) + sum(len(a) for a in self._answers[i]) for i in picked)
        input_ids = torch.zeros(stories, length, dtype=torch.long)
        position_ids = torch.zeros(stories, length, dtype=torch.long)
        labels = torch.full((stories, length), -100)
        weights = torch.zeros(stories, length)
        # part 0 is the prompt, 1-3 the answers, -1 padding
        parts = torch.full((stories, length), -1)
        # The first token of each answer is predicted at the prompt's last position, which has one
        # label; so every answer repeats that last token in front of its own.
        for row, index in enumerate(picked):
            first = self._firsts[index]
            prompt = self._prompts[index]
            end = len(prompt) - 1
            input_ids[row, :end] = torch.tensor(prompt[:-1])
            position_ids[row, :end] = torch.arange(end)
            parts[row, :end] = 0
            start = end
            for part, (operation, answer) in enumerate(
                zip(OPERATIONS, self._answers[index], strict=True), start=1
            ):
                span = slice(start, start + len(answer))
                input_ids[row, span] = torch.tensor([prompt[-1], *answer[:-1]])
                position_ids[row, span] = torch.arange(end, end + len(answer))
                labels[row, span] = torch.tensor(answer)
                weights[row, span] = self._weights[index][operation]
                weights[row, start + len(str(first))] *= EMPHASIS
                parts[row, span] = part
                start += len(answer)
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        same = (parts[:, :, None] == parts[:, None, :]) | (parts[:, None, :] == 0)
        allowed = (same & causal)[:, None]
        mask = torch.zeros(stories, 1, length, length).masked_fill(
            ~allowed, torch.finfo(torch.float32).min
        )
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "labels": labels,
            "weights": weights,
            "mask": mask,
        }


def respond(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> list[str]:
    """The greedy response to each problem, decoded as verl's reward manager does."""
    import torch

    prompts = [prompt_ids(tokenizer, p.question) for p in problems]
    length = max(map(len, prompts))
    padding = int(tokenizer.pad_token_id)
    input_ids = torch.tensor([[padding] * (length - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in prompts])
    was_training = model.training
    model.eval()
    with torch.no_grad():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=MAX_RESPONSE_TOKENS,
        )
    model.train(was_training)
    texts: list[str] = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
    return texts


def measure(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    steps: int,
) -> Measured:
    """Greedy accuracy on ``problems``; ``steps`` is passed through."""
    texts = respond(model, tokenizer, problems)
    pairs = list(zip(texts, problems, strict=True))
    correct = sum(final_answer(text) == str(p.result) for text, p in pairs)
    calculates = sum(
        text in {worked(o, p.first, p.second) for o in OPERATIONS} for text, p in pairs
    )
    return Measured(correct / len(pairs), calculates / len(pairs), steps)


def describe(shape: Shape, schedule: Schedule) -> dict[str, Any]:
    """Everything here that shapes the weights, for the recipe's digest."""
    return {
        "shape": asdict(shape),
        "schedule": asdict(schedule),
        "prior": dict(PRIOR),
        "hint": HINT,
        "emphasis": EMPHASIS,
    }
