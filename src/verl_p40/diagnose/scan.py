"""Read a log of any size in one pass and keep the few lines that can tell why a run failed.

A clean training log repeats itself: take the digits away, and one step looks like the next. So a
line's *template* (lower case, no digits, no bar characters) is looked up in a set, and only words
never seen before are searched. Lines with a telling word ("hot") are kept with their surroundings.
Memory is bounded by the number of different lines, not by the size of the log.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from verl_p40.diagnose.text import clean, segments

BEFORE, AFTER = 120, 50
"""Lines kept around a hot one. A traceback through Ray, verl and torch has 60 to 100 lines."""
_BLOCK = 1 << 20
_LONGEST = 1 << 20
"""Bytes after which a line without an end is cut."""
_KEEP = 40_000
_TAIL = 12
_OCCURRENCES = 12
"""Times that the same template opens a window; later ones only move its last place."""
_REMEMBER = 200_000
_PASTED = (120, 1 << 15)
"""Lines and bytes up to which a log is an excerpt that somebody pasted: it has nothing to search
fast, so that each of its lines is hot."""
_SPELT = re.compile(rb"\\n(?=[\s\"'A-Z\[(^~\\]|$)")
"""A line end as JSON or repr() spells it; not a folder of Windows."""
_HEAD = 2000
"""Bytes of a line in which a sign of progress is looked for: a bar may be a megabyte long."""

_LOWER = bytes(range(256)).lower()
_DROP = b"0123456789\x00#" + "█▉▊▋▌▍▎▏".encode() + b"|"

_HOT = re.compile(
    rb"error|exception|interrupted|fail|fatal|support|traceback|cannot|can't|unable|killed|killing|abort"
    rb"|denied|refus|invalid|mismatch|xid|nvrm|require|unavailable|undefined|missing|timeout|timed|assert"
    rb"|unknown|unexpected|unrecogni|exceed|too$|warn|exhaust|outof|conflict"
    rb"|incompatib|inconsisten|illegal|corrupt|crash|panic|died|dead|oom|segv|segm|sigbus|sigkill|sigabrt|dumped"
    rb"|duplicate|insufficient|\bnan\b|\binf\b|must|violat|expired|locked|reject|overflow"
    rb"|deprecat|nvml|nvidia-|cuda|libcu|ptx|nvcc|triton|llvm|shm|\bsm_|compute_|capability"
    rb"|overrid|fallback|falling|lost\b|full\b|quota|\bstruct\b"
    rb"|dtype|bfloat|bf16|half\b'|exited|exitcode|sig(?:ill|segv)|cublas|cudnn|nccl|unsat|glibc"
    rb"|append$|allowed$|/env:|initialized$|utilization|devices\b|\bblocks:$|already|slowdown|won't|wasn't|cudaget|map::at|_files_and_tokenize"
    rb"|unauthorized|pydantic|compatible|blocked|throttl|mountpoint|bad_alloc|badly|oserror|enoent|eacces|lock\b|found\.?$|stuck|hang|hung|^what\(|pickl|same$|len\(lst\)"
    rb"|unmet|directory$|overlaps$|^placement$|malform|forbid|terminat|unresolv|truncat|unrecover|uncorrect|unhandled"
    rb"|vocabulary|overload|ignored|low_memory|request_memory|verify_max|size_invalid|mutually_excl|engine_startup|resource_available|raise_or_|^space$|temporarily|^kernel$|unhealthy|^docker:$|exist\.?$|recognized$|positive$|err!|^blacklist$|ephemeral|writable|page_fault"
    rb"|" + "已杀死|段错误|已放弃|核心已转储|getötet|tué|不支持|错误|失败".encode()
)
"""What makes a word hot. It is run on every distinct word once, so it may be long."""

_PROGRESS = re.compile(
    rb"\bstep: - |\{'loss': |\{'train_loss'|\bglobal_step[:=] ?,? ?.*loss|avg generation throughput"
    rb"|application startup complete|uvicorn running on|\bepoch .*\bloss\b.*\blr\b"
    rb"|training progress: % .*it/s|step/: loss"
)
_DIVERGED = re.compile(
    rb"loss'?:? ?nan|grad_norm(?:': |[:=])nan|(?:rewards|logps|logits)/\w+': nan"
)
"""A step was made, and it is worth nothing: the one line of progress that is kept."""
_ENDED = b"error executing job with overrides"
"""Hydra's word on the end of the main process: no step is trained after it."""
_BEGUN = (b"started a local ray instance", b"connecting to existing ray cluster", b"=== verl-p ")
"""Another run in the same log (templates have no digits)."""
_LATE = 300
"""Lines that Ray hands on from its workers after the main process has ended: it takes seconds."""
_LEVEL_WITHIN = 160
_MILD = re.compile(
    r"^(?!.*\b(?:ERROR|CRITICAL|FATAL)\b)(?:.*(?<!NCCL )\b(?:WARN(?:ING)?|INFO|DEBUG|NOTE)\b"
    r"|.*\b\w*Warning: |[WI]\d{4} \d\d:|\[W\b|[Ww]arning: )"
)
_SIGNS = (b"step", b"loss", b"throughput", b"startup", b"uvicorn", b"it/s")
"""One of them is in every match of ``_PROGRESS``, and found much faster."""


@dataclass(frozen=True)
class Line:
    """A kept line. ``number`` counts from 1; ``position`` is its place among the kept lines."""

    number: int
    text: str
    source: str
    hot: bool
    key: int
    position: int = 0
    mild: bool = False
    """Its program calls it a warning or a note."""


@dataclass
class Scanned:
    """What one pass kept.

    ``progress`` and ``first_progress`` are the numbers of the last and first line that show
    training go on, 0 without one;
    ``last_seen`` the last line number of a template, by the ``key`` of its lines.
    """

    lines: list[Line] = field(default_factory=list)
    tail: list[Line] = field(default_factory=list)
    last_seen: dict[int, int] = field(default_factory=dict)
    progress: int = 0
    first_progress: int = 0
    first_line: int = 1
    count: int = 0
    size: int = 0
    dropped: int = 0


def blocks(chunks: Iterable[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Join chunks and cut them at line ends. The flag says that the block ends a line."""
    rest = b""
    for chunk in chunks:
        if not chunk:
            continue
        data = rest + chunk if rest else chunk
        cut = data.rfind(b"\n")
        if cut >= 0:
            yield data[:cut], True
            rest = data[cut + 1 :]
        else:
            rest = data
        if len(rest) > _LONGEST:
            yield rest, False
            rest = b""
    if rest:
        yield rest, True


class _End:
    """Where the main process ended, and the last step before that."""

    def __init__(self) -> None:
        self._step = self._ended = self._step_then = 0

    def note(self, number: int, template: bytes, *, step: bool) -> None:
        """Take in the next line of a block that is read line by line."""
        if step:
            self._step = number
        elif _ENDED in template:
            self._ended, self._step_then = number, self._step
        elif any(sign in template for sign in _BEGUN):
            self._ended = 0

    def passed(self, step: int) -> None:
        """A block has been read whose last step is ``step``."""
        self._step = max(self._step, step)

    def last_step(self, progress: int) -> int:
        """``progress``, unless that line only came late: then the last one before the end."""
        late = self._ended and 0 < progress - self._ended <= _LATE
        return self._step_then if late else progress


class _Memory:
    """Which templates and words have been seen, and what they were."""

    def __init__(self) -> None:
        self.cold: set[bytes] = set()
        self.hot: dict[bytes, int] = {}
        self.progress: set[bytes] = set()
        self._words: set[bytes] = set()
        self._hot_words: set[bytes] = set()
        self.times: dict[int, int] = {}

    def learn(self, new: set[bytes], *, every: bool) -> None:
        if len(self.cold) > _REMEMBER:
            self.cold.clear()
        if len(self._words) > _REMEMBER:
            self._words.clear()
        words = set(b" ".join(new).split()) - self._words
        fresh = {word for word in words if _HOT.search(word)}
        self._hot_words |= fresh
        self._words |= words
        for template in new:
            head = template[:_HEAD]
            if any(sign in head for sign in _SIGNS) and _PROGRESS.search(head):
                self.progress.add(template)
                if _DIVERGED.search(template):
                    self.hot[template] = len(self.hot) + 1
                    continue
            elif (every and template.strip()) or not self._hot_words.isdisjoint(template.split()):
                self.hot[template] = len(self.hot) + 1
                continue
            self.cold.add(template)


def scan(chunks: Iterable[bytes], *, first_line: int = 1) -> Scanned:
    """Read the whole of ``chunks`` (any sizes) once. ``first_line`` is the number of its first."""
    found = Scanned(count=first_line - 1, first_line=first_line)
    pasted, chunks = _is_pasted(chunks)
    memory = _Memory()
    previous: deque[tuple[int, bytes]] = deque(maxlen=BEFORE)
    after = 0
    kept_to = 0
    end = _End()
    for block, _ended in blocks(chunks):
        found.size += len(block) + 1
        templates = block.translate(_LOWER, _DROP).split(b"\n")
        first = found.count + 1
        found.count += len(templates)
        new = set(templates).difference(memory.cold, memory.hot)
        if new:
            memory.learn(new, every=pasted)
        if not memory.progress.isdisjoint(templates):
            for index in range(len(templates) - 1, -1, -1):
                if templates[index] in memory.progress:
                    found.progress = first + index
                    break
            if not found.first_progress:
                found.first_progress = first + next(
                    index for index, line in enumerate(templates) if line in memory.progress
                )
        if after <= 0 and memory.hot.keys().isdisjoint(templates):
            _remember(previous, block, first, len(templates))
            end.passed(found.progress)
            continue
        raw = block.split(b"\n")
        for index, template in enumerate(templates):
            number = first + index
            key = memory.hot.get(template, 0)
            end.note(number, template, step=template in memory.progress)
            hot = False
            if key:
                found.last_seen[key] = number
                times = memory.times.get(key, 0) + 1
                memory.times[key] = times
                hot = times <= _OCCURRENCES
            if hot:
                for earlier, data in previous:
                    if earlier > kept_to:
                        _keep(found, earlier, data, hot=False, key=0)
                previous.clear()
                _keep(found, number, raw[index], hot=True, key=key)
                kept_to, after = number, AFTER
            elif after > 0:
                after -= 1
                _keep(found, number, raw[index], hot=False, key=key)
                kept_to = number
            else:
                previous.append((number, raw[index]))
    found.progress = end.last_step(found.progress)
    for number, data in list(previous)[-_TAIL:]:
        found.tail.extend(_lines(number, data, hot=False, key=0))
    return found


def _is_pasted(chunks: Iterable[bytes]) -> tuple[bool, Iterator[bytes]]:
    """Whether the log is no longer than an excerpt, and all of its chunks."""
    rest = iter(chunks)
    start = b""
    for chunk in rest:
        start += chunk
        if len(start) > _PASTED[1]:
            break
    short = len(start) <= _PASTED[1] and start.count(b"\n") <= _PASTED[0]
    if short and len(_SPELT.findall(start)) > max(1, start.count(b"\n")):
        start = _SPELT.sub(b"\n", start)
    return short, _again([start], rest)


def _again(held: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    """``itertools.chain`` would hold the first chunk to the end."""
    yield held.pop()
    yield from rest


def _remember(previous: deque[tuple[int, bytes]], block: bytes, first: int, count: int) -> None:
    """The last lines of a block that had nothing, without splitting the whole of it."""
    last = block.rsplit(b"\n", BEFORE)
    if len(last) > BEFORE:
        last = last[1:]
    start = first + count - len(last)
    previous.extend((start + offset, data) for offset, data in enumerate(last))


def _keep(found: Scanned, number: int, data: bytes, *, hot: bool, key: int) -> None:
    if len(found.lines) >= _KEEP:
        found.dropped += 1
        return
    for line in _lines(number, data, hot=hot, key=key, position=len(found.lines)):
        found.lines.append(line)


def _lines(number: int, data: bytes, *, hot: bool, key: int, position: int = 0) -> Iterator[Line]:
    parts = segments(data[: 1 << 17])
    if len(parts) > 1:
        telling = [part for part in parts[:-1] if _HOT.search(part.lower().encode())]
        parts = [*telling[:20], parts[-1]]
    for offset, part in enumerate(parts):
        cleaned = clean(part)
        yield Line(
            number,
            cleaned.text,
            cleaned.source,
            hot,
            key,
            position + offset,
            mild=hot and _MILD.search(part[:_LEVEL_WITHIN]) is not None,
        )
