"""What the tree audit finds: a site in a file, the rule it breaks, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum


class Status(str, Enum):
    """What a finding means for a run on a P40 (FSDP, HF or vLLM rollout, FP32)."""

    FAILURE = "FAILURE"
    """On the path, and nothing handles it."""
    PATCHED = "patched"
    """Was in the pristine release, and the patch queue changed it."""
    UNREACHABLE = "unreachable"
    """Off the path; the reviewed file says which setting would lead to it."""
    ACCEPTED = "accepted"
    """On the path and harmless there; the reviewed file says why."""


@dataclass(frozen=True)
class Finding:
    """One site.

    ``identity`` leaves out line and column on purpose: a line added above a site must neither
    hide it nor make it look new.
    """

    path: str
    line: int
    column: int
    rule: str
    qualname: str
    code: str
    source: str
    guard: str = ""
    guard_line: int = 0
    status: Status = Status.FAILURE
    reason: str = ""
    patch: str = ""
    entry: str = ""
    reached_by: tuple[str, ...] = field(default=())

    @property
    def identity(self) -> tuple[str, str, str, str]:
        return (self.path, self.rule, self.qualname, self.code)

    def marked(
        self,
        status: Status,
        *,
        reason: str = "",
        patch: str = "",
        entry: str = "",
        reached_by: tuple[str, ...] = (),
    ) -> Finding:
        """This finding with a status and why it has it."""
        return replace(
            self, status=status, reason=reason, patch=patch, entry=entry, reached_by=reached_by
        )

    def to_json(self) -> dict[str, object]:
        return {
            "path": self.path,
            "line": self.line,
            "column": self.column,
            "rule": self.rule,
            "qualname": self.qualname,
            "code": self.code,
            "source": self.source,
            "guard": self.guard,
            "guard_line": self.guard_line,
            "status": self.status.value,
            "reason": self.reason,
            "patch": self.patch,
            "entry": self.entry,
            "reached_by": list(self.reached_by),
        }
