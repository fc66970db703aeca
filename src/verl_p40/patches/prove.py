"""The necessity matrix: each patch's test passes with all patches and fails without that one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl_p40.errors import TreeError, UsageError
from verl_p40.patches.hunks import Fit
from verl_p40.patches.lint import test_exists
from verl_p40.patches.queue import Patch, Queue, plan_patches
from verl_p40.patches.swap import copy_folder
from verl_p40.patches.tree import PristineReader

Outcome = Literal["passed", "failed", "error", "not run"]


@dataclass(frozen=True)
class Interpreter:
    """What runs the tests: a Python with the training stack, and its environment variables."""

    python: Path
    environ: Mapping[str, str]
    """``PYTHONPATH`` in it makes ``verl_p40`` importable; the tree is put in front."""


@dataclass(frozen=True)
class Outcomes:
    """What one pytest process did: outcome and message by the requested node id."""

    by_node: Mapping[str, tuple[Outcome, str]]
    seconds: float


@dataclass(frozen=True)
class Proof:
    """One row of the matrix."""

    patch: Patch
    with_all: Outcome
    without: Outcome
    left_out: tuple[str, ...]
    """The patch and what depends on it: the patches missing from the second tree."""
    shifted: tuple[str, ...]
    """Later hunks that went in at another line without it."""
    problem: str
    """Why this proves nothing; empty for a proof."""
    evidence: str
    """The first line of the failure without the patch."""
    seconds: float


@dataclass
class Matrix:
    """The whole result."""

    proofs: list[Proof] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        return bool(self.proofs) and all(not proof.problem for proof in self.proofs)


def prove(
    queue: Queue,
    pristine: Path,
    root: Path,
    scratch: Path,
    interpreter: Interpreter,
    *,
    names: Sequence[str] = (),
    jobs: int = 2,
    timeout: float = 900.0,
    on_step: Callable[[str], None] = lambda _: None,
) -> Matrix:
    """Run the proofs.

    Args:
        queue: the queue.
        pristine: the unpacked pinned release; only read.
        root: the repository: the working directory of pytest.
        scratch: an existing empty folder for trees and reports.
        interpreter: what runs the tests.
        names: only these patches; empty means all.
        jobs: how many tests run at a time without their patch.
        timeout: seconds a pytest process may take.
        on_step: told in one line what has just been done.

    Raises:
        UsageError: an unknown patch name, or a patch without ``Proved-By``.
        TreeError: the whole queue does not fit.
    """
    chosen = [queue.find(name) for name in names] or list(queue.patches)
    nodes = {patch.name: patch.header.get("Proved-By") for patch in chosen}
    for patch in chosen:
        if not nodes[patch.name]:
            raise UsageError(f"{patch.path} has no Proved-By", fix="name the test that proves it")
    scratch.mkdir(parents=True, exist_ok=True)
    whole = scratch / "all"
    _build(pristine, whole, queue)
    # pytest runs nothing at all if one node does not exist.
    wanted = [node for node in dict.fromkeys(nodes.values()) if test_exists(root, node)]
    full = Outcomes({}, 0.0)
    if wanted:
        full = run_tests(
            whole, wanted, root, scratch / "all.json", interpreter, timeout * 2, queue.project
        )
    passed = sum(outcome == "passed" for outcome, _ in full.by_node.values())
    on_step(f"all patches: {passed} of {len(wanted)} tests pass ({full.seconds:.0f} s)")

    def one(patch: Patch) -> Proof:
        result = full.by_node.get(nodes[patch.name])
        if result is None:
            problem = f"its test does not exist: {nodes[patch.name]}"
            return Proof(patch, "not run", "not run", (patch.path,), (), problem, "", 0.0)
        return _prove_one(patch, result, queue, pristine, root, scratch, interpreter, timeout)

    done: dict[str, Proof] = {}
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        running = [pool.submit(one, patch) for patch in chosen]
        try:
            for future in as_completed(running):
                proof = future.result()
                done[proof.patch.name] = proof
                word = f"NOT PROVEN: {proof.problem}" if proof.problem else "proven"
                on_step(f"without {proof.patch.path}: {word} ({proof.seconds:.0f} s)")
        except BaseException:
            for future in running:
                future.cancel()
            raise
    return Matrix([done[patch.name] for patch in chosen])


def _prove_one(
    patch: Patch,
    full: tuple[Outcome, str],
    queue: Queue,
    pristine: Path,
    root: Path,
    scratch: Path,
    interpreter: Interpreter,
    timeout: float,
) -> Proof:
    node = patch.header.get("Proved-By")
    tree = scratch / patch.name
    try:
        left_out, shifted = _build(pristine, tree, queue, without=[patch.name])
    except TreeError as error:
        hint = f"does a later patch need 'Depends: {patch.name}'?"
        problem = f"the rest does not apply without it ({error.message}); {hint}"
        return Proof(patch, full[0], "not run", (patch.path,), (), problem, "", 0.0)
    report = scratch / f"{patch.name}.json"
    outcomes = run_tests(tree, [node], root, report, interpreter, timeout, queue.project)
    without, message = outcomes.by_node[node]
    problem = evidence = ""
    if full[0] != "passed":
        problem = f"its test does not pass with all patches: {full[1]}"
    elif without == "passed":
        problem = "its test passes without it: the patch is not needed, or the test is too weak"
    elif without != "failed":
        problem = f"its test did not run without it: {message}"
    else:
        evidence = message
    shutil.rmtree(tree)
    return Proof(
        patch, full[0], without, left_out, shifted, problem, evidence,
        outcomes.seconds,
    )  # fmt: skip


def _build(
    pristine: Path, tree: Path, queue: Queue, without: Sequence[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write a patched tree that nobody else uses; returns what was left out and what shifted."""
    selection = queue.select(None, without)
    plan = plan_patches(PristineReader(pristine, None), selection.patches)
    plan.require(*((Fit.EXACT, Fit.OFFSET) if without else (Fit.EXACT,)))
    tree.mkdir()
    for root in queue.facts.roots:
        if (pristine / root).is_dir():
            copy_folder(pristine / root, tree / root)
        elif (pristine / root).is_file():
            shutil.copy2(pristine / root, tree / root)
    for name, content in plan.after.items():
        (tree / name).unlink(missing_ok=True)
        if content is not None:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes(content)
    left_out = tuple(patch.path for patch in selection.left_out)
    return left_out, tuple(line for fit in plan.fits for line in fit.details)


def run_tests(
    tree: Path,
    nodes: Sequence[str],
    root: Path,
    report: Path,
    interpreter: Interpreter,
    timeout: float,
    project: str = "verl",
) -> Outcomes:
    """Run pytest on ``nodes`` with ``tree`` in front of every other package.

    A node is *failed* only if one of its tests failed in its setup or call phase; everything
    else that keeps it from passing (collection, a skip, a crash, the time limit) is an *error*.
    """
    start = time.monotonic()
    search = [str(tree), interpreter.environ.get("PYTHONPATH", "")]
    environ = {
        "OMP_NUM_THREADS": "1",
        **interpreter.environ,
        "PYTHONPATH": os.pathsep.join(part for part in search if part),
        "VERL_P40_TREE": str(tree),
        "VERL_P40_PROJECT": project,
        "VERL_P40_PROVE_REPORT": str(report),
    }
    command = [
        str(interpreter.python), "-m", "pytest", "-p", "verl_p40.patches.prove_plugin",
        "-p", "no:cacheprovider", "-q", "--tb=short", "--no-header", *nodes,
    ]  # fmt: skip
    log = report.with_suffix(".log")
    with log.open("wb") as sink:
        # A session of its own: Ray and worker processes of a failed test end with it.
        process = subprocess.Popen(
            command, cwd=root, env=environ, stdout=sink, stderr=sink, start_new_session=True
        )
        try:
            process.wait(timeout)
            trouble = ""
        except subprocess.TimeoutExpired:
            trouble = f"no result after {timeout:.0f} s"
        finally:
            _end(process)
    seconds = time.monotonic() - start
    if not trouble and not report.is_file():
        words = " | ".join(log.read_text("utf-8", "replace").strip().splitlines()[-3:])
        trouble = f"pytest ended with {process.returncode} and no report: {words[-300:]}"
    if trouble:
        return Outcomes(dict.fromkeys(nodes, ("error", trouble)), seconds)
    document: dict[str, Any] = json.loads(report.read_text("utf-8"))
    return Outcomes({node: judge(node, document) for node in nodes}, seconds)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended and left nobody behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def judge(node: str, document: Mapping[str, Any]) -> tuple[Outcome, str]:
    """The outcome of one requested node id from a report of prove_plugin, and one line on it."""
    if document["imported_from"]:
        what = f"{document['project']} was imported from {document['imported_from']}"
        return "error", f"{what}, not from the tree"
    for item in document["uncollected"]:
        if not item["node"] or node.startswith(item["node"]):
            return "error", f"not collected: {_error_line(item['message'])}"
    reports = [
        t for t in document["tests"] if t["node"] == node or t["node"].startswith(f"{node}[")
    ]
    if not reports:
        return "error", "no test ran under this name"
    for item in reports:
        if item["outcome"] == "failed" and item["phase"] in ("setup", "call"):
            return "failed", _first_line(item["message"])
    for item in reports:
        if item["outcome"] != "passed":
            return "error", f"{item['outcome']} in {item['phase']}: {_first_line(item['message'])}"
    return "passed", ""


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:200]


def _error_line(text: str) -> str:
    """The first line that pytest marks as an error, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [line[1:].strip() for line in lines if line.startswith("E ")]
    return next(iter([*marked, *reversed(lines)]), "")[:200]
