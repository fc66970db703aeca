"""What is compared of a checkpoint, and that the comparison can fail. The real run is `nox -s smoke`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_p40.smoke import ppo
from verl_p40.smoke.model import Failed
from verl_p40.train.compose import compose, select
from verl_p40.train.metrics import StepRow
from verl_p40.train.runspec import EXTENDABLE

SAVED = {"model": "m1", "optimizer": "o1", "rng": "r1", "bytes": 100}
LOADED = {**SAVED, "before": {"model": "m0", "optimizer": "o0", "rng": "r0", "bytes": 60}}


def write(folder: Path, saved: dict[str, Any] | None, loaded: dict[str, Any] | None) -> None:
    for kind, document in (("saved", saved), ("loaded", loaded)):
        if document is not None:
            (folder / f"{kind}-global_step_1-actor-0.json").write_text(json.dumps(document))


def test_equal_states_pass(tmp_path: Path) -> None:
    write(tmp_path, SAVED, LOADED)
    assert ppo.compare(tmp_path, "actor") == 100


@pytest.mark.parametrize("part", ["model", "optimizer", "rng"])
def test_a_part_that_differs_fails(tmp_path: Path, part: str) -> None:
    write(tmp_path, SAVED, {**LOADED, part: "other"})
    with pytest.raises(Failed, match=f"actor: the {part} state loaded is not the one saved"):
        ppo.compare(tmp_path, "actor")


def test_weights_that_were_there_before_prove_nothing(tmp_path: Path) -> None:
    write(tmp_path, SAVED, {**LOADED, "before": SAVED})
    with pytest.raises(Failed, match="were the saved ones already"):
        ppo.compare(tmp_path, "actor")


def test_what_was_never_saved_or_loaded_fails(tmp_path: Path) -> None:
    write(tmp_path, None, LOADED)
    with pytest.raises(Failed, match="nothing was saved"):
        ppo.compare(tmp_path, "actor")
    write(tmp_path, SAVED, None)
    (tmp_path / "loaded-global_step_1-actor-0.json").write_text("{ cut off")
    with pytest.raises(Failed, match="nothing was loaded"):
        ppo.compare(tmp_path, "actor")


class _Summary:
    def __init__(self, *rows: StepRow) -> None:
        self.rows = rows


GOOD = StepRow(1, reward=0.5, kl=0.0, entropy=0.1, value_loss=0.5, seconds=4.0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((), "no metrics of step 1"),
        ((StepRow(2),), "no metrics of step 1"),
        ((StepRow(1, reward=0.5, kl=0.0, entropy=0.1, seconds=4.0),), "value_loss is None"),
        (
            (StepRow(1, reward=0.5, kl=float("nan"), entropy=0.1, value_loss=1.0, seconds=4.0),),
            "kl is nan",
        ),
    ],
)
def test_figures_must_be_there_and_finite(rows: tuple[StepRow, ...], words: str) -> None:
    with pytest.raises(Failed, match=words):
        ppo._last_row(_Summary(*rows), 1)  # type: ignore[arg-type]


def test_a_good_row() -> None:
    assert ppo._last_row(_Summary(GOOD), 1) is GOOD  # type: ignore[arg-type]


def test_both_steps_are_one_run(tmp_path: Path) -> None:
    """The second request differs in nothing but how far it goes."""
    one, two = (ppo.request("cpu", steps, tmp_path) for steps in (1, 2))
    assert (one.run, one.runs_dir, one.tripwire) == (two.run, two.runs_dir, True)
    differing = set(one.overrides) ^ set(two.overrides)
    assert {word.split("=")[0] for word in differing} == {"trainer.total_training_steps"}
    assert "trainer.total_training_steps" in EXTENDABLE
    assert "actor_rollout_ref.model.external_lib" in EXTENDABLE


@pytest.mark.stack
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_overrides_fit_verls_config(device: Any, tmp_path: Path) -> None:
    import verl

    config = Path(verl.__file__).parent / "trainer" / "config"
    request = ppo.request(device, 1, tmp_path)
    composed = compose(request.preset, request.overrides, config).config
    assert select(composed, "trainer.device") == device
    assert select(composed, "actor_rollout_ref.actor.fsdp_config.optimizer_offload") is (
        device == "cuda"
    )
    assert select(composed, "actor_rollout_ref.rollout.dtype") == "float32"


@pytest.mark.stack
def test_digests_are_of_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from verl_p40.smoke import watch

    class Manager:
        def __init__(self) -> None:
            torch.manual_seed(1)
            self.model = torch.nn.Linear(4, 3)
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.model(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()

        def get_rng_state(self) -> dict[str, Any]:
            import random

            import numpy

            return {
                "cpu": torch.get_rng_state(),
                "numpy": numpy.random.RandomState(1).get_state(),
                "random": random.Random(1).getstate(),
            }

    first, again = watch.digests(Manager()), watch.digests(Manager())
    assert first == again
    # weight and bias; exp_avg and exp_avg_sq of both, and two step counters
    assert first["bytes"] == 4 * (15 + 2 * 15 + 2)
    manager = Manager()
    with torch.no_grad():
        manager.model.bias[0] = torch.nextafter(manager.model.bias[0], torch.tensor(9.0))
    changed = watch.digests(manager)
    assert changed["model"] != first["model"]
    assert (changed["optimizer"], changed["rng"]) == (first["optimizer"], first["rng"])
    manager = Manager()
    manager.optimizer.state[manager.model.weight]["exp_avg"][0, 0] += 1e-6
    assert watch.digests(manager)["optimizer"] != first["optimizer"]
    manager = Manager()
    torch.rand(1)
    assert watch.digests(manager)["rng"] != first["rng"]
