#!/usr/bin/env python3
"""Throughput of `verl-p40 diagnose`: python benchmarks/diagnose.py [--mb 50 100 200] [--corpus]

Reads clean training logs of growing size (verl's console logger, vLLM's lines, progress bars, and a
sampled response now and then) on one core, and the same file through `grep -E` with every pattern of
every rule at once. Prints MB/s of both, their ratio, and the time per MB by size: linear means that
it stays the same.

--corpus prints the confusion table of the real reports in tests/unit/diagnose/corpus instead: what
each kind was taken for, and how the rules did before they were adapted to a report.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from verl_p40.diagnose import diagnose_chunks, diagnose_lines
from verl_p40.diagnose.model import rules

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "unit" / "diagnose" / "corpus"
_WORDS = (
    "the of and to in is that we have so each box holds apples then Natalia sold half as many clips "
    "in May altogether therefore answer total twelve minus plus equals first second per day week"
)
_CHUNK = 1 << 20


def write_log(path: Path, size: int) -> None:
    """A clean log of ``size`` bytes, the same for the same size."""
    draw = random.Random(size)
    written = step = 0
    with path.open("w") as file:
        while written < size:
            step += 1
            lines = [
                f"\x1b[36m(TaskRunner pid=20514)\x1b[0m step:{step} - global_seqlen/min:{draw.random():.3f}"
                f" - actor/entropy:{draw.random():.3f} - actor/pg_loss:{draw.random():.4f} - "
                f"critic/score/mean:{draw.random():.3f} - timing_s/gen:{5 * draw.random():.2f} - "
                f"perf/max_memory_allocated_gb:14.8 - response_length/mean:{draw.randrange(256)}.0",
                f"Training Progress:  {step % 100}%|{'#' * (step % 9)}   | {step}/9999 [01:10<08:30]",
                f"INFO 06-01 12:{step % 60:02}:00 llm_engine.py:431] Avg generation throughput: "
                f"{100 * draw.random():.1f} tokens/s, Running: {step % 7} reqs",
            ]
            if step % 5 == 0:
                lines.append(" ".join(draw.choice(_WORDS.split()) for _ in range(60)))
            text = "\n".join(lines) + "\n"
            written += len(text)
            file.write(text)


def ours(path: Path) -> float:
    began = time.process_time()
    with path.open("rb") as file:
        diagnosis = diagnose_chunks(iter(lambda: file.read(_CHUNK), b""))
    if diagnosis.causes:
        sys.exit(f"a clean log has no cause, and {diagnosis.causes[0].id} was found")
    return time.process_time() - began


def grep(path: Path, patterns: Path) -> float:
    """`grep -E` has no lookarounds, named groups or \\d: they are rewritten or dropped."""
    before = os.times()
    subprocess.run(["grep", "-aEc", "-f", str(patterns), str(path)], stdout=subprocess.DEVNULL)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def as_ere(pattern: str) -> str:
    text = re.sub(r"\(\?P<\w+>|\(\?:", "(", pattern.removeprefix("(?i)"))
    text = re.sub(r"\(\?<?[=!][^()]*\)", "", text)
    text = re.sub(r"([*+?}])\?", r"\1", text)
    text = re.sub(r"(^|[(|])\?", r"\1", text)
    return text.replace(r"\d", "[0-9]").replace(r"\S", "[^[:space:]]").replace(r"\s", "[[:space:]]")


def throughput(sizes: list[int]) -> None:
    patterns = [as_ere(pattern) for rule in rules() for pattern in rule.match]
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "patterns"
        good = [p for p in patterns if grep_takes(p)]
        listed.write_text("\n".join(good) + "\n")
        print(f"{len(rules())} rules, {len(patterns)} patterns, {len(good)} of them for grep -E")
        for megabytes in sizes:
            log = Path(folder) / "log"
            write_log(log, megabytes * 1_000_000)
            size = log.stat().st_size / 1e6
            mine, theirs = ours(log), grep(log, listed)
            print(
                f"{size:6.0f} MB: diagnose {size / mine:6.1f} MB/s ({1000 * mine / size:.1f} ms/MB), "
                f"grep -E {size / theirs:6.1f} MB/s, ratio {theirs / mine:.1f}"
            )


def grep_takes(pattern: str) -> bool:
    done = subprocess.run(["grep", "-E", "-e", pattern], input=b"", capture_output=True)
    return done.returncode < 2


def confusion() -> None:
    first: Counter[tuple[str, str]] = Counter()
    rows: Counter[tuple[str, str, str]] = Counter()
    for file in sorted(CORPUS.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            report = json.loads(line)
            diagnosis = diagnose_lines(report["log"].splitlines())
            said = [f"{cause.kind} ({cause.confidence})" for cause in diagnosis.causes]
            rows[file.stem, report["kind"], ", ".join(said) or diagnosis.result] += 1
            if "first" in report:
                first[file.stem, report["first"]] += 1
    for (source, kind, said), count in sorted(rows.items()):
        print(f"{source:8} {kind:32} {count:3}  {said}")
    for (source, result), count in sorted(first.items()):
        print(f"before adapting the rules, {source}: {result} {count}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, nargs="+", default=[25, 50, 100])
    parser.add_argument("--corpus", action="store_true")
    arguments = parser.parse_args()
    if not arguments.corpus and shutil.which("grep") is None:
        sys.exit("grep is missing")
    confusion() if arguments.corpus else throughput(arguments.mb)
