"""Real public reports: the right root cause, and never a wrong one with confidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_p40.diagnose import diagnose_lines
from verl_p40.diagnose.match import hits
from verl_p40.diagnose.model import rules
from verl_p40.diagnose.scan import scan

FOLDER = Path(__file__).parent / "corpus"
REPORTS = [
    json.loads(line)
    for file in sorted(FOLDER.glob("*.jsonl"))
    for line in file.read_text(encoding="utf-8").splitlines()
]
FALLBACK = {rule.id for rule in rules() if rule.fallback}
"""They only repeat the program's own error, at low confidence."""
NOTHING_IN_IT = {"E076"}
"""The excerpt ends before the error: only the reporter's own words name a cause."""
SYMPTOM = {"vllm-v1-engine-start", "sigkill-suspected", "pip-build-failed"}
BROADER = {
    ("nccl-network", "port-in-use"),
    ("cuda-oom-wake-up", "cuda-oom-weight-sync"),
    ("vllm-cc-below-minimum", "bf16-unsupported"),
}
"""A report's kind, and another that is true of it too: both phases of one out of memory, two faults."""
"""Kinds that the corpus itself calls a pure symptom: no cause may be claimed."""


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: f"{r['id']}-{r['kind']}")
def test_corpus(report: dict[str, Any]) -> None:
    diagnosis = diagnose_lines(report["log"].splitlines())
    kinds = [cause.kind for cause in diagnosis.causes]
    if report["id"] in NOTHING_IN_IT:
        assert kinds == []
    elif report["kind"] == "nothing":
        assert {cause.id for cause in diagnosis.causes} <= FALLBACK
        assert diagnosis.causes or diagnosis.suspicious
    elif report["harmless"]:
        assert kinds == []
        assert diagnosis.harmless
    elif report["kind"] in SYMPTOM:
        assert kinds == []
        assert report["kind"] in {finding.kind for finding in diagnosis.symptoms}
    else:
        assert report["kind"] in kinds
        wrong = [c for c in diagnosis.causes if c.kind != report["kind"] and c.confidence == "high"]
        allowed = set(report.get("also", ())) | ({"bf16-unsupported"} if len(kinds) > 1 else set())
        assert {cause.kind for cause in wrong} <= allowed


def test_corpus_both_faults_of_one_log_are_told_in_order() -> None:
    (report,) = [report for report in REPORTS if report["id"] == "E003"]
    kinds = [cause.kind for cause in diagnose_lines(report["log"].splitlines()).causes]
    assert kinds == ["bf16-unsupported", "vllm-cc-below-minimum"]


def test_corpus_no_rule_speaks_with_certainty_for_another_s_report() -> None:
    """Each rule alone against every report: none may rest on a better one being there."""
    for report in REPORTS:
        true_of_it = {report["kind"], *report.get("also", ())}
        true_of_it |= {other for kind, other in BROADER if kind == report["kind"]}
        certain = {
            hit.rule.id
            for hit in hits(scan([report["log"].encode()]))
            if hit.rule.role == "cause"
            and hit.rule.confidence == "high"
            and not hit.loose
            and not hit.line.mild
            and hit.rule.name not in true_of_it
        }
        assert certain == set(), report["id"]
