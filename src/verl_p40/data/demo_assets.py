"""Makes the demo's files in a stack environment: ``python -m verl_p40.data.demo_assets DIR SEED``.

Writes ``train.parquet``, ``test.parquet`` and ``model/`` (weights, config, tokenizer) into an
empty folder that the caller renames. The parquet files are the same bytes for the same seed; the
weights are the same on the same kind of CPU (another one may round differently).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from verl_p40.data import child, scorer
from verl_p40.data.problems import Problem, make_problems
from verl_p40.data.rows import make_row, write_parquet
from verl_p40.data.warm_start import Schedule, Shape, WarmStartError, describe
from verl_p40.errors import DataError

RECIPE_VERSION: Final = 1
"""Raised when the stories or the code change what a seed makes."""

TRAIN: Final = 2048
TEST: Final = 192
"""Rows. The test set is a multiple of three, so that each operation has a third of it."""


def recipe(seed: int) -> dict[str, Any]:
    """What the files follow from; its digest decides whether an existing folder is reused."""
    return {
        "version": RECIPE_VERSION,
        "seed": seed,
        "train": TRAIN,
        "test": TEST,
        **describe(Shape(), Schedule()),
    }


def build(folder: Path, seed: int) -> dict[str, Any]:
    """Fill ``folder``; returns what was measured.

    Raises:
        DataError: the warm start did not come out as intended (another seed will).
    """
    # All before torch is imported: one thread and no network.
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    child.say("writing the problems", 0.0)
    train, test = make_problems(seed, TRAIN, TEST)
    score = scorer.load()
    for name, problems in (("train", train), ("test", test)):
        write_parquet(_rows(problems, name, score), folder / f"{name}.parquet")
    child.say("loading torch and transformers", None)
    import torch

    from verl_p40.data import tokenizer as tokenizers
    from verl_p40.data import warm_start

    torch.use_deterministic_algorithms(True)
    tokenizer = tokenizers.train_tokenizer(
        text for problem in train for text in (problem.question, problem.answer)
    )
    model = warm_start.build_model(tokenizer, Shape(), seed)
    try:
        warm_start.warm_start(model, tokenizer, train, Schedule(), seed, _tell)
    except WarmStartError as error:
        raise DataError(f"seed {seed}: {error}", fix="use another --seed") from error
    child.say("measuring the model on the test problems", None)
    responses = warm_start.respond(model, tokenizer, test)
    right = sum(
        score(response, str(problem.result))
        for response, problem in zip(responses, test, strict=True)
    )
    model.save_pretrained(folder / "model", safe_serialization=True)
    tokenizer.save_pretrained(folder / "model")
    longest = max(
        len(warm_start.prompt_ids(tokenizer, problem.question)) for problem in [*train, *test]
    )
    return {
        "rows": {"train": len(train), "test": len(test)},
        "parameters": sum(p.numel() for p in model.parameters()),
        "longest_prompt": longest,
        "greedy_accuracy": round(right / len(test), 4),
    }


def _tell(done: int, planned: int) -> None:
    if done % 5 == 0 or done == planned:
        child.say(f"warm start, step {done} of {planned}", done / planned)


def _rows(problems: Sequence[Problem], split: str, score: scorer.Score) -> list[dict[str, Any]]:
    rows = []
    for index, problem in enumerate(problems):
        truth = str(problem.result)
        if score(problem.answer, truth) != 1.0:
            raise DataError(f"verl's scorer does not accept {problem.answer!r} for {truth}")
        rows.append(make_row(problem.question, problem.answer, truth, split, index))
    return rows


def main(argv: Sequence[str]) -> int:
    folder, seed = Path(argv[0]), int(argv[1])
    return child.serve(lambda: build(folder, seed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
