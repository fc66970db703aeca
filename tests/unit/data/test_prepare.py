"""What a preset's data is reused from, without any stack: these must not start a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from verl_p40.data import folder, prepare
from verl_p40.data.demo_assets import recipe as demo_recipe
from verl_p40.errors import MachineError, UsageError
from verl_p40.stack.env import StackEnv
from verl_p40.stack.record import EnvRecord

UNUSABLE = StackEnv(
    Path("/nonexistent"),
    Path("/nonexistent/bin/python"),
    EnvRecord(flavor="cpu", python="3.10", lock_digest="0" * 64, created="2025-01-01T00:00:00Z"),
)
"""Starting its Python fails: a test that passes with it has started none."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_P40_DATA", str(tmp_path))
    return tmp_path


def put(target: Path, kind: str, recipe: dict[str, object]) -> None:
    def build(fresh: Path) -> dict[str, object]:
        (fresh / "train.parquet").write_text("x")
        return {"rows": {"train": 1, "test": 1}}

    folder.make(target, kind, recipe, build, reuse=lambda _: False)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("demo", demo_recipe(prepare.DEFAULT_SEED)),
        ("demo", demo_recipe(7)),
        ("gsm8k", {"version": 1, "source": "local", "any_count": True}),
    ],
)
def test_what_is_there_is_reused(home: Path, kind: str, recipe: dict[str, object]) -> None:
    put(home / kind, kind, recipe)
    made = prepare.ensure(kind, stack_env=UNUSABLE)
    assert made.reused
    assert made.train == home / kind / "train.parquet"
    assert (made.model is not None) == (kind == "demo")


@pytest.mark.parametrize("case", ["old recipe", "damaged", "other kind", "missing"])
def test_what_does_not_serve_is_made_again(home: Path, case: str) -> None:
    recipe = demo_recipe(1) if case != "old recipe" else {**demo_recipe(1), "version": 0}
    if case != "missing":
        put(home / "demo", "gsm8k" if case == "other kind" else "demo", recipe)
    if case == "damaged":
        (home / "demo" / "train.parquet").write_text("y")
    with pytest.raises(MachineError, match="cannot start /nonexistent/bin/python"):
        prepare.ensure("demo", stack_env=UNUSABLE)


def test_an_unknown_kind_is_one_line(home: Path) -> None:
    with pytest.raises(UsageError, match="unknown data set 'mnist'"):
        prepare.ensure("mnist", stack_env=UNUSABLE)


def test_the_light_side_imports_nothing_heavy() -> None:
    code = (
        "import sys, verl_p40.data.prepare, verl_p40.cli.data;"
        "print([m for m in ('torch', 'pyarrow', 'transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
