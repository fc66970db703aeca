"""The matrix on a queue whose proofs are right, wrong and broken in every way we know."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest
from patchkit import GSM8K, TRACKING, QueueMaker

from verl_p40.errors import UsageError
from verl_p40.patches.prove import Interpreter, Matrix, Proof, judge, prove, run_tests
from verl_p40.stack import paths

PROOFS = """
import os, pathlib, sys
import pytest
tree = pathlib.Path(os.environ["VERL_P40_TREE"])
score = "".join(path.read_text() for path in (tree / "verl" / "marks").glob("*"))

def test_good():
    assert sys.path.index(str(tree)) < 3
    assert "# good" in score

@pytest.fixture
def needs():
    assert "# setup" in score

def test_setup(needs): ...

@pytest.mark.parametrize("n", [1, 2])
def test_two(n):
    assert n == 1 or "# two" in score

def test_weak():
    assert (tree / "verl" / "__init__.py").exists()

def test_always_fails():
    assert "no such text" in score, "it is not there"

def test_skips_without():
    if "# skip" not in score: pytest.skip("not patched")

def test_crashes_without():
    if "# crash" not in score: os._exit(3)

@pytest.fixture
def teardown():
    yield
    assert "# teardown" in score

def test_teardown(teardown): ...
"""
UNIMPORTABLE = """
import os, pathlib
assert (pathlib.Path(os.environ["VERL_P40_TREE"]) / "verl" / "marks" / "import").exists()

def test_import(): ...
"""
WRONG_TREE = """
import os, sys, types

def test_other():
    sys.modules["verl"] = types.ModuleType("verl")
    sys.modules["verl"].__file__ = "/elsewhere/verl/__init__.py"
"""

CASES = {
    "good": ("good", ""),
    "setup": ("setup", ""),
    "two": ("two", ""),
    "weak": ("weak", "passes without it"),
    "always": ("always_fails", "does not pass with all patches: .*it is not there"),
    "skip": ("skips_without", "did not run without it: skipped in call"),
    "crash": ("crashes_without", "did not run without it: pytest ended with 3 and no report"),
    "teardown": ("teardown", "did not run without it: failed in teardown"),
    "import": ("", "did not run without it: not collected: .*AssertionError"),
    "none": ("nowhere", "its test does not exist"),
}


@pytest.fixture(scope="module")
def interpreter() -> Interpreter:
    environ = {**os.environ, "PYTHONPATH": str(paths.package_dir().parent)}
    return Interpreter(Path(sys.executable), environ)


@pytest.fixture
def matrix(small: Path, tmp_path: Path, interpreter: Interpreter) -> tuple[Matrix, list[str]]:
    maker = QueueMaker(small, tmp_path / "repository")
    root = tmp_path / "repository"
    (root / "tests").mkdir()
    (root / "tests" / "test_proofs.py").write_text(PROOFS)
    (root / "tests" / "test_unimportable.py").write_text(UNIMPORTABLE)
    for number, (name, (test, _)) in enumerate(CASES.items(), start=1):
        node = (
            f"tests/test_proofs.py::test_{test}"
            if test
            else "tests/test_unimportable.py::test_import"
        )
        maker.add(
            f"fix/{number:04d}-{name}.patch",
            {f"verl/marks/{name}": f"# {name}\n".encode()},
            Proved_By=node,
        )
    steps: list[str] = []
    matrix = prove(
        maker.load(), small, root, tmp_path / "scratch", interpreter,
        jobs=2, timeout=120, on_step=steps.append,
    )  # fmt: skip
    return matrix, steps


def test_only_a_failing_test_is_a_proof(matrix: tuple[Matrix, list[str]]) -> None:
    rows = {proof.patch.name: proof for proof in matrix[0].proofs}
    assert list(rows) == list(CASES)
    for name, (_, problem) in CASES.items():
        if problem:
            assert re.search(problem, rows[name].problem), f"{name}: {rows[name].problem}"
        else:
            assert rows[name].problem == "", name
            assert (rows[name].with_all, rows[name].without) == ("passed", "failed")
            assert "assert" in rows[name].evidence
    assert not matrix[0].proven
    steps = matrix[1]
    assert steps[0].startswith("all patches: 8 of 9 tests pass")
    assert len(steps) == 1 + len(CASES)
    assert any("NOT PROVEN: its test passes without it" in step for step in steps)


def test_a_test_of_another_tree_is_no_proof(
    small: Path, tmp_path: Path, interpreter: Interpreter
) -> None:
    maker = QueueMaker(small, tmp_path / "repository")
    root = tmp_path / "repository"
    (root / "tests").mkdir()
    (root / "tests" / "test_other.py").write_text(WRONG_TREE)
    maker.add(
        "fix/0001-x.patch",
        {TRACKING: lambda c: c + b"# x\n"},
        Proved_By="tests/test_other.py::test_other",
    )
    result = prove(maker.load(), small, root, tmp_path / "scratch", interpreter)
    assert "verl was imported from /elsewhere" in result.proofs[0].problem


def test_dependants_are_left_out_and_a_missing_depends_is_named(
    small: Path, tmp_path: Path, interpreter: Interpreter
) -> None:
    maker = QueueMaker(small, tmp_path / "repository")
    root = tmp_path / "repository"
    (root / "tests").mkdir()
    (root / "tests" / "test_proof.py").write_text(
        "import os, pathlib\n"
        f"text = lambda: (pathlib.Path(os.environ['VERL_P40_TREE']) / '{GSM8K}').read_text()\n"
        "def test_a(): assert 'A = ' in text()\n"
        "def test_b(): assert 'A = 2' in text() or 'A = 3' in text()\n"
        "def test_c(): assert 'A = 3' in text()\n"
    )
    node = "tests/test_proof.py::test_"
    maker.add("fix/0001-a.patch", {GSM8K: lambda c: b"A = 1\n" + c}, Proved_By=f"{node}a")
    maker.add(
        "fix/0002-b.patch", {GSM8K: lambda c: c.replace(b"A = 1", b"A = 2")},
        Proved_By=f"{node}b", Depends="a",
    )  # fmt: skip
    maker.add(
        "fix/0003-c.patch", {GSM8K: lambda c: c.replace(b"A = 2", b"A = 3")}, Proved_By=f"{node}c"
    )

    def run(*names: str) -> list[Proof]:
        scratch = tmp_path / "-".join(("scratch", *names))
        return prove(maker.load(), small, root, scratch, interpreter, names=names).proofs

    rows = run()
    assert rows[2].problem == ""
    for row, name in ((rows[0], "a"), (rows[1], "b")):
        assert row.without == "not run"
        assert "fix/0003-c.patch does not fit" in row.problem
        assert f"'Depends: {name}'" in row.problem
    patch = maker.directory / "fix" / "0003-c.patch"
    patch.write_bytes(patch.read_bytes().replace(b"\n---\n", b"\nDepends: b\n---\n", 1))
    rows = run("a", "fix/0002-b.patch")
    assert [row.problem for row in rows] == ["", ""]
    assert rows[0].left_out == ("fix/0001-a.patch", "fix/0002-b.patch", "fix/0003-c.patch")
    assert rows[1].left_out == ("fix/0002-b.patch", "fix/0003-c.patch")
    with pytest.raises(UsageError, match="no patch is called 'd'"):
        run("d")


def test_a_hanging_test_ends_with_everything_it_started(
    tmp_path: Path, interpreter: Interpreter
) -> None:
    (tmp_path / "test_hang.py").write_text(
        "import subprocess\ndef test_hang():\n    subprocess.run(['sleep', '600.25'])\n"
    )
    start = time.monotonic()
    outcomes = run_tests(
        tmp_path, ["test_hang.py::test_hang"], tmp_path, tmp_path / "r.json", interpreter, 5
    )
    assert outcomes.by_node["test_hang.py::test_hang"] == ("error", "no result after 5 s")
    assert time.monotonic() - start < 60
    commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "600.25"] not in commands


def test_nothing_run_proves_nothing() -> None:
    assert not Matrix([]).proven
    empty = {"exit": 5, "tests": [], "uncollected": [], "imported_from": ""}
    assert judge("tests/x.py::test_y", empty) == ("error", "no test ran under this name")
