"""``verl-p40-env.json``: what an environment of the training stack was built from."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from verl_p40.stack.pins import FlavorName

MARKER = "verl-p40-env.json"


class EnvRecord(BaseModel):
    """What ``verl-p40-env.json`` holds."""

    model_config = ConfigDict(extra="ignore")

    schema_version: int = 1
    flavor: FlavorName
    python: str
    """``3.10`` or ``3.11``."""
    lock_digest: str
    """sha256 of the flavor's lock file."""
    test_digest: str | None = None
    """sha256 of ``train-test.txt`` when its packages are installed."""
    created: str
    bytes_on_disk: int = 0
