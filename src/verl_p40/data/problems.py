"""Arithmetic word problems in GSM8K's form, for the demo that trains on a CPU.

Pure Python: the same seed gives the same problems on every machine and Python version.
Train and test share no (story, first number, second number), so a test question is never
a training question with the names changed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

Operation = Literal["+", "-", "*"]

OPERATIONS: Final[tuple[Operation, ...]] = ("+", "-", "*")

FIRST: Final = range(3, 11)
"""The first number of a problem. The second is smaller, so that no answer is negative."""

SECOND: Final = range(2, 10)

STORIES: Final[dict[Operation, tuple[str, ...]]] = {
    "+": (
        "{n} has {a} {o} and buys {b} more. How many {o} does {n} have now?",
        "{n} picks {a} {o} and {m} picks {b}. How many {o} did they pick together?",
        "There are {a} {o} on a table and {b} under it. How many {o} are there in all?",
        "{n} finds {a} {o} and {m} brings another {b}. How many {o} is that in total?",
        "A shelf has {a} {o} and {n} adds {b}. How many {o} are on the shelf?",
        "{n} made {a} {o} today and {b} before. How many {o} has {n} made altogether?",
    ),
    "-": (
        "{n} has {a} {o} and loses {b}. How many {o} does {n} have left?",
        "{n} has {a} {o} and gives {b} to {m}. How many {o} does {n} keep?",
        "A shop had {a} {o} and sold {b}. How many {o} remain?",
        "{n} needs {a} {o} but has only {b}. How many {o} are missing?",
        "Of {a} {o} in a basket {n} eats {b}. How many {o} are still there?",
        "{n} owns {a} {o}, {m} owns {b}. How many fewer {o} does {m} own?",
    ),
    "*": (
        "{n} fills {a} bags with {b} {o} each. How many {o} are in the bags?",
        "There are {a} rows of {b} {o}. How many {o} do the rows hold?",
        "{a} friends of {n} bring {b} {o} each. How many {o} do the friends bring?",
        "For {a} days {n} paints {b} {o} per day. How many {o} did {n} paint?",
        "{n} orders {a} packs of {b} {o}. How many {o} come in the packs?",
        "{n} walks {a} streets and sees {b} {o} in every one. How many {o} does {n} see?",
    ),
}

NAMES: Final = (
    *("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo"),
    *("Ida", "Jon", "Kim", "Leo", "Mia", "Noa", "Otto", "Pia"),
)

THINGS: Final = (
    *("apples", "books", "coins", "eggs", "figs", "keys"),
    *("lemons", "nuts", "pens", "plums", "shells", "stamps"),
)


@dataclass(frozen=True)
class Problem:
    """One question and how to answer it.

    ``question`` is the story without verl's instruction; ``first`` and ``second`` are its
    numbers in the order of the text and ``operation`` is what the story calls for.
    """

    question: str
    story: int
    operation: Operation
    first: int
    second: int

    @property
    def result(self) -> int:
        return compute(self.operation, self.first, self.second)

    @property
    def answer(self) -> str:
        """The worked answer as GSM8K writes it: the calculation, then ``#### result``."""
        return worked(self.operation, self.first, self.second)


def compute(operation: Operation, first: int, second: int) -> int:
    if operation == "+":
        return first + second
    return first - second if operation == "-" else first * second


def worked(operation: Operation, first: int, second: int) -> str:
    """``12+7=19\\n#### 19``: one line of working and GSM8K's marked final answer."""
    result = compute(operation, first, second)
    return f"{first}{operation}{second}={result}\n#### {result}"


def _keys() -> list[tuple[Operation, int, int, int]]:
    return [
        (operation, story, first, second)
        for operation in OPERATIONS
        for story in range(len(STORIES[operation]))
        for first in FIRST
        for second in SECOND
        if second < first
    ]


def _tell(rng: random.Random, key: tuple[Operation, int, int, int]) -> Problem:
    operation, story, first, second = key
    name, other = rng.sample(NAMES, 2)
    text = STORIES[operation][story].format(
        n=name, m=other, o=rng.choice(THINGS), a=first, b=second
    )
    return Problem(text, story, operation, first, second)


def _distinct(
    rng: random.Random, by_operation: dict[Operation, list[tuple[Operation, int, int, int]]]
) -> Iterator[Problem]:
    seen: set[str] = set()
    while True:
        for operation in OPERATIONS:
            problem = _tell(rng, rng.choice(by_operation[operation]))
            while problem.question in seen:
                problem = _tell(rng, rng.choice(by_operation[operation]))
            seen.add(problem.question)
            yield problem


def make_problems(seed: int, train: int, test: int) -> tuple[list[Problem], list[Problem]]:
    """Make ``train`` and ``test`` distinct problems, the three operations in turn.

    Raises:
        ValueError: more test problems are asked for than a third of the stories and numbers.
    """
    rng = random.Random(f"verl-p40 demo {seed}")
    keys = _keys()
    rng.shuffle(keys)
    held_out: dict[Operation, list[tuple[Operation, int, int, int]]] = {}
    rest: dict[Operation, list[tuple[Operation, int, int, int]]] = {}
    per_operation = -(-test // len(OPERATIONS))
    for operation in OPERATIONS:
        own = [key for key in keys if key[0] == operation]
        if per_operation * 3 > len(own):
            raise ValueError(f"at most {len(own) // 3 * len(OPERATIONS)} test problems, not {test}")
        held_out[operation], rest[operation] = own[:per_operation], own[per_operation:]
    tests = [
        _tell(rng, held_out[OPERATIONS[i % len(OPERATIONS)]][i // len(OPERATIONS)])
        for i in range(test)
    ]
    source = _distinct(rng, rest)
    return [next(source) for _ in range(train)], tests
