"""A machine in a YAML file: written by ``doctor --record``, read by ``doctor --replay`` and by tests.

    about: what machine this is
    source: where it is from
    commands:
      nvidia-smi: {code: 0, text: "..."}
    files: {/proc/driver/nvidia/version: "..."}
    folders: {/sys/bus/pci/devices: ["0000:02:00.0"]}
    variables: {CUDA_VISIBLE_DEVICES: "1"}
    space: {/dev/shm: {total: 67108864, free: 67108864}}
    reach: {"huggingface.co:443": ""}

A program that is recorded as ``null`` is not installed, a variable is not set; what is not in there
was not asked.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from verl_p40.doctor.machine import Live, Machine, Output, Space, Subject
from verl_p40.errors import UsageError

_MAX_BYTES = 20_000_000


class _Command(BaseModel):
    model_config = ConfigDict(extra="forbid")

    code: int = 0
    text: str
    timed_out: bool = False


class _Space(BaseModel):
    model_config = ConfigDict(extra="forbid")

    total: int
    free: int


class Recording(BaseModel):
    """What the file holds."""

    model_config = ConfigDict(extra="forbid")

    about: str = ""
    source: str = ""
    commands: dict[str, _Command | None] = {}
    files: dict[str, str | None] = {}
    folders: dict[str, list[str]] = {}
    variables: dict[str, str | None] = {}
    space: dict[str, _Space | None] = {}
    reach: dict[str, str] = {}


class Recorded:
    """A machine that answers from a recording."""

    live = False
    subject = Subject()

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def command(self, *words: str, limit: float = 10.0) -> Output | None:
        found = self.recording.commands.get(shlex.join(words))
        return None if found is None else Output(found.code, found.text, found.timed_out)

    def text(self, path: str) -> str | None:
        return self.recording.files.get(path)

    def names(self, folder: str) -> tuple[str, ...]:
        return tuple(self.recording.folders.get(folder, ()))

    def variable(self, name: str) -> str | None:
        return self.recording.variables.get(name)

    def space(self, path: str) -> Space | None:
        found = self.recording.space.get(path)
        return None if found is None else Space(found.total, found.free)

    def reach(self, host: str, port: int) -> str | None:
        return self.recording.reach.get(f"{host}:{port}")

    def told(self, question: str) -> bool:
        return question in self.recording.commands or question in self.recording.variables


def load(path: Path) -> Recorded:
    """Read a recording.

    Raises:
        UsageError: the file cannot be read, or is none.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{path} is too large for a recording")
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Recorded(Recording.model_validate(raw))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}", fix="verl-p40 doctor --record FILE"
        ) from error
    except (UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        words = " ".join(str(error).split())
        raise UsageError(
            f"{path} is no recording of doctor: {words[:200]}", fix="verl-p40 doctor --record FILE"
        ) from error


class Recorder:
    """This machine, writing down what it is asked, without what identifies it or its owner."""

    live = True

    def __init__(self, machine: Machine | None = None) -> None:
        self._machine = machine or Live()
        self.subject = self._machine.subject
        self._recording = Recording(about="", source="verl-p40 doctor --record")

    def command(self, *words: str, limit: float = 10.0) -> Output | None:
        found = self._machine.command(*words, limit=limit)
        kept = None
        if found is not None:
            text = redact(_needed(words[0], found.text))
            kept = _Command(code=found.code, text=text, timed_out=found.timed_out)
        self._recording.commands[shlex.join(words)] = kept
        return found

    def text(self, path: str) -> str | None:
        found = self._machine.text(path)
        self._recording.files[path] = None if found is None else redact(_needed(path, found))
        return found

    def names(self, folder: str) -> tuple[str, ...]:
        found = self._machine.names(folder)
        self._recording.folders[folder] = list(found)
        return found

    def variable(self, name: str) -> str | None:
        found = self._machine.variable(name)
        self._recording.variables[name] = None if found is None else redact(found)
        return found

    def space(self, path: str) -> Space | None:
        found = self._machine.space(path)
        kept = None if found is None else _Space(total=found.total, free=found.free)
        self._recording.space[redact(path)] = kept
        return found

    def reach(self, host: str, port: int) -> str | None:
        found = self._machine.reach(host, port)
        if found is not None:
            self._recording.reach[f"{host}:{port}"] = found
        return found

    def told(self, question: str) -> bool:
        return True

    def write(self, path: Path) -> None:
        """Write the recording: under a temporary name, then renamed.

        Raises:
            UsageError: it cannot be written.
        """
        text = yaml.dump(
            self._recording.model_dump(exclude_defaults=True),
            Dumper=_Dumper,
            sort_keys=True,
            allow_unicode=True,
            width=1000,
        )
        new = path.with_name(f".{path.name}.new")
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are, readable."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if "\n" not in text:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text)
    plain = "\n".join(line.rstrip().replace("\t", "        ") for line in text.split("\n"))
    return dumper.represent_scalar("tag:yaml.org,2002:str", plain, style="|")


_Dumper.add_representer(str, _text)

_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "GPU-0"),
    (re.compile(r"((?:Serial Number|GPU PDI|GUID|Board ID)\s*: )\S+"), r"\g<1>0"),
    (re.compile(r"(://)[^/@\s]+@"), r"\g<1>"),
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), "hf_0"),
    (re.compile(r"^( (?:Name|ID): ).*$", re.MULTILINE), r"\g<1>host"),
    (re.compile(r"\b[0-9a-f]{2}(:[0-9a-f]{2}){5}\b"), "00:00:00:00:00:00"),
)


_LINES: dict[str, re.Pattern[str]] = {
    "dmesg": re.compile("NVRM"),
    "journalctl": re.compile("NVRM"),
    "/proc/net/tcp": re.compile(r"local_address| 0A "),
    "/proc/net/tcp6": re.compile(r"local_address| 0A "),
}
"""Of these, only the lines that checks read: the rest is nobody's business (other machines' addresses)."""


def _needed(question: str, text: str) -> str:
    wanted = _LINES.get(question)
    if wanted is None:
        return text
    return "".join(line for line in text.splitlines(keepends=True) if wanted.search(line))


def redact(text: str) -> str:
    """Without serial numbers, UUIDs, MAC addresses, passwords in addresses, host and user name."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    home = os.path.expanduser("~")  # noqa: PTH111 - as a string
    if len(home) > 1:
        text = text.replace(home, "~")
    host = socket.gethostname()
    if len(host) > 2:
        text = re.sub(rf"\b{re.escape(host)}\b", "host", text)
    return text
