"""What a build leaves, and that a run takes nothing else; the command's errors are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_p40.errors import DataError, ExitCode, TreeError
from verl_p40.numerics import units
from verl_p40.numerics.__main__ import main
from verl_p40.numerics.cases import PREFIX
from verl_p40.numerics.manifest import MANIFEST, SCHEMA, describe, read_manifest
from verl_p40.numerics.nvcc import read_figures
from verl_p40.numerics.view import summary

PTX = ".version 7.8\n.target sm_61\n.address_size 64\n.visible .entry add(\n)\n{\n}\n"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "one.ptx").write_text(PTX)
    write_manifest(folder)
    return folder


def write_manifest(folder: Path, cases: tuple[object, ...] = PREFIX, schema: int = SCHEMA) -> None:
    document = {
        "schema": schema,
        "modules": {"one": describe(folder / "one.ptx")},
        "prefix": [{"case": repr(case)} for case in cases],
    }
    (folder / MANIFEST).write_text(json.dumps(document))


def test_a_build_is_read_back(built: Path) -> None:
    module = read_manifest(built)["modules"]["one"]
    assert (module["target"], module["ptx"]) == ("sm_61", "7.8")


@pytest.mark.parametrize("change", [PTX + "\n", PTX.replace("sm_61", "sm_90"), "", "\xff"])
def test_a_file_that_was_not_built_is_refused(built: Path, change: str) -> None:
    (built / "one.ptx").write_bytes(change.encode("latin-1"))
    with pytest.raises(DataError, match=r"one\.ptx is not what was built"):
        read_manifest(built)


def test_ptx_for_another_card_is_refused(built: Path) -> None:
    """Even where the manifest agrees: it would not be 6.1's code that runs."""
    (built / "one.ptx").write_text(PTX.replace("sm_61", "sm_90"))
    write_manifest(built)
    with pytest.raises(DataError, match="PTX for sm_90, not sm_61"):
        read_manifest(built)


def test_a_build_of_other_cases_or_another_version_is_refused(built: Path) -> None:
    """Its prefix launches have the strides and grids of other tensors."""
    for cases, schema in ((PREFIX[1:], SCHEMA), (PREFIX, SCHEMA - 1), ((), SCHEMA)):
        write_manifest(built, cases, schema)
        with pytest.raises(DataError, match="built by another version"):
            read_manifest(built)


NAMES = [
    "_ZN3cub17CUB_101702_610_NS11EmptyKernelIvEEvv",
    "_ZN4vllm15rms_norm_kernelIfEEvPT_PKS1_S4_fii",
    "_ZN4vllm15rms_norm_kernelIN3c104HalfEEEvPT_PKS3_S6_fii",
    "_ZN4vllm25fused_add_rms_norm_kernelIfLi8EEENSt9enable_ifIXooeqT0_Li0Entsr4vllm12_typeConvert"
    "IT_EE6existsEvE4typeEPS2_S5_PKS2_fii",
    "_ZN4vllm25fused_add_rms_norm_kernelIN3c104HalfELi8EEENSt9enable_ifIXooeqT0_Li0Entsr4vllm12_ty"
    "peConvertIT_EE6existsEvE4typeEPS4_S7_PKS4_fii",
    "_ZN4vllm25fused_add_rms_norm_kernelIfLi0EEENSt9enable_ifIXooeqT0_Li0Entsr4vllm12_typeConvert"
    "IT_EE6existsEvE4typeEPS2_S5_PKS2_fii",
]
"""Of layernorm_kernels.cu, by nvcc 11.8."""


def test_the_float32_kernels_are_found_among_all() -> None:
    found = units.find_kernels("layernorm", NAMES)
    assert found == {
        "rms_norm": NAMES[1],
        "fused_add_rms_norm/8": NAMES[3],
        "fused_add_rms_norm/0": NAMES[5],
    }


@pytest.mark.parametrize("names", [NAMES[:1], [*NAMES, NAMES[1]]])
def test_a_kernel_that_is_missing_or_there_twice_is_an_error(names: list[str]) -> None:
    with pytest.raises(TreeError, match="kernels of layernorm match"):
        units.find_kernels("layernorm", names)


def test_ptxas_figures_are_by_entry() -> None:
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_61'
ptxas info    : Function properties for one
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, 288 bytes smem, 464 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_61'
ptxas info    : Function properties for two
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, 352 bytes cmem[0]
"""
    assert read_figures(report) == {
        "one": {"registers": 40, "spill_stores": 0, "spill_loads": 0, "stack": 0, "shared": 288},
        "two": {"registers": 255, "spill_stores": 12, "spill_loads": 16, "stack": 8, "shared": 0},
    }


def row(error: float, **changes: Any) -> dict[str, Any]:
    facts = {"kernel": "rms_norm", "case": f"{error}", "bound": 1e-5, "shared": 68, "ok": True}
    return {**facts, "error": error, "vector": 2 * error, **changes}


def test_a_summary_keeps_the_worst_and_nan_is_the_worst() -> None:
    (found,) = summary([row(1e-7), row(3e-7, shared=99), row(2e-7)])
    assert (found["cases"], found["error"], found["case"], found["shared"]) == (
        3,
        3e-7,
        "3e-07",
        99,
    )
    (found,) = summary([row(1e-7), row(float("nan"), ok=False), row(2e-7)])
    assert found["error"] != found["error"]
    assert found["failed"] == 1


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "gpu": "NVIDIA H200", "compute_capability": "9.0", "driver": "580.1", "bound": 1e-5,
        "shared_limit": 49_152, "v1_longest": 12_000, "v1_used_to": 8192,
        "ptx_targets": ["sm_61"], "vllm": "0.8.5.post1", "queue": "abc",
        "driver_compiled": {"ptx": [61], "binary": [90]}, "nvcc": "11.8", "triton": "3.2.0",
        "at": "2026-11-30", "category": "sm_61 PTX run on a newer GPU",
        "ok": all(row["ok"] for row in rows), "rows": list(rows),
    }  # fmt: skip


@pytest.mark.parametrize("every", [[], ["--every"]])
def test_a_result_is_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], every: list[str]
) -> None:
    (tmp_path / "good.json").write_text(json.dumps(document(row(1e-7), row(0.0, bound=0))))
    (tmp_path / "bad.json").write_text(json.dumps(document(row(float("nan"), ok=False))))
    assert main(["show", str(tmp_path / "good.json"), *every]) == ExitCode.OK
    said = capsys.readouterr().out
    assert "NVIDIA H200 (9.0), driver 580.1" in said
    assert "sm_61 PTX run on a newer GPU" in said and "all 2 comparisons passed" in said
    assert main(["show", str(tmp_path / "bad.json"), *every]) == ExitCode.FOUND
    assert "1 of 1 comparisons failed" in capsys.readouterr().out


def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.json").write_text("[]")
    full = tmp_path / "full"
    (full / "csrc").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    for words, code in [
        (["show", str(tmp_path / "other.json")], ExitCode.USAGE),
        (["show", str(tmp_path / "none.json")], ExitCode.USAGE),
        (["build", str(tmp_path / "new"), "--jobs", "0"], ExitCode.USAGE),
        (["build", str(tmp_path / "new"), "--tree", str(tmp_path)], ExitCode.USAGE),
        (["build", str(full)], ExitCode.USAGE),
        (["build", str(tmp_path / "new")], ExitCode.ENVIRONMENT),
        (["all", str(tmp_path / "new")], ExitCode.ENVIRONMENT),
    ]:
        assert main(words) == code, words
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[0].startswith("error: ") and len(lines) <= 2, lines
    assert not (tmp_path / "new").exists()


@pytest.mark.stack
def test_without_a_gpu_a_run_says_so(
    built: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["run", str(built)]) == ExitCode.ENVIRONMENT
    assert "no NVIDIA GPU that torch can use" in capsys.readouterr().err
    (built / "one.ptx").unlink()
    assert main(["run", str(built)]) == ExitCode.DATA
    assert "is not what was built" in capsys.readouterr().err
