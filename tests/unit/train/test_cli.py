"""The commands as they are typed, in this process: output, exit code, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_p40.cli import main
from verl_p40.train import checks, source
from verl_p40.train.compose import from_yaml, select


@pytest.fixture(autouse=True)
def here(tmp_path: Path, verl_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Composed from the pinned wheel, whatever stack this machine has.
    monkeypatch.setattr(source, "config_folder", lambda stack, say=None: verl_config)


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main.run(list(words))
    out, err = capsys.readouterr()
    return int(done.value.code or 0), out, err


def test_presets_lists_each_with_what_showed_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "presets", "--json")
    assert code == 0
    listed = {entry["name"]: entry["shown"] for entry in json.loads(out)}
    assert listed["cpu-demo"] == "CPU run"
    code, out, _ = _run(capsys, "presets")
    assert code == 0
    assert all(name in out for name in listed)


def test_presets_show_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "presets", "show", "p40-recipe")
    assert code == 0
    assert "VLLM_DTYPE" in out
    assert "cpu_offload: true" in out
    code, out, _ = _run(capsys, "presets", "show", "p40-recipe", "--json")
    assert json.loads(out)["env"]["VLLM_DTYPE"]["noop"] is True
    code, _, err = _run(capsys, "presets", "show", "p40")
    assert code == 2
    assert "p40-ppo" in err.split("nearest: ")[1].splitlines()[0]


def test_a_dry_run_is_a_config_and_a_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, _ = _run(capsys, "train", "cpu-demo", "--dry-run", "trainer.total_epochs=3")
    assert code == 0
    config = from_yaml(out)
    assert select(config, "trainer.total_epochs") == 3
    assert "-m verl.trainer.main_ppo --config-path" in out
    assert "#   OMP_NUM_THREADS=" in out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = _run(capsys, "train", "--dry-run", "--json", "--tripwire")
    assert code == 0
    document = json.loads(out)
    assert document["preset"] == "cpu-demo"
    assert document["action"] == "start"
    assert Path(document["run"]).parent == tmp_path / "runs"
    assert document["env"]["VERL_P40_TRIPWIRE_DIR"] == document["run"]
    assert document["env"]["RAY_agent_register_timeout_ms"]
    assert select(document["config"], "critic.model.external_lib") == "verl_p40.tripwire.arm"


def test_the_user_s_own_variables_win(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    _, out, _ = _run(capsys, "train", "--dry-run", "--json")
    assert "OMP_NUM_THREADS" not in json.loads(out)["env"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nonesuch"], 2, "unknown preset 'nonesuch'"),
        (["cpu-demo", "data.trian_batch_size=4"], 2, "nearest: data.train_batch_size"),
        (["cpu-demo", "data.train_batch_size=4"], 2, "larger than data.train_batch_size (4)"),
        (["cpu-demo", "--run", "a/b"], 2, "is not the name of a folder"),
        (["p40-ppo"], 3, "no CUDA device"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(checks, "cuda_devices", lambda: 0)
    got, _, err = _run(capsys, "train", *words)
    assert got == code
    assert said in err
    assert sum(line.startswith("error:") for line in err.splitlines()) == 1
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []
