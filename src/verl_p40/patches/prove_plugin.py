"""A pytest plugin that writes down what happened, for ``patches prove``.

Runs inside the training stack, so it imports nothing but pytest and the standard library.
``VERL_P40_PROVE_REPORT`` names the file it writes, ``VERL_P40_TREE`` the tree under test and
``VERL_P40_PROJECT`` the package in it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

_tests: list[dict[str, Any]] = []
_uncollected: list[dict[str, str]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(getattr(crash, "message", report.longrepr or "")) if report.failed else ""
    _tests.append(
        {
            "node": report.nodeid,
            "phase": report.when,
            "outcome": report.outcome,
            "message": message[:2000],
        }
    )


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _uncollected.append({"node": report.nodeid, "message": str(report.longrepr)[-2000:]})


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    target = os.environ.get("VERL_P40_PROVE_REPORT")
    if not target:
        return
    document = {
        "exit": int(exitstatus),
        "tests": _tests,
        "uncollected": _uncollected,
        "project": os.environ.get("VERL_P40_PROJECT", "verl"),
        "imported_from": _imported_from(),
    }
    # Renamed into place: a process that dies here leaves no half report to be believed.
    temporary = Path(f"{target}.part")
    temporary.write_text(json.dumps(document), encoding="utf-8")
    temporary.rename(target)


def _imported_from() -> str:
    """The folder that the package was imported from, if not the tree under test; else ``""``."""
    module = sys.modules.get(os.environ.get("VERL_P40_PROJECT", "verl"))
    origin = getattr(module, "__file__", None)
    tree = os.environ.get("VERL_P40_TREE")
    if origin is None or tree is None:
        return ""
    folder = Path(origin).resolve().parent.parent
    return "" if folder == Path(tree).resolve() else str(folder)
