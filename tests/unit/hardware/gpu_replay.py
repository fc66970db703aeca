"""Plays real captures back: as a ``nvidia-smi`` program, and as NVML's library."""

from __future__ import annotations

import csv
import json
import stat
import sys
from pathlib import Path

CAPTURES = Path(__file__).parent / "captures"


def table(name: str) -> list[dict[str, str]]:
    with (CAPTURES / name).open(newline="") as file:
        return list(csv.DictReader(file, skipinitialspace=True))


def p40_q() -> dict[str, str]:
    """The ``nvidia-smi -q`` capture, flat: "Temperature/GPU Slowdown Temp" -> "92 C"."""
    values: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in (CAPTURES / "p40-q-535.129.03.txt").read_text().splitlines():
        if not line.startswith("    "):
            continue
        depth = len(line) - len(line.lstrip())
        name, _, value = (part.strip() for part in line.partition(" : "))
        path = [part for part in path if part[0] < depth]
        if value:
            values["/".join([*(part[1] for part in path), name])] = value
        else:
            path.append((depth, name))
    return values


def p40_row() -> dict[str, str]:
    """The same as ``--query-gpu --format=csv`` prints it."""
    q = p40_q()
    bits = {"Idle": 0x1, "Applications Clocks Setting": 0x2, "SW Power Cap": 0x4}
    prefix = "Clocks Event Reasons/"
    mask = sum(bit for name, bit in bits.items() if q[prefix + name] == "Active")
    assert all(
        value == "Not Active"
        for name, value in q.items()
        if name.startswith(prefix) and name.removeprefix(prefix) not in bits
    )
    return {
        "index": "0",
        "name": q["Product Name"],
        "uuid": "GPU-00000000-0000-0000-0000-000000000040",
        "utilization.gpu": q["Utilization/Gpu"],
        "utilization.memory": q["Utilization/Memory"],
        "memory.used": q["FB Memory Usage/Used"],
        "memory.total": q["FB Memory Usage/Total"],
        "power.draw": q["GPU Power Readings/Power Draw"],
        "enforced.power.limit": q["GPU Power Readings/Current Power Limit"],
        "temperature.gpu": q["Temperature/GPU Current Temp"].removesuffix(" C"),
        "fan.speed": f"[{q['Fan Speed']}]",
        "clocks.current.sm": q["Clocks/SM"],
        "clocks.current.memory": q["Clocks/Memory"],
        "pstate": q["Performance State"],
        "clocks_throttle_reasons.active": f"0x{mask:016x}",
        "pcie.link.gen.current": q["PCI/GPU Link Info/PCIe Generation/Current"],
        "pcie.link.width.current": q["PCI/GPU Link Info/Link Width/Current"].removesuffix("x"),
    }


def nvidia_smi(
    folder: Path,
    rows: list[dict[str, str]],
    apps: list[dict[str, str]] = [],  # noqa: B006 - never changed
    *,
    complaint: str = "",
    code: int = 0,
) -> Path:
    """A program that answers as nvidia-smi does.

    Args:
        rows: what it knows of each GPU, by field; a field that is in none of them is refused.
        complaint: a line before the rows, as for a GPU that fell off the bus.
        code: its exit code.

    What it answers lies in ``answers.json`` beside it, and may be changed while it is in use.
    """
    script = folder / "nvidia-smi"
    answers = {"rows": rows, "apps": apps, "complaint": complaint, "code": code}
    (folder / "answers.json").write_text(json.dumps(answers))
    script.write_text(f"#!{sys.executable} -IS\n" + _PROGRAM)
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


_PROGRAM = """
import json, pathlib, sys

answers = json.loads((pathlib.Path(__file__).parent / "answers.json").read_text())
what, wanted = sys.argv[1].split("=", 1)
bare = "nounits" in sys.argv[2]
rows = {"--query-gpu": answers["rows"], "--query-compute-apps": answers["apps"]}[what]
for field in wanted.split(","):
    if what == "--query-gpu" and rows and not any(field in row for row in rows):
        print(f'Field "{field}" is not a valid field to query.\\n')
        sys.exit(2)
if answers["complaint"] and what == "--query-gpu":
    print(answers["complaint"])
for row in rows:
    cells = [row[field] for field in wanted.split(",")]
    print(", ".join(c.split()[0] if bare and c[:1].isdigit() else c for c in cells))
sys.exit(answers["code"])
"""
