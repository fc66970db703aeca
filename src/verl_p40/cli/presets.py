"""``verl-p40 presets``."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add this group to ``app``."""
