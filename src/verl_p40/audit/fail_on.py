"""Which outcomes make ``verl-p40 audit`` exit with 1."""

from __future__ import annotations

from collections.abc import Iterable

from verl_p40.audit.settings.model import KINDS, SettingFinding
from verl_p40.audit.tree_audit import Report
from verl_p40.errors import UsageError

TREE_LEVELS = ("failure", "stale")
LEVELS = (*TREE_LEVELS, *KINDS)
DEFAULT = "failure,stale,harmful,wrong,no-op"


def parse(text: str) -> frozenset[str]:
    """The levels of ``--fail-on``; ``never`` is none of them.

    Raises:
        UsageError: an unknown level.
    """
    words = {word.strip() for word in text.split(",") if word.strip()}
    if words == {"never"}:
        return frozenset()
    unknown = sorted(words - set(LEVELS))
    if unknown or not words:
        raise UsageError(
            f"--fail-on: unknown level {unknown[0] if unknown else '(empty)'}",
            fix=f"give some of {', '.join(LEVELS)}, or never",
        )
    return frozenset(words)


def tree_fails(reports: Iterable[Report], levels: frozenset[str]) -> bool:
    return any(
        ("failure" in levels and report.failures) or ("stale" in levels and report.stale)
        for report in reports
    )


def settings_fail(findings: Iterable[SettingFinding], levels: frozenset[str]) -> bool:
    return any(finding.kind in levels for finding in findings)
