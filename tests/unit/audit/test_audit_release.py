"""The audit of the real release, unpatched and patched."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_p40.audit.model import Finding, Status
from verl_p40.audit.tree_audit import Report, audit
from verl_p40.audit.trees import open_trees

WORKERS = "verl/workers/fsdp_workers.py"
KNOWN_SITES = [
    *((WORKERS, line) for line in (216, 294, 298, 966, 970, 1240, 1251, 1300)),
    ("verl/workers/actor/dp_actor.py", 100),
    ("verl/workers/critic/dp_critic.py", 65),
    ("verl/workers/rollout/hf_rollout.py", 109),
    *((WORKERS, line) for line in (221, 910, 1241)),
    ("verl/utils/model.py", 511),
    ("verl/utils/model.py", 531),
    ("verl/workers/actor/dp_actor.py", 41),
    ("verl/workers/critic/dp_critic.py", 38),
    (WORKERS, 1293),
    ("verl/utils/torch_functional.py", 150),
    *(("verl/trainer/config/ppo_trainer.yaml", line) for line in (217, 410, 459)),
    ("verl/trainer/config/generation.yaml", 25),
    ("verl/workers/rollout/vllm_rollout/vllm_rollout_spmd.py", 164),
    ("verl/workers/rollout/vllm_rollout/vllm_async_server.py", 181),
    ("verl/utils/checkpoint/fsdp_checkpoint_manager.py", 288),
    ("verl/workers/sharding_manager/base.py", 21),
]
"""What has to change for a P40, found by hand before the audit existed: file and line."""


@pytest.fixture(scope="module")
def before(wheel: Path) -> Report:
    return audit(open_trees(wheel)[0])


@pytest.fixture(scope="module")
def after(patched: Path) -> Report:
    return audit(open_trees(patched)[0])


def _at(report: Report, path: str, line: int) -> list[Finding]:
    return [f for f in report.findings if f.path == path and line in (f.line, f.guard_line)]


@pytest.mark.parametrize(("path", "line"), KNOWN_SITES)
def test_unpatched_release_fails_at_every_known_site(before: Report, path: str, line: int) -> None:
    found = _at(before, path, line)
    assert found, f"nothing found at {path}:{line}"
    assert Status.FAILURE in {finding.status for finding in found}


def test_unpatched_release_is_known_as_such(before: Report) -> None:
    assert (before.package, before.version, before.patched_tree) == ("verl", "0.4.1", False)
    assert before.count(Status.PATCHED) == 0
    assert before.stale == []
    # One claim of the review is about a default that a patch changes: it must not hold here.
    assert [line.partition(":")[0] for line in before.broken] == ["entropy-compile"]


def test_every_failure_of_the_release_is_patched(before: Report, after: Report) -> None:
    patched = {f.identity for f in after.findings if f.status is Status.PATCHED}
    assert patched
    assert {f.identity for f in before.failures} - patched == set()


def test_patched_release_has_no_failure_and_no_stale_reason(after: Report) -> None:
    assert after.patched_tree
    assert [f"{f.path}:{f.line} {f.rule} {f.code}" for f in after.failures] == []
    assert after.stale == []
    assert after.broken == []


def test_every_patched_site_names_one_patch_of_the_queue(after: Report) -> None:
    for finding in after.findings:
        if finding.status is Status.PATCHED:
            assert finding.patch.endswith(".patch"), finding


def test_audit_is_fast(wheel: Path) -> None:
    import time

    tree = open_trees(wheel)[0]
    started = time.process_time()
    audit(tree)
    # Three seconds on an idle machine; the bound leaves room for a busy one.
    assert time.process_time() - started < 9


def test_wheel_sdist_and_folder_agree(before: Report, unpatched: Path) -> None:
    from verl_p40.stack.fetch import fetch_pinned

    wanted = [(f.identity, f.line, f.status) for f in before.findings]
    for path in (fetch_pinned("verl-sdist"), unpatched, unpatched / "verl"):
        report = audit(open_trees(path)[0])
        assert [(f.identity, f.line, f.status) for f in report.findings] == wanted, path


def test_vllm_release_is_read_without_a_review(vllm_sdist: Path) -> None:
    report = audit(open_trees(vllm_sdist)[0])
    assert (report.package, report.version) == ("vllm", "0.8.5.post1")
    assert "no reviewed reasons" in report.notes[0]
    assert report.failures == report.findings
    assert not [f for f in report.findings if f.rule == "unreadable"]
    wanted = {
        ("vllm/attention/ops/prefix_prefill.py", "triton-kernel"),
        ("vllm/platforms/cuda.py", "capability"),
        ("vllm/worker/worker.py", "half-test"),
        ("vllm/engine/arg_utils.py", "capability"),
    }
    assert wanted <= {(f.path, f.rule) for f in report.findings}
