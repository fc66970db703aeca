#!/usr/bin/env python3
"""What a container of the image starts: service.py train|monitor|smoke [arguments]

Tries the mounted folders, says in one line what is wrong and what to set, and becomes
`verl-p40 train $VERL_P40_PRESET $VERL_P40_OVERRIDES` (or with the arguments), `verl-p40 monitor` or
`verl-p40 smoke`: docs/services.md.
"""

import sys

try:
    from verl_p40.services.start import main
except ModuleNotFoundError as error:
    if error.name != "verl_p40":
        raise
    print(
        "error: verl-p40 is not installed for this Python: service.py is what the image starts\n"
        "  fix: docker compose run --rm train, or without Docker: python3 scripts/train.py",
        file=sys.stderr,
    )
    sys.exit(3)  # docs/exit-codes.md: ENVIRONMENT

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
