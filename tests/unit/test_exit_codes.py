"""The documented table of exit codes is the one in the code."""

from __future__ import annotations

import re
from pathlib import Path

from verl_p40.errors import ExitCode

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "exit-codes.md"


def test_documented_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z]+) \|", DOCUMENT.read_text(), re.MULTILINE)
    assert [(int(code), name) for code, name in rows] == [(c.value, c.name) for c in ExitCode]
