"""The reviewed file: matching, checked claims, what is stale, and its validation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from verl_p40.audit import reviewed
from verl_p40.audit.attribution import Queue
from verl_p40.audit.imports import reachable
from verl_p40.audit.model import Status
from verl_p40.audit.reviewed import Reviewed
from verl_p40.audit.tree_audit import Report, audit
from verl_p40.audit.trees import Tree
from verl_p40.errors import UsageError

HEAD = "package: demo\nversion: '1'\nroots: [demo.main]\nconfig: demo/config.yaml\n"
FILES = {
    "demo/__init__.py": "",
    "demo/main.py": (
        "from demo import core\n\ndef run(c):\n    if c.engine == 'fast':\n"
        "        from demo.fast import kernel\n"
    ),
    "demo/core.py": "import torch\n\ndef used():\n    return torch.bfloat16\n\ndef dead():\n    return torch.half\n",
    "demo/fast/__init__.py": "",
    "demo/fast/kernel.py": "import triton\n\n@triton.jit\ndef k(): pass\n",
    "demo/lonely.py": "X = 'bf16'\n",
    "demo/config.yaml": "engine: slow\nalias: ${engine}\nswitch: on\n",
}


def _tree(changes: dict[str, str] | None = None) -> Tree:
    content = {**FILES, **(changes or {})}

    def reader(text: str) -> Callable[[], bytes]:
        return lambda: text.encode()

    files = {path: reader(text) for path, text in content.items()}
    return Tree("demo", "1", "here", files)


def _audit(entries: str, tree: Tree | None = None, tmp: Path = Path("/nonexistent")) -> Report:
    review = reviewed.parse(HEAD + entries, "test")
    return audit(tree or _tree(), {}, review, Queue(tmp))


GATE = """
gates:
  - path: demo/main.py
    imports: [demo.fast]
    reason: only the fast engine
    reached_by: [{setting: engine, values: [fast]}]
"""
FAST = """
  - id: fast
    status: unreachable
    path: ["demo/fast/**"]
    sites: 2
    never_imported: true
    reason: only imported for the fast engine, which is off
"""


def _status(report: Report, path: str) -> set[Status]:
    return {f.status for f in report.findings if f.path == path}


def test_without_a_reason_everything_fails() -> None:
    report = _audit("")
    assert {f.status for f in report.findings} == {Status.FAILURE}
    assert {f.rule for f in report.findings} == {
        "half-dtype", "half-literal", "triton-import", "triton-kernel",
    }  # fmt: skip


def test_never_imported_holds_behind_a_gate_and_not_without() -> None:
    behind = _audit(GATE + "entries:" + FAST)
    assert _status(behind, "demo/fast/kernel.py") == {Status.UNREACHABLE}
    assert behind.broken == []
    without = _audit("entries:" + FAST)
    assert _status(without, "demo/fast/kernel.py") == {Status.FAILURE}
    assert "demo/main.py:5 imports demo.fast" in without.broken[0]


def test_a_new_import_elsewhere_breaks_the_claim() -> None:
    tree = _tree({"demo/core.py": "import demo.fast.kernel\n"})
    report = _audit(GATE + "entries:" + FAST, tree)
    assert _status(report, "demo/fast/kernel.py") == {Status.FAILURE}
    assert "demo/core.py:1" in report.broken[0]


def test_a_gate_that_opens_by_default_or_is_gone_is_told() -> None:
    opened = _audit(GATE + "entries:" + FAST, _tree({"demo/config.yaml": "engine: fast\n"}))
    assert any("engine is fast by default" in line for line in opened.stale)
    gone = _audit(GATE + "entries:" + FAST, _tree({"demo/main.py": "import demo.core\n"}))
    assert any("no longer imports" in line for line in gone.stale)


@pytest.mark.parametrize(
    ("setting", "values", "status"),
    [
        ("engine", "[fast]", Status.UNREACHABLE),
        ("engine", "[slow]", Status.FAILURE),
        ("alias", "[fast, slow]", Status.FAILURE),
        ("switch", '["true"]', Status.FAILURE),
        ("switch", '["false"]', Status.UNREACHABLE),
        ("missing.key", "[x]", Status.UNREACHABLE),
    ],
)
def test_reached_by_is_checked_against_the_default(
    setting: str, values: str, status: Status
) -> None:
    report = _audit(f"""
entries:
  - id: lonely
    status: unreachable
    path: [demo/lonely.py]
    sites: 1
    reason: only with another setting, says the review
    reached_by: [{{setting: {setting}, values: {values}}}]
""")
    assert _status(report, "demo/lonely.py") == {status}


DEAD = """
entries:
  - id: dead
    status: unreachable
    path: [demo/core.py]
    qualname: [dead]
    sites: 1
    only_named_in: {dead: [demo/core.py]}
    reason: nothing in the package names this function
"""


def test_only_named_in() -> None:
    assert _status(_audit(DEAD), "demo/core.py") == {Status.UNREACHABLE, Status.FAILURE}
    called = _audit(DEAD, _tree({"demo/lonely.py": "from demo.core import dead\n"}))
    assert _status(called, "demo/core.py") == {Status.FAILURE}
    assert "demo/lonely.py names dead" in called.broken[0]
    nearly = _audit(DEAD, _tree({"demo/lonely.py": "deadline = 1\n"}))
    assert nearly.broken == []


def test_stale_and_drifted_entries() -> None:
    entry = """
entries:
  - id: names
    status: accepted
    path: [demo/core.py]
    sites: {sites}
    code: ["{code}"]
    reason: a table of names, which asks for nothing
"""
    assert _audit(entry.format(sites=2, code="*")).stale == []
    assert "2 sites match, 1 were reviewed" in _audit(entry.format(sites=1, code="*")).stale[0]
    assert "matches nothing" in _audit(entry.format(sites=1, code="return x")).stale[0]


def test_entries_for_the_patched_tree_are_not_stale_before() -> None:
    entry = """
entries:
  - id: later
    status: accepted
    tree: patched
    path: [demo/later.py]
    sites: 1
    reason: comes with the patch queue and is harmless
"""
    assert _audit(entry).stale == []
    tree = _tree()
    tree.patched = True
    assert "matches nothing" in _audit(entry, tree).stale[0]


def test_matching_is_by_path_rule_name_and_code_not_by_line() -> None:
    entry = """
entries:
  - id: used
    status: accepted
    path: [demo/core.py]
    rule: [half-dtype]
    qualname: [used]
    code: ["return torch.bfloat16"]
    sites: 1
    reason: reviewed, and good for this test only
"""
    moved = _tree({"demo/core.py": "\n\n\n" + FILES["demo/core.py"]})
    for tree in (_tree(), moved):
        report = _audit(entry, tree)
        accepted = [f for f in report.findings if f.status is Status.ACCEPTED]
        assert [(f.qualname, f.entry) for f in accepted] == [("used", "used")]
    changed = _tree({"demo/core.py": "import torch\n\ndef used():\n    return [torch.bfloat16]\n"})
    assert _status(_audit(entry, changed), "demo/core.py") == {Status.FAILURE}


def test_patched_sites_are_a_multiset(tmp_path: Path) -> None:
    before = "import torch\n\ndef f():\n    g(torch.half)\n    g(torch.half)\n    h(torch.half)\n"
    after = "import torch\n\ndef f():\n    g(torch.half)\n    g(torch.float)\n    h(torch.float)\n"
    (tmp_path / "series").write_text("a.patch\nb.patch\n")
    (tmp_path / "a.patch").write_text(
        "Description: x\n---\n--- a/demo/core.py\n+++ b/demo/core.py\n"
        "@@ -4,2 +4,2 @@\n     g(torch.half)\n-    g(torch.half)\n+    g(torch.float)\n"
    )
    (tmp_path / "b.patch").write_text(
        "Description: x\n---\n--- a/demo/core.py\n+++ b/demo/core.py\n"
        "@@ -6,1 +6,1 @@\n-    h(torch.half)\n+    h(torch.float)\n"
    )
    tree = _tree({"demo/core.py": after})
    review = reviewed.parse(HEAD, "test")
    report = audit(tree, {"demo/core.py": before.encode()}, review, Queue(tmp_path))
    gone = [(f.code, f.patch) for f in report.findings if f.status is Status.PATCHED]
    assert sorted(gone) == [("g(torch.half)", "a.patch"), ("h(torch.half)", "b.patch")]
    assert report.patched_tree


def test_defects() -> None:
    text = """
defects:
  - id: no-timing
    path: demo/core.py
    qualname: Manager
    lacks: [timing]
    reason: reads a thing that is not there
  - id: short
    path: demo/core.py
    qualname: Manager.run
    contains: ["range(0, n)"]
    reason: counts the wrong rows
"""
    bad = (
        "class Manager:\n    def run(self, n):\n        for i in range(0,  n):\n            pass\n"
    )
    good = "class Manager:\n    timing = {}\n    def run(self, n):\n        pass\n"
    found = _audit(text, _tree({"demo/core.py": bad})).findings
    defects = [(f.code, f.line, f.qualname) for f in found if f.rule == "upstream-defect"]
    assert defects == [("no-timing", 1, "Manager"), ("short", 2, "Manager.run")]
    after = _audit(text, _tree({"demo/core.py": good})).findings
    assert not [f for f in after if f.rule == "upstream-defect"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("entries: [{id: a, status: fine}]", "status"),
        ("entries: [", "not YAML"),
        ("surprise: 1", "Extra inputs"),
        (
            "entries: [{id: a, status: accepted, path: [x], sites: 1, rule: [nope], "
            "reason: long enough to be a reason}]",
            "unknown rule nope",
        ),
        (
            "entries: [{id: a, status: unreachable, path: [x], sites: 1, "
            "reason: long enough to be a reason}]",
            "says what would reach it",
        ),
        (
            "entries: [{id: a, status: accepted, path: [x], sites: 1, reason: long enough to be one, "
            "reached_by: [{setting: x}]}]",
            "a setting needs values",
        ),
    ],
)
def test_bad_reviewed_file_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        reviewed.parse(HEAD + text, "review.yaml")
    assert message in error.value.message
    assert "\n" not in error.value.message


def test_relative_imports_and_parents_are_followed() -> None:
    tree = _tree(
        {
            "demo/main.py": "from .fast.kernel import k\n",
            "demo/fast/__init__.py": "from ..lonely import X\n",
        }
    )
    found = reachable(tree, ["demo.main"], set())
    assert {
        "demo/main.py",
        "demo/fast/kernel.py",
        "demo/fast/__init__.py",
        "demo/lonely.py",
    } <= set(found)


def _review() -> Reviewed:
    review = reviewed.load("verl", "0.4.1")
    assert review is not None
    return review


def test_shipped_review_has_no_leftovers(verl: Tree) -> None:
    """Every gate, root and path of the review exists in the release it is about."""
    review = _review()
    for gate in review.gates:
        assert gate.path in verl.files
    for entry in review.entries:
        if entry.tree == "any":
            globs = [reviewed.glob_regex(glob) for glob in entry.path]
            assert all(any(g.fullmatch(path) for path in verl.files) for g in globs), entry.id
    assert review.config in verl.files


def test_the_shipped_gates_are_all_needed(verl: Tree) -> None:
    """Without any one gate, more files are reachable: none is there for show."""
    review = _review()
    pairs = {(gate.path, module) for gate in review.gates for module in gate.imports}
    base = set(reachable(verl, list(review.roots), pairs))
    for gate in review.gates:
        fewer = pairs - {(gate.path, module) for module in gate.imports}
        assert set(reachable(verl, list(review.roots), fewer)) > base, gate
