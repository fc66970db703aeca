"""The Dockerfile's way to `verl-p40 wheel`: python3 scripts/vllm_wheel.py PYTHON WORK OUT ARCH.

It needs no more of our code than what builds the wheel, so that an edit of the rest does not make
the image's stage anew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from verl_p40.errors import VerlP40Error
from verl_p40.wheel import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", type=Path, help="interpreter with the torch of the stack")
    parser.add_argument("work", type=Path, help="folder that is kept")
    parser.add_argument("out", type=Path, help="where the wheel goes")
    parser.add_argument("arch", help="such as 6.1")
    args = parser.parse_args()
    built = build.build(
        build.make_request(lambda: args.python, args.arch, args.out, work=args.work),
        on_stage=lambda text: print(text, flush=True),
        on_step=lambda done, total, what: print(f"{done}/{total} {what}", flush=True),
    )
    print(
        f"{built.wheel.name}: {built.bytes / 1e6:.1f} MB, {len(built.compiled)} files compiled, "
        f"{built.seconds:.0f} s, {built.warnings} warnings"
    )


if __name__ == "__main__":
    try:
        main()
    except VerlP40Error as error:
        sys.exit(f"error: {error.message}\n  fix: {error.fix}")
