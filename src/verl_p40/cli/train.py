"""``verl-p40 train``."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add this group to ``app``."""
