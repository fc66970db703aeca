"""Read the numbers of a CUDA out of memory error, and say what helps most."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_UNIT = {"bytes": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
         "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}  # fmt: skip
_SIZE = r"([\d.]+) (bytes|[KMGT]i?B)"
_TRIED = re.compile(r"Tried to allocate " + _SIZE)
_TOTAL = re.compile(r"total capacity of " + _SIZE + r"|" + _SIZE + r" total capacity")
_FREE = re.compile(_SIZE + r"(?: is)? free")
_ALLOCATED = re.compile(
    r"Of the allocated memory " + _SIZE + r" is allocated by PyTorch"
    r"|" + _SIZE + r" already allocated"
)
_UNUSED = re.compile(_SIZE + r" is reserved by PyTorch but unallocated")
_RESERVED = re.compile(_SIZE + r" reserved in total by PyTorch", re.IGNORECASE)
_OTHERS = re.compile(r"Process (\d+) has " + _SIZE + r" memory in use")
_OWN = re.compile(r"[Tt]his process has " + _SIZE + r" memory in use")

_MODELS = (
    ("critic", re.compile(r"dp_critic\.py|CriticWorker|critic_|update_critic|compute_values")),
    ("reference", re.compile(r"ref_compute|compute_ref_log_prob|RefWorker")),
    ("reward model", re.compile(r"RewardModelWorker|compute_rm_score")),
    (
        "rollout",
        re.compile(r"vllm_rollout|hf_rollout|sglang_rollout|generate_sequences|vllm/worker"),
    ),
    ("actor", re.compile(r"dp_actor\.py|update_actor|ActorRollout|actor_rollout|compute_log_prob")),
)

_CONTEXT = 1 << 30
"""Bytes of the process's own CUDA context and libraries, generously."""
_FRAGMENTED = 0.1
"""Share of the card that is reserved but unallocated from which fragmentation is worth naming."""


@dataclass(frozen=True)
class CudaOom:
    """Bytes, None where the message does not say.

    ``phase`` is the kind of the rule (what was running), ``model`` which of PPO's models.
    """

    phase: str
    tried: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    unused: int | None = None
    """Reserved by PyTorch's allocator, not allocated: fragmentation when it exceeds ``tried``."""
    others: int | None = None
    """In use by other processes of the card, or outside of this one's allocator."""
    model: str = ""

    @property
    def fragmented(self) -> bool:
        """The request would have fitted into what the allocator holds in pieces."""
        if self.tried is None or self.unused is None:
            return False
        floor = _FRAGMENTED * self.total if self.total else 0
        return self.unused >= self.tried and self.unused >= floor

    @property
    def oversized(self) -> bool:
        """A single tensor that no empty card of this kind could hold."""
        return self.tried is not None and self.total is not None and self.tried > self.total

    @property
    def crowded(self) -> bool:
        """Other processes hold more than a tenth of the card."""
        return bool(self.others and self.total and self.others > 0.1 * self.total)

    def sentence(self) -> str:
        """The numbers in words; empty when the message has none."""
        parts = []
        if self.tried is not None:
            parts.append(f"tried to allocate {show(self.tried)}")
        if self.total is not None:
            parts.append(f"the card has {show(self.total)}")
        if self.free is not None:
            parts.append(f"{show(self.free)} were free")
        if self.allocated is not None:
            parts.append(f"{show(self.allocated)} allocated by PyTorch")
        if self.unused is not None:
            parts.append(f"{show(self.unused)} reserved but unallocated")
        if self.others:
            parts.append(f"{show(self.others)} used by other processes")
        if not parts:
            return ""
        model = f" ({self.model})" if self.model else ""
        said = f"Numbers{model}: {', '.join(parts)}."
        if self.oversized:
            said += (
                " One tensor alone is larger than the card: attention scores of a long input "
                "without memory-efficient attention, or the logits of a whole batch."
            )
        elif self.fragmented:
            said += " The request would have fitted: memory is fragmented."
        return said

    def to_json(self) -> dict[str, str]:
        pairs = {
            "tried_bytes": self.tried,
            "total_bytes": self.total,
            "free_bytes": self.free,
            "allocated_bytes": self.allocated,
            "reserved_unallocated_bytes": self.unused,
            "other_processes_bytes": self.others,
        }
        texts = {key: str(value) for key, value in pairs.items() if value is not None}
        return {**texts, **({"model": self.model} if self.model else {})}


def show(size: int) -> str:
    """Bytes as people read them: 1.50 GiB, 20 MiB."""
    if size >= 1 << 30:
        return f"{size / (1 << 30):.2f} GiB"
    return f"{size / (1 << 20):.0f} MiB"


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    number, unit = [group for group in match.groups() if group is not None][:2]
    try:
        return int(float(number) * _UNIT[unit.lower()])
    except ValueError:
        return None


def read(lines: Sequence[str], *, phase: str) -> CudaOom | None:
    """The numbers of the message that starts in ``lines[0]``; it may go on in the next lines.

    Both of torch's forms are read: before 2.1 (``24.00 GiB total capacity; 21.00 GiB already
    allocated; ... reserved in total``) and since (``GPU 0 has a total capacity of ...``).
    """
    message: list[str] = []
    for line in lines[:6]:
        message.append(line)
        if "PYTORCH_CUDA_ALLOC_CONF" in line:
            break
    text = " ".join(message)
    if "out of memory" not in text.lower() and "OutOfMemory" not in text:
        return None
    allocated, unused = _size(_ALLOCATED, text), _size(_UNUSED, text)
    reserved = _size(_RESERVED, text)
    if unused is None and reserved is not None and allocated is not None:
        unused = max(0, reserved - allocated)
    own = _OWN.search(text) is not None
    total, free = _size(_TOTAL, text), _size(_FREE, text)
    outside = 0
    if reserved is not None and total is not None and free is not None:
        # torch before 2.1 names no processes: what neither it has nor is free, a context aside
        outside = max(0, total - free - reserved - _CONTEXT)
    others = outside or sum(
        int(float(number) * _UNIT[unit.lower()]) for _, number, unit in _OTHERS.findall(text)
    )
    return CudaOom(
        phase=phase,
        tried=_size(_TRIED, text),
        total=total,
        free=free,
        allocated=allocated,
        unused=unused,
        # In a container the process's own number is unknown, and its memory is listed as a
        # "Process N": only beside "this process" are the others known to be others.
        others=others if others and (own or outside) else None,
    )


def with_model(oom: CudaOom, frames: Sequence[str]) -> CudaOom:
    """Which of PPO's models was at work, from the traceback's frames."""
    for frame in frames:
        for name, pattern in _MODELS:
            if pattern.search(frame):
                return replace(oom, model=name)
    return oom


def advise(oom: CudaOom) -> tuple[str, ...]:
    """What helps most, by the numbers alone; the rule adds what helps in its phase.

    The one place to ask the memory planner, once a run's config is at hand.
    """
    fixes = []
    if oom.crowded:
        fixes.append(
            "free the card first: `nvidia-smi` lists the other processes on it, "
            f"which hold {show(oom.others or 0)}"
        )
    if oom.oversized:
        fixes.append(
            "memory-efficient attention (attn_implementation=sdpa), a shorter input, or a batch of "
            "1: what is freed elsewhere cannot make room for it"
        )
    elif oom.fragmented:
        fixes.append(
            "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # the request would have "
            "fitted: memory is fragmented (with vLLM's sleep mode use max_split_size_mb:128, "
            "it refuses expandable segments)"
        )
    return tuple(fixes)
