"""The audit of one tree: scan, compare with the pristine release, apply the review."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from verl_p40.audit import claims, datascan, defects, pyscan, reviewed, shellscan
from verl_p40.audit.attribution import Queue
from verl_p40.audit.model import Finding, Status
from verl_p40.audit.rules import RULES
from verl_p40.audit.trees import Tree
from verl_p40.stack import paths


@dataclass
class Report:
    """The outcome for one package. ``stale`` and ``broken`` are faults of the review itself."""

    package: str
    version: str
    origin: str
    patched_tree: bool
    files: int
    findings: list[Finding]
    stale: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, status: Status) -> int:
        return sum(finding.status is status for finding in self.findings)

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status is Status.FAILURE]

    def by_rule(self) -> dict[str, Counter[Status]]:
        """Counts of each status by rule, in the order of the rules."""
        table: dict[str, Counter[Status]] = {}
        for rule in RULES:
            counts = Counter(f.status for f in self.findings if f.rule == rule)
            if counts:
                table[rule] = counts
        return table

    def to_json(self) -> dict[str, object]:
        return {
            "package": self.package,
            "version": self.version,
            "origin": self.origin,
            "patched_tree": self.patched_tree,
            "files": self.files,
            "seconds": round(self.seconds, 3),
            "counts": {status.value: self.count(status) for status in Status},
            "rules": {
                rule: {
                    "title": RULES[rule].title,
                    "why": RULES[rule].why,
                    **{status.value: counts[status] for status in Status if counts[status]},
                }
                for rule, counts in self.by_rule().items()
            },
            "stale": self.stale,
            "broken": self.broken,
            "notes": self.notes,
            "findings": [finding.to_json() for finding in self.findings],
        }


def scan_file(path: str, data: bytes) -> list[Finding]:
    """The sites of one file, by its suffix."""
    suffix = PurePosixPath(path).suffix
    if suffix in {".py", ".pyi"}:
        return pyscan.scan(path, data)
    if suffix in {".yaml", ".yml"}:
        return datascan.scan_yaml(path, data)
    if suffix == ".json":
        return datascan.scan_json(path, data)
    return shellscan.scan(path, data)


def audit(
    tree: Tree,
    pristine: Mapping[str, bytes] | None = None,
    review: reviewed.Reviewed | None = None,
    queue: Queue | None = None,
) -> Report:
    """Audit ``tree``.

    Args:
        tree: what to read.
        pristine: original content of changed files, if other than what the tree carries itself.
        review: the reviewed file, if other than the one shipped for the tree's release.
        queue: the patches to attribute changed sites to, if other than the shipped queue.
    """
    started = time.perf_counter()
    originals = dict(tree.pristine if pristine is None else pristine)
    review = review or reviewed.load(tree.package, tree.version)
    queue = queue or Queue(paths.patches_dir() / tree.package)
    report = Report(
        package=tree.package,
        version=tree.version,
        origin=tree.origin,
        patched_tree=tree.patched or bool(originals),
        files=len(tree.files),
        findings=[],
    )
    current = [f for path in tree for f in scan_file(path, tree.read(path))]
    if review:
        current += [
            found
            for defect in review.defects
            if defect.path in tree.files
            and (found := defects.find(defect, defect.path, tree.read(defect.path)))
        ]
        current = _apply(review, tree, current, report)
    else:
        report.notes.append(
            f"no reviewed reasons for {tree.package} {tree.version}: every site counts as a failure"
        )
    patched = _patched(originals, review, current, queue)
    report.findings = sorted(
        current + patched, key=lambda f: (f.path, f.line, f.column, f.rule, f.status.value)
    )
    report.seconds = time.perf_counter() - started
    return report


def _patched(
    originals: Mapping[str, bytes],
    review: reviewed.Reviewed | None,
    current: list[Finding],
    queue: Queue,
) -> list[Finding]:
    """Sites of the pristine files that are gone from the tree (as a multiset of identities)."""
    left = Counter(finding.identity for finding in current)
    gone = []
    for path, data in originals.items():
        before = scan_file(path, data)
        for defect in review.defects if review else ():
            if defect.path == path and (found := defects.find(defect, path, data)):
                before.append(found)
        for finding in before:
            if left[finding.identity] > 0:
                left[finding.identity] -= 1
            else:
                patch = queue.patch_of(finding)
                gone.append(finding.marked(Status.PATCHED, reason=finding.reason, patch=patch))
    return gone


def _apply(
    review: reviewed.Reviewed, tree: Tree, findings: list[Finding], report: Report
) -> list[Finding]:
    facts = claims.Facts(tree, review)
    used: Counter[str] = Counter()
    marked = []
    for finding in findings:
        entry = next((entry for entry in review.entries if entry.matches(finding)), None)
        if entry is None:
            marked.append(finding)
            continue
        used[entry.id] += 1
        problem = facts.broken(entry, finding.path)
        if problem:
            told = f"{entry.id}: {problem}"
            if told not in report.broken:
                report.broken.append(told)
            reason = f"reviewed as {entry.status} ({entry.id}), but {problem}"
            marked.append(finding.marked(Status.FAILURE, reason=reason, entry=entry.id))
        else:
            marked.append(entry.mark(finding))
    for entry in review.entries:
        if used[entry.id] > entry.sites:
            report.stale.append(
                f"{entry.id}: {used[entry.id]} sites match, {entry.sites} were reviewed"
            )
        elif not used[entry.id] and (entry.tree == "any" or report.patched_tree):
            report.stale.append(f"{entry.id}: matches nothing any more, remove it")
    report.stale += claims.shut_gates(tree, review)
    return marked
