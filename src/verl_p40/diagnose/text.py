"""A log line as its program wrote it: without colours, bars, and what others put in front."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

WIDTH = 4000
"""Characters of a line that are looked at; tracebacks with a tensor in them are longer."""

_ANSI = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()][A-Z0-9]"
    r"|(?:←|␛|ESC|\^\[|#033|\\033|\\x1b|\\u001b|\\e)\[[0-9;]{1,12}m"
)
"""Colours, and colours whose escape character a pager, an editor or journald has spelt out."""
_QUOTED = re.compile(r"^(?:> ?)+(?=\S|\s)|^\*\*(?=\S)|\*\*$|^`+(?=\S)|(?<=\S)`+$")
"""What a report pasted into an issue puts around a line: a quote, bold, code."""
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_BOX = re.compile(r"\s+│$")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_TYPOGRAPHY = str.maketrans("\u2018\u2019\u201c\u201d\u00a0", "''\"\" ")
"""What a forum, a mail program or gcc makes of quotes and blanks."""
_JSON = re.compile(r'^\{"(?:log|msg|message|text)": ?"(?=.)|(?:\\n)?"(?:, ?"\w+": ?"[^"]*")*\}$')
"""Docker's and others' way to keep a line: `{"log":"...\\n","stream":"stderr","time":"..."}`."""
_ENTITY = re.compile(r"&(?:#\d+|#x[0-9a-fA-F]+|quot|apos|lt|gt|amp|nbsp);")

_PREFIXES = (
    # docker compose: `train-1  | `
    re.compile(r"^(?P<source>[A-Za-z0-9][\w.-]*?-\d+)\s*\| ?"),
    re.compile(r"^(?P<source>[A-Za-z0-9][\w.-]*)\s{1,40}\| "),
    # docker logs -t, kubectl --timestamps, CI
    re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)? "),
    # Python's logging, job schedulers: `2025-10-31 03:11:02,475 - Trainer - INFO - `, `[2025-05-10 00:18:27] `
    re.compile(
        r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)? (?:- )?[\w.-]+ (?:- )?"
        r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) - "
    ),
    re.compile(r"^\[\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\] "),
    # Ray, vLLM V1: `(WorkerDict pid=20514, ip=192.0.2.2) `, `(EngineCore_0 pid=77) `
    re.compile(r"^\((?P<source>[\w.:<>() -]+? (?:rank=\d+ )?pid=\d+(?:, ip=[\d.a-fA-F:]+)?)\)\s?"),
    # CRI (`stderr F `, after its time), journald and syslog (`Aug 26 14:08:07 host kernel: `)
    re.compile(r"^std(?:out|err)(?: [FP]|:) "),
    re.compile(r"^[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]+ [\w./@-]+(?:\[\d+\])?: "),
    # loguru, hydra (`[2024-09-17 15:04:01,101][__main__][ERROR] - `), transformers, ComfyUI, pytest
    re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \| [A-Z]+ *\| [\w.<>]+:[\w.<>]+:\d+ - "),
    re.compile(r"^\[\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?\](?:\[[\w.-]+\]){1,3} - "),
    re.compile(
        r"^\[(?:INFO|WARNING|ERROR|CRITICAL)\|[\w./-]+:\d+\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ >> "
    ),
    re.compile(r"^!!! Exception during processing ?!!! ?(?=\S)"),
    re.compile(r"^E {3,7}(?=\S)"),
    # an error as a heading, in a list, or announced: `[Bug]: `, `ERROR: `
    re.compile(
        r"^(?:[-*•]|#{1,4}|\d{1,2}[.)]|\[[A-Za-z/ ]{2,20}\]:?|[Bb]ug:|ERROR:|[Ee]rror:|Exception:"
        r"|报错\W|错误\W) *(?=(?:\w+\.)*\w+(?:Error|Exception): )"
    ),
    # lines that an editor or a viewer has numbered
    re.compile(
        r"^\d{1,5}[:|]? {1,4}"
        r"(?=(?:\w+\.)*\w*(?:Error|Exception)\b ?:|Traceback \(most| *File \".*\", line \d)"
    ),
    # torchrun, mpirun, srun: `[rank0]: `, `[default0]:`, `[1,0]<stderr>:`, `0: `
    re.compile(r"^\[(?P<source>rank ?\d+|default\d+|\d+,\d+)\](?:<\w+>)?: ?"),
    re.compile(r"^(?P<source>\d{1,4}): (?= |\S*Error|Traceback|\[)"),
    # vLLM and other loggers: `ERROR 06-06 14:09:57 [worker_base.py:148] `
    re.compile(
        r"^(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? "
        r"(?:\[?[\w./-]+:\d+\]?) ?"
    ),
    # Inductor and glog style: `E0912 11:54:57.366000 1121181 torch/_inductor/x.py:2100] [7/0] `
    re.compile(r"^[DIWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w./-]+:\d+\] (?:\[[\d/]+\] )?"),
    # buildkit: `#12 34.56 `
    re.compile(r"^#\d+ \d+\.\d+ "),
    # exception groups, and terminals that draw a box: `    | `, `│ `
    re.compile(r"^ {0,8}[|│] ?(?=.*\S)(?!\s*\d+ {2,}(?:NVIDIA|Tesla|GeForce))"),
)


@dataclass(frozen=True)
class Cleaned:
    """``text`` is the message; ``source`` names the process that wrote it, "" when unknown."""

    text: str
    source: str


def clean(line: str) -> Cleaned:
    """Take from ``line`` colours, control characters and the prefixes of Ray, compose and loggers.

    Indentation is kept: it tells a traceback's frames from its error.
    """
    text = _BOX.sub("", _CONTROL.sub("", _ANSI.sub("", line)).rstrip()).translate(_TYPOGRAPHY)
    if _ENTITY.search(text):
        text = html.unescape(text)
    if text[:2] == '{"' or text[-2:] == '"}':
        text = _JSON.sub("", text).replace('\\"', '"')
    source = ""
    for _ in range(6):
        for pattern in _PREFIXES:
            match = pattern.match(text)
            if match is None:
                continue
            named = match.groupdict().get("source")
            if named:
                source = f"{source} {named}".strip()
            text = text[match.end() :]
            break
        else:
            break
    if text[:1] in ">*`":
        text = _QUOTED.sub("", text)
    return Cleaned(_REPEATED.sub("", text)[:WIDTH], source)


def segments(raw: bytes) -> list[str]:
    """The parts of a line that a terminal would have drawn over each other, oldest first."""
    text = raw.decode("utf-8", "replace")
    if "\r" not in text:
        return [text]
    return [part for part in text.split("\r") if part.strip()] or [""]
