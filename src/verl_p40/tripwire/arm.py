"""Importing this module arms the tripwire in the importing process, for as long as it lives.

verl imports ``actor_rollout_ref.model.external_lib`` at the start of each worker's
``init_model``, before any weight is loaded; the critic's and the reward model's settings refer
to the same one. A worker runs all its methods in the thread that did this import.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from verl_p40.tripwire import record
from verl_p40.tripwire.mode import Tripwire


def _arm() -> Tripwire:
    folder = os.environ.get("VERL_P40_TRIPWIRE_DIR")
    if folder:
        place = Path(folder)
        tripwire = Tripwire(
            on_trip=lambda trip: record.write_trip(place, trip),
            on_count=record.Counter(place).write,
        )
    else:
        tripwire = Tripwire()
    tripwire.__enter__()
    print(f"verl-p40 tripwire armed in process {os.getpid()}", flush=True)
    return tripwire


for _name in filter(None, os.environ.get("VERL_P40_TRIPWIRE_CHAIN", "").split(",")):
    # What the user had set as external_lib, which the tripwire took the place of.
    importlib.import_module(_name)

TRIPWIRE = _arm()
