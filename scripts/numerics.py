#!/usr/bin/env python3
"""vLLM's kernels for a P40 against float64, on a newer GPU: python3 scripts/numerics.py all FOLDER

usage: python3 scripts/numerics.py {all|build|run|show} ...      (--help says more)

Sets up what is missing, then compiles the patched kernels to PTX for compute capability 6.1 (nvcc,
no GPU), lets the driver of the GPU at hand compile and run that PTX, and prints a table.
"""

import sys

if sys.version_info < (3, 7):  # noqa: UP036 - an old python3 gets a sentence, not a traceback
    sys.exit("error: Python 3.10 or 3.11 is needed\n  fix: python3.11 scripts/numerics.py")

from bootstrap import start

if __name__ == "__main__":
    start("tool.txt", ["python", "-m", "verl_p40.numerics", *sys.argv[1:]])
