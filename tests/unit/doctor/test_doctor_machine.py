"""The live machine's limits, and recording it without what identifies it."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from verl_p40.doctor import recording
from verl_p40.doctor.machine import Live
from verl_p40.doctor.recording import Recorder, redact
from verl_p40.errors import UsageError


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_a_program_that_hangs_is_ended(bin_folder: Path) -> None:
    program(bin_folder, "nvidia-smi", "exec sleep 60")
    started = time.monotonic()
    said = Live().command("nvidia-smi", limit=0.3)
    assert time.monotonic() - started < 3
    assert said is not None
    assert (said.code, said.timed_out, said.text) == (124, True, "no answer in 0 s")


def test_a_program_is_asked_once_and_in_english(bin_folder: Path, tmp_path: Path) -> None:
    program(bin_folder, "tool", f'echo x >> "{tmp_path}/calls"; echo "$LC_ALL $1"; exit 3')
    machine = Live()
    first, second = machine.command("tool", "a"), machine.command("tool", "a")
    assert first is not None
    assert (first.code, first.text) == (3, "C a\n")
    assert second is first
    assert (tmp_path / "calls").read_text() == "x\n"
    assert machine.command("no-such-program") is None


def test_files_folders_and_space(tmp_path: Path) -> None:
    machine = Live()
    (tmp_path / "b").write_bytes(b"\xff text")
    assert machine.text(str(tmp_path / "b")) == "\ufffd text"
    assert machine.text(str(tmp_path / "none")) is None
    assert machine.names(str(tmp_path)) == ("b",)
    assert machine.names(str(tmp_path / "none")) == ()
    space = machine.space(str(tmp_path / "not" / "there"))
    assert space is not None
    assert 0 < space.free <= space.total


def test_reaching_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert Live().reach("127.0.0.1", port) == ""
    assert Live().reach("127.0.0.1", port) == "connection refused"


def test_a_recording_answers_as_the_machine_did(bin_folder: Path, tmp_path: Path) -> None:
    program(bin_folder, "nvidia-smi", "printf 'a\\tb  \\nGPU\\n'; exit 6")
    (tmp_path / "f").write_text("one\ntwo\n")
    recorder = Recorder(Live())
    asked = recorder.command("nvidia-smi", "-q")
    recorder.command("no-such-program", "--version")
    recorder.text(str(tmp_path / "f"))
    recorder.variable("NO_SUCH_VARIABLE")
    recorder.space("/")
    recorder.write(tmp_path / "host.yaml")
    again = recording.load(tmp_path / "host.yaml")
    said = again.command("nvidia-smi", "-q")
    assert asked is not None
    assert said is not None
    assert (said.code, said.text.split()) == (6, asked.text.split())
    assert again.text(str(tmp_path / "f")) == "one\ntwo\n"
    assert again.space("/") is not None
    assert again.command("no-such-program", "--version") is None
    assert again.told("no-such-program --version")
    assert again.told("NO_SUCH_VARIABLE")
    assert not again.told("docker info")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("UUID: GPU-bcb96e0b-81bf-9648-8611-af34ef926bae", "UUID: GPU-0"),
        ("    Serial Number                         : 0320317060550", "Serial Number"),
        ("    GPU PDI                    : 0x8d562a11ae80c39", "GPU PDI"),
        ("http://me:secret@proxy:3128", "http://proxy:3128"),
        ("token hf_abcdefghijklmnop", "token hf_0"),
        (" Name: my-server\n ID: ABCD:EFGH", " Name: host\n ID: host"),
        ("link/ether aa:bb:cc:dd:ee:ff", "00:00:00:00:00:00"),
        (f"on {socket.gethostname()}:" if len(socket.gethostname()) > 2 else "host", "host"),
        (str(Path.home() / "runs"), "~/runs"),
    ],
)
def test_what_identifies_is_left_out(text: str, instead: str) -> None:
    assert instead in redact(text)
    for secret in (
        "bcb96e0b",
        "0320317060550",
        "secret",
        "abcdefgh",
        "my-server",
        "EFGH",
        "aa:bb",
        "8d562",
    ):
        assert secret not in redact(text)


def test_of_the_kernel_s_log_and_connections_only_what_is_needed(
    bin_folder: Path, tmp_path: Path
) -> None:
    program(bin_folder, "dmesg", "echo '[1] NVRM: Xid'; echo '[2] usb: serial 1234'")
    recorder = Recorder(Live())
    said = recorder.command("dmesg")
    connections = recorder.text("/proc/net/tcp")
    recorder.write(tmp_path / "host.yaml")
    again = recording.load(tmp_path / "host.yaml")
    kept = again.command("dmesg")
    assert said is not None
    assert kept is not None
    assert ("serial 1234" in said.text, kept.text) == (True, "[1] NVRM: Xid\n")
    lines = (again.text("/proc/net/tcp") or "").splitlines()
    assert connections is not None
    assert all(line.split()[3] in {"0A", "st"} for line in lines if line.strip())


@pytest.mark.parametrize("text", ["", "a: [", "commands: {nvidia-smi: 3}", "unknown: 1", "\x00"])
def test_what_is_no_recording_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        recording.load(path)
    assert "\n" not in caught.value.message
    with pytest.raises(UsageError, match="cannot be read"):
        recording.load(tmp_path / "none.yaml")


def test_the_interpreter_ends_though_a_check_hangs(tmp_path: Path) -> None:
    """A thread that hangs in the kernel must not keep the command from ending."""
    import subprocess

    code = (
        "import threading, sys\n"
        "from verl_p40.doctor.engine import run_checks\n"
        "from verl_p40.doctor.model import Check\n"
        "from verl_p40.doctor.recording import Recorded, Recording\n"
        "hang = lambda machine: threading.Event().wait()\n"
        "check = Check('a', 'g', 't', hang, 0.1, True, True)\n"
        "print(next(run_checks([check], Recorded(Recording()))).outcome.text)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "no answer in 0 s, left alone\n"
