"""Runs the nox sessions that make up "the tests" and sums them up. scripts/test.py starts it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAST = ["lint", "tests"]
FULL = [*FAST, "lock", "audit", "patches", "vllm", "stack", "train", "image"]


def run_session(name: str, arguments: list[str], folder: Path) -> list[dict[str, object]]:
    """Run one session to its end; nox's own report of it (one entry a Python version)."""
    report = folder / f"{name}.json"
    command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    command += ["--report", str(report), "--session", name]
    if arguments:
        command += ["--", *arguments]
    # nox looks for uv on PATH, and it stands beside this interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    env = {**os.environ, "PATH": path, "VERL_P40_JUNIT": str(folder)}
    code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    if not report.is_file():
        return [{"name": name, "result": f"nox exit code {code}", "seconds": 0.0}]
    entries = [
        {
            "name": (entry.get("signatures") or [entry["name"]])[0],
            "result": entry["result"],
            "seconds": entry.get("duration") or 0.0,
        }
        for entry in json.loads(report.read_text())["sessions"]
    ]
    if code and all(entry["result"] in ("success", "skipped") for entry in entries):
        entries.append({"name": name, "result": f"nox exit code {code}", "seconds": 0.0})
    return entries


def count(folder: Path) -> dict[str, int]:
    """What pytest counted, over all its reports."""
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for path in folder.glob("*.xml"):
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped = int(suite.get("skipped", 0))
            total["failed"] += failed
            total["skipped"] += skipped
            total["passed"] += int(suite.get("tests", 0)) - failed - skipped
    return total


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 scripts/test.py", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="lint and unit tests alone")
    parser.add_argument(
        "--offline", action="store_true", help="check the locks without resolving them again"
    )
    parser.add_argument("session", nargs="*", help=f"nox sessions; by default {' '.join(FULL)}")
    args = parser.parse_args()
    sessions = args.session or (FAST if args.fast else FULL)
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="verl-p40-checks-") as name:
        folder = Path(name)
        for session in sessions:
            extra = []
            if session == "lock":
                extra = ["--check", "--offline"] if args.offline else ["--check"]
            results += run_session(session, extra, folder)
        counted = count(folder)
    print("\n== summary ==")
    for entry in results:
        print(f"{entry['result']!s:>10}  {entry['name']}  ({entry['seconds']:.0f} s)")
    bad = [entry for entry in results if entry["result"] not in ("success", "skipped")]
    # A session that fails without a failing test (lint, an import error) counts as one failure.
    failed = max(counted["failed"], len(bad))
    print(f"{counted['passed']} passed, {failed} failed, {counted['skipped']} skipped")
    if not any(entry["result"] == "success" for entry in results):
        print("nothing ran", file=sys.stderr)
        return 1
    return 1 if bad or failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
