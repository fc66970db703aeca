"""Every rule speaks for the real lines it names, and not for its near-misses."""

from __future__ import annotations

import re

import pytest
import yaml
from pydantic import ValidationError

from verl_p40.diagnose import diagnose_lines
from verl_p40.diagnose.match import literal
from verl_p40.diagnose.model import Rule, parse, rules
from verl_p40.diagnose.scan import scan

RULES = rules()
BY_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)


@BY_RULE
def test_real_lines_are_known_and_told_without_gaps(rule: Rule) -> None:
    for example in rule.examples:
        diagnosis = diagnose_lines(example.log.splitlines())
        others = (*diagnosis.symptoms, *diagnosis.harmless)
        if rule.role == "cause":
            assert [cause.kind for cause in diagnosis.causes][:1] == [rule.name], example.log
        else:
            assert diagnosis.causes == (), example.log
            assert rule.id in {finding.id for finding in others}, example.log
        for finding in (*diagnosis.causes, *others):
            for text in (finding.text, finding.why, *finding.fix):
                assert not re.search(r"(?<!\$)\{\w+\}", text), "a placeholder stayed open"


@BY_RULE
def test_near_misses_are_not_taken_for_it(rule: Rule) -> None:
    for log in rule.near_misses:
        assert rule.id not in {cause.id for cause in diagnose_lines(log.splitlines()).causes}, log


def test_the_scan_keeps_each_of_these_lines_among_hundreds_of_others() -> None:
    """The quick search for telling words must not lose what a rule would see."""
    clean = b"step 1 of the warmup done, 12 tokens\n" * 150
    for rule in RULES:
        for example in rule.examples:
            kept = scan([clean + example.log.encode() + b"\n" + clean])
            assert any(line.hot for line in kept.lines), example.log


@pytest.mark.parametrize(
    ("pattern", "needed"),
    [
        ("CUDA out of memory", "CUDA out of memory"),
        (r"Error 80[234]: not ready", ": not ready"),
        (r"a|bcd", ""),
        (r"(?:abc|def) was (\w+) here", " was "),
        (r"colou?rs are many", "rs are many"),
        (r"x{2}yyy\.so", "yyy.so"),
        (r"(?i)error", ""),
    ],
)
def test_the_text_that_every_match_holds(pattern: str, needed: str) -> None:
    assert literal(pattern) == needed


RULE = {
    "id": "a-rule",
    "match": "boom",
    "cause": "it went boom here",
    "why": "it says so",
    "fix": "mend it",
    "examples": ["boom"],
    "near_misses": ["bloom"],
}


def family(**changes: object) -> str:
    rule = {key: value for key, value in {**RULE, **changes}.items() if value is not None}
    return yaml.safe_dump({"family": "f", "about": "things that boom", "rules": [rule]})


def test_a_rule_is_data() -> None:
    (rule,) = parse(family()).rules
    assert rule.match == ("boom",)
    assert rule.name == "a-rule"


@pytest.mark.parametrize(
    "changes",
    [
        {"match": "("},
        {"id": "Not A Name"},
        {"examples": None},
        {"near_misses": None},
        {"fix": None},
        {"why": None},
        {"confidence": "certain"},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_rule_that_is_not_of_the_schema_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        parse(family(**changes))
