"""``patches verify`` and ``patches status``: the queue against the pinned and other releases."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from verl_p40.errors import TreeError
from verl_p40.patches.hunks import Fit
from verl_p40.patches.lint import Finding, lint_queue, repository_of
from verl_p40.patches.manifest import manifest_of
from verl_p40.patches.queue import PatchFit, Plan, Queue, load_queue, plan_patches
from verl_p40.patches.tree import PristineReader, own_marker


@dataclass
class VerifyReport:
    """What was checked and what was found."""

    release: str
    files: int = 0
    """Files of the release compared with the manifest."""
    patches: int = 0
    compiled: int = 0
    """Python files of the patched tree compiled."""
    parsed: int = 0
    """YAML files of the patched tree parsed."""
    proofs_checked: bool = True
    """False where the tests are not at hand (an installed package)."""
    findings: list[Finding] = field(default_factory=list)


def verify_queue(directory: Path, tree: Path, *, version: str) -> VerifyReport:
    """Check everything that can be wrong with the queue of the pinned release.

    Args:
        directory: the queue.
        tree: the unpacked pinned release; it is only read.
        version: the version of that release.

    Raises:
        TreeError: there is no queue in ``directory``.
    """
    root = repository_of(directory)
    report = VerifyReport(f"{directory.name} {version}", proofs_checked=root is not None)
    report.findings += lint_queue(directory, version=version, root=root)
    try:
        queue = load_queue(directory)
        report.findings += _compare(queue, tree, report)
    except TreeError as error:
        if not report.findings:
            report.findings.append(Finding(directory.name, error.message))
        return report
    report.patches = len(queue.patches)
    plan = plan_patches(PristineReader(tree, None), queue.patches)
    for fit in plan.fits:
        report.findings += [Finding(fit.patch.path, detail) for detail in fit.details]
    if plan.fits and not report.findings:
        report.findings += _leave_out_each(queue, tree)
    _check_syntax(tree, plan, queue, report)
    return report


def _leave_out_each(queue: Queue, tree: Path) -> list[Finding]:
    """Patches that others need and do not say so: ``--without`` and ``prove`` stop at those."""
    findings = []
    for patch in queue.patches:
        plan = plan_patches(PristineReader(tree, None), queue.select(None, [patch.name]).patches)
        try:
            plan.require(Fit.EXACT, Fit.OFFSET)
        except TreeError as error:
            hint = f"does that one need 'Depends: {patch.name}'?"
            findings.append(Finding(patch.path, f"left out, {error.message}; {hint}"))
    return findings


def _compare(queue: Queue, tree: Path, report: VerifyReport) -> list[Finding]:
    real = manifest_of(tree, *queue.facts.roots)
    report.files = len(real)
    findings = []
    for name in sorted({*real, *queue.manifest}):
        if name not in queue.manifest:
            findings.append(Finding(name, "in the release, but not in the manifest"))
        elif name not in real:
            findings.append(Finding(name, "in the manifest, but not in the release"))
        elif real[name] != queue.manifest[name]:
            findings.append(Finding(name, "differs from the manifest"))
    return findings


def _check_syntax(tree: Path, plan: Plan, queue: Queue, report: VerifyReport) -> None:
    for name in sorted({*queue.manifest, *plan.after}):
        path = tree / name
        content = plan.after.get(name) if name in plan.after else _content(path)
        if content is None:
            continue
        if name.endswith(".py"):
            report.compiled += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # upstream's own, e.g. invalid escapes
                try:
                    compile(content, name, "exec", dont_inherit=True)
                except (SyntaxError, ValueError) as error:
                    report.findings.append(Finding(name, f"does not compile: {error}"))
        elif name.endswith((".yaml", ".yml")):
            report.parsed += 1
            try:
                list(yaml.safe_load_all(content))
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                what = " ".join(str(error).split())
                report.findings.append(Finding(name, f"is not YAML: {what}"))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


@dataclass(frozen=True)
class StatusReport:
    """How a queue fits another release."""

    target: str
    fits: tuple[PatchFit, ...]
    changed: tuple[str, ...]
    """Files that the queue touches and that differ from the pinned release."""

    @property
    def clean(self) -> bool:
        """Whether a rebase would go through without a person deciding anything."""
        return all(fit.fit in (Fit.EXACT, Fit.OFFSET, Fit.UPSTREAM) for fit in self.fits)


def status_against(queue: Queue, tree: Path, target: str) -> StatusReport:
    """Apply the queue in memory to another release; hunks that conflict are left out.

    Args:
        queue: the queue.
        tree: that release, unpacked or installed; one that we patched is read as released.
        target: what to call it.
    """
    queue = queue.fitting(tree)
    reader = PristineReader(tree, own_marker(tree, queue.project))
    plan = plan_patches(reader, queue.patches)
    theirs = manifest_of(tree, *queue.facts.roots)
    theirs |= {name: file.before or "" for name, file in reader.ours.items()}
    changed = [n for n in sorted(plan.before) if theirs.get(n, "") != queue.manifest.get(n, "")]
    return StatusReport(target, plan.fits, tuple(changed))
