"""verl's own GSM8K scorer, read from the installed verl without importing verl.

``import verl`` loads Ray and takes seconds; the scorer's file needs only ``re``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

from verl_p40.errors import MachineError

Score = Callable[[str, str], float]
"""``(response, ground truth) -> 1.0`` for a right answer behind ``####``, else 0."""


def load() -> Score:
    """``compute_score`` of ``verl/utils/reward_score/gsm8k.py``.

    Raises:
        MachineError: verl is not installed in this interpreter.
    """
    found = importlib.util.find_spec("verl")
    folders = list(found.submodule_search_locations or []) if found else []
    for folder in folders:
        path = Path(folder) / "utils" / "reward_score" / "gsm8k.py"
        if path.is_file():
            spec = importlib.util.spec_from_file_location("_verl_gsm8k_scorer", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return cast("Score", module.compute_score)
    raise MachineError("verl is not installed in this interpreter", fix="verl-p40 stack install")
