"""``python -m verl_p40.health train|monitor [RUNS_DIR]``: one line, and 0 (healthy), 1 or 2."""

import os
import sys
from collections.abc import Sequence

from verl_p40.health.check import CHECKS, LimitError

USAGE = "usage: python -m verl_p40.health train|monitor [RUNS_DIR]"


def main(argv: Sequence[str]) -> int:
    if not 1 <= len(argv) <= 2 or argv[0] not in CHECKS:
        print(USAGE, file=sys.stderr)
        return 2
    runs_dir = argv[1] if len(argv) == 2 else os.environ.get("VERL_P40_RUNS") or "runs"
    try:
        health = CHECKS[argv[0]](runs_dir)
    except LimitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(health.line())
    return 0 if health.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
