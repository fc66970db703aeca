#!/usr/bin/env python3
"""Run the tests, on a machine with nothing but Python 3.10 or 3.11: python3 scripts/test.py

usage: python3 scripts/test.py [--fast] [--offline] [SESSION ...]

Sets up what is missing, then runs scripts/checks.py: lint, unit tests, lock check, audit, the
patch queue's proofs and real training runs. --fast: lint and unit tests alone.
"""

import sys

if sys.version_info < (3, 7):  # noqa: UP036 - an old python3 gets a sentence, not a traceback
    sys.exit("error: Python 3.10 or 3.11 is needed\n  fix: python3.11 scripts/test.py")

from bootstrap import ROOT, start

if __name__ == "__main__":
    start("dev.txt", ["python", str(ROOT / "scripts" / "checks.py"), *sys.argv[1:]])
