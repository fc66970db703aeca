"""``verl-p40 kernels binary`` as people call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_p40.cli.main import run
from verl_p40.errors import ExitCode

BINARIES = Path(__file__).parent / "binaries"


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        run(["kernels", *argv])
    return int(caught.value.code or 0)


@pytest.fixture(autouse=True)
def no_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VERL_P40_ENV", raising=False)
    monkeypatch.setenv("VERL_P40_HOME", str(tmp_path / "home"))
    # Where these tests run inside of the stack, it would be found by its interpreter.
    monkeypatch.setattr("verl_p40.stack.env.adopted", lambda: None)


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("binary", "-v", str(BINARIES / "cuda118.so")) == ExitCode.OK
    out = capsys.readouterr().out
    assert "runs natively" in out and "sm_61 x1" in out and "scale" in out


def test_it_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("binary", str(BINARIES / "cuda130.fatbin")) == ExitCode.FOUND
    assert "no kernel image is available" in capsys.readouterr().out
    assert call("binary", "--cc", "9.0", str(BINARIES / "cuda130.fatbin")) == ExitCode.OK


def test_strict(tmp_path: Path) -> None:
    for name in ("cuda118.so", "cuda130.fatbin"):
        (tmp_path / name).write_bytes((BINARIES / name).read_bytes())
    assert call("binary", str(tmp_path)) == ExitCode.OK
    assert call("binary", "--strict", str(tmp_path)) == ExitCode.FOUND


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("binary", "--json", str(BINARIES / "cuda118.fatbin")) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    (target,) = document["targets"]
    (file,) = target["files"]
    assert target["verdict"] == file["verdict"] == "native"
    assert file["targets"] == {"compute_61": 1, "sm_60": 1, "sm_61": 1, "sm_70": 1}
    assert file["kernels"] == [{"verdict": "native", "target": "sm_61", "names": ["scale"]}]


def test_damage_and_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes((BINARIES / "cuda118.so").read_bytes()[:3000])
    assert call("binary", str(broken)) == ExitCode.DATA
    assert "unreadable" in capsys.readouterr().out
    assert call("binary", "--cc", "six", str(broken)) == ExitCode.USAGE
    assert call("binary", str(tmp_path / "gone.so")) == ExitCode.USAGE
    assert call("binary", "torch") == ExitCode.ENVIRONMENT
    assert "verl-p40 stack install" in capsys.readouterr().err


def test_the_list_needs_no_stack(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("triton", "--all", "--list", "--json") == ExitCode.OK
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    assert len(kernels) > 60
    reached = {kernel["kernel"].rpartition(":")[2] for kernel in kernels if kernel["reached"]}
    assert reached == {"_fwd_kernel", "_fwd_kernel_alibi"}
    assert call("triton", "prefix_prefill", "--list") == ExitCode.OK
    assert "reached with enable_prefix_caching" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["triton"], ExitCode.USAGE, "give MODULE"),
        (["triton", "prefix_prefill", "--all"], ExitCode.USAGE, "give MODULE"),
        (["triton", "no_such_module"], ExitCode.USAGE, "modules:"),
        (["triton", "triton_decode_attention:tanh"], ExitCode.USAGE, "_fwd_kernel_stage1"),
        (["triton", "mine.py:add"], ExitCode.USAGE, "--signature"),
        (["triton", "prefix_prefill", "--signature", "i32"], ExitCode.USAGE, "of your own"),
        (["triton", "prefix_prefill"], ExitCode.ENVIRONMENT, "verl-p40 stack install"),
    ],
)
def test_triton_arguments(
    argv: list[str], code: ExitCode, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*argv) == code
    assert words in capsys.readouterr().err
