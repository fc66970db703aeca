"""The demo's problems: the same on every machine, distinct, and split without overlap."""

from __future__ import annotations

import hashlib

import pytest

from verl_p40.data.demo_assets import TEST, TRAIN
from verl_p40.data.problems import OPERATIONS, STORIES, Problem, compute, make_problems, worked
from verl_p40.data.rows import final_answer
from verl_p40.data.warm_start import MAX_RESPONSE_TOKENS, PRIOR, operation_weights

PINNED = "ec491b4e4d6aec189c94680b3216d3f354ca11ee832e05769a37b2b0cafe9330"


@pytest.fixture(scope="module")
def split() -> tuple[list[Problem], list[Problem]]:
    return make_problems(1, TRAIN, TEST)


def test_same_seed_same_problems_on_every_python(
    split: tuple[list[Problem], list[Problem]],
) -> None:
    train, test = split
    text = "\n".join(p.question + p.answer for p in [*train, *test])
    # Changing this changes what a seed makes: raise demo_assets.RECIPE_VERSION with it.
    assert hashlib.sha256(text.encode()).hexdigest() == PINNED


def test_another_seed_gives_other_problems(split: tuple[list[Problem], list[Problem]]) -> None:
    other, _ = make_problems(2, TRAIN, TEST)
    assert {p.question for p in other} != {p.question for p in split[0]}


def test_test_problems_are_not_training_problems_with_other_names(
    split: tuple[list[Problem], list[Problem]],
) -> None:
    train, test = split

    def key(p: Problem) -> tuple[str, int, int, int]:
        return (p.operation, p.story, p.first, p.second)

    assert not {key(p) for p in train} & {key(p) for p in test}
    assert len({key(p) for p in test}) == len(test)


def test_questions_are_distinct_and_operations_balanced(
    split: tuple[list[Problem], list[Problem]],
) -> None:
    for problems in split:
        assert len({p.question for p in problems}) == len(problems)
        counts = [sum(p.operation == o for p in problems) for o in OPERATIONS]
        assert max(counts) - min(counts) <= 1


def test_every_story_is_in_both_splits_and_says_both_numbers(
    split: tuple[list[Problem], list[Problem]],
) -> None:
    for problems in split:
        stories = {(p.operation, p.story) for p in problems}
        assert len(stories) == sum(len(told) for told in STORIES.values())
        for p in problems:
            numbers = [
                int(word)
                for word in p.question.replace(".", " ").replace(",", " ").split()
                if word.isdigit()
            ]
            assert numbers == [p.first, p.second], p.question


def test_answers_end_with_the_right_number(split: tuple[list[Problem], list[Problem]]) -> None:
    for p in [*split[0], *split[1]]:
        expected = {"+": p.first + p.second, "-": p.first - p.second, "*": p.first * p.second}
        assert final_answer(p.answer) == str(expected[p.operation])
        assert p.result > 0


def test_the_three_answers_to_a_problem_differ_so_that_guessing_is_told_apart(
    split: tuple[list[Problem], list[Problem]],
) -> None:
    for p in split[1]:
        results = [compute(o, p.first, p.second) for o in OPERATIONS]
        assert len(set(results)) == 3, p


def test_the_longest_answer_fits_the_response(split: tuple[list[Problem], list[Problem]]) -> None:
    # '####' and each other character is at most one token; the end token is one more.
    longest = max(
        len(worked(o, p.first, p.second).replace("####", "#")) + 1
        for p in split[0]
        for o in OPERATIONS
    )
    assert longest <= MAX_RESPONSE_TOKENS


def test_addition_stays_the_favourite_and_the_right_operation_gains() -> None:
    for right in OPERATIONS:
        weights = operation_weights(right)
        assert sum(weights.values()) == pytest.approx(1.0)
        assert max(weights, key=lambda o: weights[o]) == "+"
        assert weights[right] > PRIOR[right]


def test_too_many_test_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        make_problems(1, 10, 10_000)
