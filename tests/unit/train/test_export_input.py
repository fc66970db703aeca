"""What `verl-p40 export` refuses, in one line, before anything is written."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from verl_p40.cli import main
from verl_p40.errors import ExitCode
from verl_p40.train import export
from verl_p40.train.folder import RunFolder

CONFIG = """
algorithm: {adv_estimator: grpo}
trainer: {n_gpus_per_node: 1, nnodes: 1}
actor_rollout_ref:
  model: {path: no/such-model}
  actor: {strategy: fsdp}
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "mine")
    folder.path.mkdir(parents=True)
    folder.config.write_text(CONFIG)
    return folder


def _save(run: RunFolder, step: int, content: bytes | None = None) -> None:
    place = run.checkpoints / f"global_step_{step}"
    (place / "actor").mkdir(parents=True)
    for path in (place / "actor" / "model_world_size_1_rank_0.pt", place / "data.pt"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", b"x" * 1000)
        if content is not None:
            path.write_bytes(content)


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main.run(["export", *words])
    error = capsys.readouterr().err
    assert error.startswith("error: "), error
    return int(end.value.code or 0), error


def test_no_such_run(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, error = _refused(capsys, "nothing", str(tmp_path / "out"))
    assert code == ExitCode.DATA
    assert "nothing is no run folder" in error
    assert "one of mine" in error


def test_no_checkpoint_and_no_such_step(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = _refused(capsys, "mine", str(tmp_path / "out"))
    assert (code, "has no whole checkpoint" in error) == (ExitCode.DATA, True)
    _save(run, 10)
    code, error = _refused(capsys, "mine", str(tmp_path / "out"), "--step", "7")
    assert (code, "has no checkpoint of step 7" in error) == (ExitCode.DATA, True)
    assert "--step: 10" in error


def test_a_cut_off_checkpoint_is_named(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(run, 10, b"PK\x03\x04 cut off")
    code, error = _refused(capsys, "mine", str(tmp_path / "out"), "--step", "10")
    assert code == ExitCode.DATA
    assert (
        "the checkpoint of step 10 cannot be exported: actor/model_world_size_1_rank_0.pt" in error
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


def test_a_place_that_is_taken_and_a_dtype_that_is_none(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(run, 10)
    code, error = _refused(capsys, "mine", str(run.path))
    assert (code, f"{run.path} exists" in error) == (ExitCode.USAGE, True)
    code, error = _refused(capsys, "mine", str(tmp_path / "a" / "b"))
    assert (code, f"{tmp_path / 'a'} does not exist" in error) == (ExitCode.USAGE, True)
    code, error = _refused(capsys, "mine", str(tmp_path / "out"), "--dtype", "int8")
    assert (code, "one of float32, float16, bfloat16" in error) == (ExitCode.USAGE, True)


def test_a_disk_that_is_too_small(
    run: RunFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _save(run, 10)
    usage = export.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(export.shutil, "disk_usage", lambda place: usage._replace(free=100))
    code, error = _refused(capsys, "mine", str(tmp_path / "out"))
    assert (code, "has 0.0 GB free" in error) == (ExitCode.DISK, True)


def test_a_failed_merge_leaves_nothing(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stack's Python writes half of the folder, and dies."""
    _save(run, 10)

    class Stack:
        def run_module(self, module: str, args: list[str], **_: object) -> object:
            order = json.loads(Path(args[0]).read_text())
            Path(order["out"]).mkdir()
            (Path(order["out"]) / "model.safetensors").touch()
            return type("Done", (), {"stdout": "", "stderr": "MemoryError", "returncode": 1})

    monkeypatch.setattr(export, "_stack", lambda run: Stack())
    monkeypatch.setattr(export.source, "check_tree", lambda stack: "")
    with pytest.raises(export.DataError, match=r"cannot be merged \(exit code 1\): MemoryError"):
        export.export(
            run, tmp_path / "out", step=None, dtype=None, prompt="", say=lambda text: None
        )
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]
