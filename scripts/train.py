#!/usr/bin/env python3
"""Train, on a machine with nothing but Python 3.10 or 3.11: python3 scripts/train.py

usage: python3 scripts/train.py [PRESET] [key=value ...]

Sets up what is missing, then runs `verl-p40 train` with the same arguments. Without a preset it
trains cpu-demo: PPO on a small Qwen2, on the CPU, in about two minutes.
"""

import sys

if sys.version_info < (3, 7):  # noqa: UP036 - an old python3 gets a sentence, not a traceback
    sys.exit("error: Python 3.10 or 3.11 is needed\n  fix: python3.11 scripts/train.py")

from bootstrap import start

if __name__ == "__main__":
    start("tool.txt", ["verl-p40", "train", *sys.argv[1:]])
