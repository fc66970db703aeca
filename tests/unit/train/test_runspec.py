from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from verl_p40.errors import UsageError
from verl_p40.train import checkpoints
from verl_p40.train.compose import select, to_yaml
from verl_p40.train.folder import RunFolder, file_text
from verl_p40.train.runspec import Request, RunSpec, make_runspec, split_arguments, stored_request

OVERRIDES = (
    "algorithm.adv_estimator=grpo",
    "trainer.total_training_steps=20",
    "data.train_batch_size=64",
)
REQUEST = Request("cpu-demo", OVERRIDES)


def _begin(spec: RunSpec) -> RunFolder:
    """What a first attempt leaves behind, without the training."""
    run = spec.run
    run.path.mkdir(parents=True)
    run.config.write_text(to_yaml(spec.config))
    run.env.write_text(
        file_text({"preset": "cpu-demo", "overrides": list(spec.composed.overrides), "rows": 1280})
    )
    run.add_event("start", step=0)
    return run


def _save(run: RunFolder, step: int) -> None:
    place = run.checkpoints / f"global_step_{step}"
    kinds = ("model", "optim", "extra_state")
    for name in ("data.pt", *(f"actor/{kind}_world_size_1_rank_0.pt" for kind in kinds)):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(place / name, "w") as archive:
            archive.writestr("a", "b")
    (run.checkpoints / checkpoints.TRACKER).write_text(str(step))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ("", ())),
        (["cpu-demo"], ("cpu-demo", ())),
        (["a.b=1", "+c=2"], ("", ("a.b=1", "+c=2"))),
        (["mine.yaml", "~a", "++b=[1,2]"], ("mine.yaml", ("~a", "++b=[1,2]"))),
    ],
)
def test_splitting(words: list[str], expected: tuple[str, tuple[str, ...]]) -> None:
    assert split_arguments(words) == expected


def test_a_stray_word_is_refused() -> None:
    with pytest.raises(UsageError, match="'p40-ppo' is neither"):
        split_arguments(["cpu-demo", "p40-ppo"])


def test_the_same_command_means_the_same_folder(verl_config: Path, tmp_path: Path) -> None:
    one, two = make_runspec(REQUEST, verl_config), make_runspec(REQUEST, verl_config)
    assert one.run == two.run
    assert one.action == "start"
    assert one.run.path.parent == tmp_path / "runs"
    assert one.run.name == f"cpu-demo-{one.digest[:6]}"
    other = make_runspec(replace(REQUEST, overrides=()), verl_config)
    wired = make_runspec(replace(REQUEST, tripwire=True), verl_config)
    assert len({one.run, other.run, wired.run}) == 3
    assert not (tmp_path / "runs").exists()


def test_the_run_s_own_paths_are_in_the_config(verl_config: Path) -> None:
    spec = make_runspec(replace(REQUEST, overrides=("trainer.logger=[console]",)), verl_config)
    assert select(spec.config, "trainer.default_local_dir") == str(spec.run.checkpoints)
    assert select(spec.config, "trainer.logger") == ["console", "file"]
    command = spec.command("/env/bin/python")
    assert command[:3] == ("/env/bin/python", "-m", "verl.trainer.main_ppo")
    assert command[command.index("--config-path") + 1] == str(spec.run.path)
    assert f"hydra.run.dir={spec.run.path}/hydra" in command


def test_an_unfinished_run_is_resumed(verl_config: Path) -> None:
    run = _begin(make_runspec(REQUEST, verl_config))
    assert make_runspec(REQUEST, verl_config).action == "restart"
    _save(run, 10)
    spec = make_runspec(REQUEST, verl_config)
    assert (spec.action, spec.step) == ("resume", 10)
    assert spec.command("python")[-1] == "trainer.val_before_train=false"


def test_a_finished_run_is_left_alone_until_it_is_extended(verl_config: Path) -> None:
    run = _begin(make_runspec(REQUEST, verl_config))
    _save(run, 20)
    # Killed between the last checkpoint and the end: verl would train a step too many.
    assert make_runspec(REQUEST, verl_config).action == "finished"
    run.add_event("end", step=20)
    assert make_runspec(REQUEST, verl_config).action == "finished"
    longer = Request("", ("trainer.total_training_steps=40",), run=run.name)
    spec = make_runspec(stored_request(longer), verl_config)
    assert spec.run == run
    assert (spec.action, spec.step) == ("resume", 20)
    assert select(spec.config, "algorithm.adv_estimator") == "grpo"


def test_epochs_count_as_steps_once_the_rows_are_known(verl_config: Path) -> None:
    """1,280 rows in batches of 64 are 20 steps an epoch."""
    request = replace(
        REQUEST,
        overrides=(
            "algorithm.adv_estimator=grpo",
            "data.train_batch_size=64",
            "trainer.total_training_steps=null",
            "trainer.total_epochs=1",
        ),
    )
    run = _begin(make_runspec(request, verl_config))
    _save(run, 20)
    run.add_event("end", step=20)
    assert make_runspec(request, verl_config).action == "finished"
    more = Request("", ("trainer.total_epochs=2",), run=run.name)
    assert make_runspec(stored_request(more), verl_config).action == "resume"


def test_a_finished_run_without_checkpoints_cannot_be_extended(verl_config: Path) -> None:
    run = _begin(make_runspec(REQUEST, verl_config))
    run.add_event("end", step=20)
    longer = Request("", ("trainer.total_training_steps=40",), run=run.name)
    with pytest.raises(UsageError, match="kept no checkpoint"):
        make_runspec(stored_request(longer), verl_config)


def test_another_config_is_another_run(verl_config: Path) -> None:
    run = _begin(make_runspec(REQUEST, verl_config))
    changed = Request("", ("data.train_batch_size=128", "algorithm.gamma=0.9"), run=run.name)
    with pytest.raises(UsageError, match=r"other settings: algorithm.gamma, data.train_batch_size"):
        make_runspec(stored_request(changed), verl_config)
    # The tripwire only watches.
    spec = make_runspec(stored_request(Request("", (), run=run.name, tripwire=True)), verl_config)
    assert spec.run == run


def test_new_takes_the_next_name(verl_config: Path) -> None:
    run = _begin(make_runspec(REQUEST, verl_config))
    spec = make_runspec(replace(REQUEST, new=True), verl_config)
    assert spec.run.name == f"{run.name}-2"
    assert spec.action == "start"
    assert "--run" in spec.user_command()


def test_a_folder_that_is_no_run_is_not_touched(verl_config: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="is not a run folder"):
        make_runspec(replace(REQUEST, run="mine"), verl_config)


@pytest.mark.parametrize("name", ["a/b", "..", ".x", ""])
def test_a_run_name_is_a_folder_name(verl_config: Path, name: str) -> None:
    with pytest.raises(UsageError, match="is not the name of a folder"):
        make_runspec(replace(REQUEST, run=name), verl_config)


def test_an_unknown_estimator_gets_the_nearest(verl_config: Path) -> None:
    with pytest.raises(UsageError, match="'grop'; nearest: grpo"):
        make_runspec(replace(REQUEST, overrides=("algorithm.adv_estimator=grop",)), verl_config)


def test_the_tripwire_takes_the_place_of_an_external_library_and_keeps_it(
    verl_config: Path,
) -> None:
    overrides = ("actor_rollout_ref.model.external_lib=my.models",)
    spec = make_runspec(replace(REQUEST, overrides=overrides, tripwire=True), verl_config)
    for section in ("actor_rollout_ref", "critic", "reward_model"):
        assert select(spec.config, f"{section}.model.external_lib") == "verl_p40.tripwire.arm"
    assert spec.chained == "my.models"
    assert "--tripwire" in spec.user_command()


def test_the_command_to_go_on_with_can_be_pasted(
    verl_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a newcomer's machine ``.venv/bin`` is not on PATH."""
    script = tmp_path / ".venv" / "bin" / "verl-p40"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    spec = make_runspec(REQUEST, verl_config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(script)])
    monkeypatch.setenv("PATH", "")
    assert spec.user_command().startswith(".venv/bin/verl-p40 train --run ")
    monkeypatch.chdir(script.parent)
    monkeypatch.chdir("..")
    assert spec.user_command().startswith("bin/verl-p40 ")
    monkeypatch.setenv("PATH", str(script.parent))
    assert spec.user_command().startswith("verl-p40 train --run ")
