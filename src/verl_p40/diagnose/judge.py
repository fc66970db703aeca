"""From the rules that speak to one answer: the first fatal cause, and what only followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from verl_p40.diagnose import fallback, memory
from verl_p40.diagnose.card import capability_in
from verl_p40.diagnose.match import Hit, around, code_lines, hits
from verl_p40.diagnose.model import Confidence
from verl_p40.diagnose.scan import Line, Scanned
from verl_p40.hardware.p40 import P40
from verl_p40.kernels.capability import Capability

Result = Literal["cause", "harmless", "nothing-known"]

_CHAIN = re.compile(
    r"The above exception was the direct cause|During handling of the above exception"
)
_ERROR = re.compile(r"^\s{0,3}[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failed)\b[:( ]?")
_SUSPICIOUS = (
    (5, _ERROR),
    (5, re.compile(r"\b(?:FATAL|CRITICAL|PANIC|fatal error|core dumped|Segmentation fault)\b")),
    (4, re.compile(r"\b(?:ERROR|Error|error)\b ?:")),
    (3, re.compile(r"(?i)\b(?:failed|cannot|could not|unable to|killed|aborted|no such)\b")),
    (2, re.compile(r"(?i)\berror\b|\[E\]|Traceback")),
)
_SHOWN = 8
_MESSAGE = 12
"""Lines within which a rule's matches belong to one message."""
_P40 = Capability(*P40.compute_capability)
"""Whom advice is for where the log names no card."""


@dataclass(frozen=True)
class Finding:
    """One thing that the log says.

    ``why`` is why the confidence is what it is; for a symptom or something harmless, why it is
    no cause. ``evidence`` are the very lines.
    """

    id: str
    kind: str
    text: str
    why: str
    confidence: Confidence
    fix: tuple[str, ...]
    read: tuple[str, ...]
    versions: str
    said: Line
    """The line that the rule speaks on; ``evidence`` may begin with an earlier one."""
    evidence: tuple[Line, ...]
    details: dict[str, str] = field(default_factory=dict)

    @property
    def line(self) -> int:
        return self.evidence[0].number if self.evidence else 0


@dataclass(frozen=True)
class Diagnosis:
    """``causes`` in the order in which they struck: the first is the root cause."""

    result: Result
    causes: tuple[Finding, ...]
    symptoms: tuple[Finding, ...]
    harmless: tuple[Finding, ...]
    suspicious: tuple[Line, ...]
    lines: int
    size: int
    progress: int
    dropped: int


_GAP = "\0"
"""A value that none of the rule's patterns found."""
_NAME = re.compile(r"\{(\w+)\}")
_PARENTHESES = re.compile(r" ?\(([^()]*\{\w+\}[^()]*)\)")
_LAST = re.compile(rf"(?::? {_GAP})+(?=\.?$)")


class _Blank(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return _GAP


def _filled(template: str, values: _Blank) -> str:
    """The text with its values. What is missing is left out where the sentence can do without it:
    in parentheses, and at the end."""

    def known(match: re.Match[str]) -> str:
        parts = [
            part
            for part in match[1].split("; ")
            if not _NAME.search(part) or any(name in values for name in _NAME.findall(part))
        ]
        return f" ({'; '.join(parts)})" if parts else ""

    text = _PARENTHESES.sub(known, template).format_map(values)
    return _LAST.sub("", text.rstrip()).replace(_GAP, "?")


def _finding(hit: Hit, *, why: str = "", card: Capability | None = None) -> Finding:
    rule = hit.rule
    told = card or _P40
    values = _Blank(hit.groups, card=str(told), card_sm=str(told.sm))
    if "module" in values:
        values["package"] = values["module"].split(".")[0]
    return Finding(
        id=rule.id,
        kind=rule.name,
        text=" ".join(_filled(rule.cause, values).split()),
        why=" ".join(_filled(why or rule.why, values).split()),
        confidence=rule.confidence,
        fix=tuple(_filled(one.do, values) for one in rule.fix if one.suits(card)),
        read=rule.read,
        versions=rule.versions,
        said=hit.line,
        evidence=hit.evidence,
        details=hit.groups,
    )


def _completed(hit: Hit, others: Sequence[Hit]) -> Hit:
    """With the values that the same rule found a few lines further on: a message of several lines."""
    groups = dict(hit.groups)
    for other in others:
        if other.rule.id == hit.rule.id and 0 < other.line.position - hit.line.position <= _MESSAGE:
            groups = {**other.groups, **groups}
    return replace(hit, groups=groups)


def judge(scanned: Scanned, *, advise: Callable[[memory.CudaOom], Sequence[str]]) -> Diagnosis:
    """Weigh everything that the rules found in one log.

    ``advise`` answers what helps against a CUDA out of memory, given its numbers and phase.
    """
    told_by_rules = hits(scanned)
    everything = [hit for hit in told_by_rules if not hit.rule.fallback]
    spoken = _one_a_line(everything)
    harmless = [hit for hit in everything if hit.rule.role == "harmless"]
    covered = {hit.line.position for hit in harmless}
    symptoms = [h for h in spoken if h.rule.role == "symptom" and h.line.position not in covered]
    candidates = [h for h in spoken if h.rule.role == "cause"]
    candidates = [h for h in candidates if not _forgiven(h, harmless)]
    # A line of progress may tell a fault itself: losses that are NaN.
    overcome = [h for h in candidates if _last(h, candidates) < scanned.progress]
    fatal = [h for h in candidates if _last(h, candidates) >= scanned.progress]
    if not fatal and any(hit.last > scanned.progress for hit in symptoms):
        # The run did die after its last step; what it died of was printed before that.
        fatal, overcome = overcome, []
    unexplained = _unexplained(scanned, everything)
    accepted, followed = _weigh(fatal, scanned)
    if accepted and all(hit.rule.weight == 1 for hit in accepted):
        # A kill or crash after an error that is not known here: it is no answer.
        late = [h for h in accepted if any(x.position < h.line.position for x in unexplained)]
        accepted = [hit for hit in accepted if hit not in late]
        followed += [(hit, "came after an error that is not known here") for hit in late]
    asked = any(one.cc or "{card" in one.do for hit in accepted for one in hit.rule.fix)
    card = capability_in(line.text for line in scanned.lines) if asked else None
    causes = [
        _with_memory(
            _sober(_finding(_completed(hit, candidates), card=card), hit, number, unexplained),
            hit,
            scanned,
            advise,
        )
        for number, hit in enumerate(accepted)
    ]
    causes = [fallback.crashed_in(f, h, scanned) for f, h in zip(causes, accepted, strict=True)]
    if not causes:
        weak = [hit for hit in told_by_rules if hit.rule.fallback]
        died = any(hit.last > scanned.progress for hit in symptoms)
        first = fallback.first(_one_a_line(weak), everything, scanned, died=died)
        causes = [fallback.where(_finding(first), first, scanned)] if first else []
    seen = [
        *_unique(_finding(hit, why=hit.rule.why) for hit in symptoms),
        *_unique(_finding(hit, why=why) for hit, why in followed),
    ]
    kinds = {cause.kind for cause in causes}
    quiet = [
        *_unique(_finding(hit) for hit in harmless),
        *_unique(
            _finding(hit, why="training went on after it")
            for hit in overcome
            if hit.rule.name not in kinds
        ),
    ]
    told = {line.position for finding in [*causes, *seen, *quiet] for line in finding.evidence}
    return Diagnosis(
        result="cause" if causes else "harmless" if quiet and not seen else "nothing-known",
        causes=tuple(causes),
        symptoms=tuple(f for f in seen if f.id not in {c.id for c in causes}),
        harmless=tuple(quiet),
        suspicious=() if causes else _suspicious(scanned, told),
        lines=scanned.count - scanned.first_line + 1,
        size=scanned.size,
        progress=scanned.progress,
        dropped=scanned.dropped,
    )


def _unexplained(scanned: Scanned, everything: Sequence[Hit]) -> list[Line]:
    """Lines that name an exception on which no rule speaks."""
    known = {line.position for hit in everything for line in hit.evidence}
    code = code_lines(scanned.lines)
    return [
        line
        for line in scanned.lines
        if line.hot
        and not line.mild
        and line.position not in known
        and line.position not in code
        and _ERROR.match(line.text)
        and "Traceback (most recent" not in line.text
    ]


def _sober(finding: Finding, hit: Hit, number: int, unexplained: Sequence[Line]) -> Finding:
    """High confidence is for a program's own error that nothing in the log puts in doubt."""
    if finding.confidence != "high":
        return finding
    doubt = ""
    if hit.line.mild:
        doubt = "the program calls this line a warning, and may have gone on"
    elif hit.loose:
        doubt = "only some words of the line were recognised"
    elif number and hit.rule.weight < 4:
        doubt = "another fault came first, and this one may follow from it"
    elif not _ERROR.match(hit.line.text) and any(
        line.source == hit.line.source and line.position > hit.line.position for line in unexplained
    ):
        doubt = "an error that is not known here came after it"
    if not doubt:
        return finding
    return replace(finding, confidence="medium", why=f"{finding.why.rstrip('.')}; but {doubt}.")


def _one_a_line(found: Sequence[Hit]) -> list[Hit]:
    """Where several rules speak on one line, the most specific one is heard."""
    best: dict[int, Hit] = {}
    for hit in found:
        other = best.get(hit.line.position)
        if other is None or _more_specific(hit, other):
            best[hit.line.position] = hit
    return [best[position] for position in sorted(best)]


def _more_specific(one: Hit, other: Hit) -> bool:
    """Of two frames the deeper one decides, when both rules are about the same kind of error."""
    related = one.rule.name.split("-")[:2] == other.rule.name.split("-")[:2]
    if related and one.depth is not None and other.depth is not None and one.depth != other.depth:
        return one.depth < other.depth
    return one.rule.rank > other.rule.rank


def _last(hit: Hit, candidates: Sequence[Hit]) -> int:
    """Where the same cause was last seen, whichever line said it."""
    return max(other.last for other in candidates if other.rule.name == hit.rule.name)


def _forgiven(hit: Hit, harmless: Sequence[Hit]) -> bool:
    return any(
        hit.rule.name in other.rule.hides
        and (other.rule.rank >= hit.rule.rank or other.line.position == hit.line.position)
        and abs(other.line.position - hit.line.position) <= 40
        for other in harmless
    ) or any(
        other.line.position == hit.line.position and other.rule.rank >= hit.rule.rank
        for other in harmless
    )


def _weigh(fatal: Sequence[Hit], scanned: Scanned) -> tuple[list[Hit], list[tuple[Hit, str]]]:
    """Split candidates into causes, in order, and what followed from them, with the reason."""
    accepted: list[Hit] = []
    followed: list[tuple[Hit, str]] = []
    hidden = {kind for hit in fatal for kind in hit.rule.hides}
    errors = [hit for hit in fatal if not hit.line.mild and hit.rule.weight > 1]
    for hit in [hit for hit in fatal if hit.line.mild]:
        # A warning explains an error where its rule says so; otherwise the program went on after it.
        other = [e for e in errors if e.rule.name not in (hit.rule.name, *hit.rule.hides)]
        if other and len(other) == len(errors):
            followed.append((hit, "only a warning, and another error stopped the program"))
    warned = {id(hit) for hit, _ in followed}
    fatal = [hit for hit in fatal if id(hit) not in warned]
    heaviest = max((hit.rule.weight for hit in fatal), default=0)
    for hit in fatal:
        rule = hit.rule
        same = next((a for a in accepted if a.rule.name == rule.name), None)
        if same is not None:
            if _certainty(hit) > _certainty(same):
                accepted[accepted.index(same)] = hit
            continue
        if rule.name in hidden and not all(rule.name in h.rule.hides for h in fatal):
            followed.append((hit, "it follows from the cause above"))
        elif rule.weight < min(heaviest, 3):
            followed.append(
                (hit, "usually the consequence of another fault, and one is in this log")
            )
        elif accepted and _chained(accepted[-1], hit, scanned):
            followed.append((hit, "raised while the first error was being handled"))
        elif accepted and (rule.weight < 3 or rule.confidence == "low"):
            followed.append((hit, "came after the first fatal error"))
        else:
            accepted.append(hit)
    return accepted, followed


def _certainty(hit: Hit) -> int:
    """Of two hits of one kind the more certain one is shown: 2 high, 1 medium, 0 low."""
    capped = hit.loose or hit.line.mild
    return min({"high": 2, "medium": 1, "low": 0}[hit.rule.confidence], 1 if capped else 2)


def _chained(first: Hit, second: Hit, scanned: Scanned) -> bool:
    """Whether Python says that the second error came of the first."""
    between = scanned.lines[first.line.position : second.line.position]
    if len(between) > 400:
        return False
    return any(_CHAIN.search(line.text) for line in between if line.source == second.line.source)


def _unique(findings: Iterable[Finding]) -> list[Finding]:
    kept: dict[str, Finding] = {}
    for finding in findings:
        kept.setdefault(finding.id, finding)
    return list(kept.values())


def _with_memory(
    finding: Finding,
    hit: Hit,
    scanned: Scanned,
    advise: Callable[[memory.CudaOom], Sequence[str]],
) -> Finding:
    """Add the numbers of a CUDA out of memory, and what helps most against it."""
    if not finding.kind.startswith("cuda-oom"):
        return finding
    window = around(scanned.lines, hit.line.position)
    oom = memory.read([line.text for line in window.lines[window.at :]], phase=finding.kind)
    if oom is None:
        return finding
    oom = memory.with_model(oom, [line.text for line in window.traceback])
    text = f"{finding.text} {oom.sentence()}".strip()
    return replace(
        finding,
        text=text,
        fix=(*advise(oom), *finding.fix),
        details={**finding.details, **oom.to_json()},
    )


def suspicion(text: str) -> int:
    """How much a line looks like the reason of a failure: 0 not at all, 5 it names an exception."""
    return max((score for score, pattern in _SUSPICIOUS if pattern.search(text)), default=0)


def _suspicious(scanned: Scanned, told: set[int]) -> tuple[Line, ...]:
    """The lines that most look like the reason, in the log's order; the last ones otherwise."""
    scored: list[tuple[int, int, Line]] = []
    texts: set[str] = set()
    for line in scanned.lines:
        if not line.hot or line.position in told:
            continue
        plain = re.sub(r"\d+", "0", line.text).strip()
        if plain in texts or not plain:
            continue
        score = suspicion(line.text)
        if score:
            texts.add(plain)
            late = 1 if line.number > scanned.progress else 0
            scored.append((-score - 3 * late, line.position, line))
    best = sorted(scored, key=lambda item: item[:2])[:_SHOWN]
    lines = [line for _, _, line in sorted(best, key=lambda item: item[1])]
    if lines:
        return tuple(lines)
    rest = [line for line in [*scanned.lines, *scanned.tail] if line.text.strip()]
    return tuple(rest[-_SHOWN:])
