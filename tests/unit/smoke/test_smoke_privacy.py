"""Nothing in a report says who or where."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest

from verl_p40.smoke.privacy import Identity, Scrubber

IDENTITY = Identity(
    hosts=("workstation.jane.example", "workstation"),
    users=("Jane Doe", "jane"),
    secrets=("s3cr3t-value",),
    folders=(
        ("/home/jane/verl-p40/.envs/cu118", "<stack>"),
        ("/home/jane/verl-p40", "<verl-p40>"),
        ("/home/jane", "<home>"),
    ),
)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("on workstation.jane.example, WORKSTATION!", "on <host>, <host>!"),
        ("by Jane Doe (jane)", "by <user> (<user>)"),
        ("janet and ajane are others", "janet and ajane are others"),
        ('File "/home/jane/verl-p40/src/x.py", line 3', 'File "<verl-p40>/src/x.py", line 3'),
        ("/home/jane/verl-p40-old/x", "<home>/verl-p40-old/x"),
        ("/home/janet/x", "<path>"),
        (
            "in /home/jane/verl-p40/.envs/cu118/lib/torch/nn.py:12 forward",
            "in <stack>/lib/torch/nn.py:12 forward",
        ),
        ("cannot open '/mnt/disk-of-jane/a b'", "cannot open '<path> b'"),
        ("/data", "<path>"),
        ("~/models/x and ~bob/y", "<path> and <path>"),
        ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"),
        ("3.2 tokens/s, 1/64 rate, and/or", "3.2 tokens/s, 1/64 rate, and/or"),
        ("https://jane:pw@github.com/simple?x=1", "https://github.com"),
        ("http://mirror.corp.example:8080/simple", "<url>"),
        ("GPU-8c1b7a52-6f0e-4f0e-9f5d-0a1b2c3d4e5f lost", "<uuid> lost"),
        ("MIG-8C1B7A52-6F0E-4F0E-9F5D-0A1B2C3D4E5F", "<uuid>"),
        ("GPU at 00000000:3B:00.0 and 3b:00.0", "GPU at <pci> and <pci>"),
        ("Serial Number: 0324617012345", "Serial Number: <serial>"),
        ("from 192.168.7.31:8265", "from <ip>:8265"),
        ("from fe80::1ff:fe23:4567:890a%eth0", "from <ip>%eth0"),
        ("mac 02:42:ac:11:00:02", "mac <mac>"),
        ("HF_TOKEN=hf_abcdefghijklmn", "HF_TOKEN=<secret>"),
        ("token hf_abcdefghijklmn", "token <secret>"),
        ("'api_key': 'abc123'", "'api_key': '<secret>'"),
        ("Authorization: Bearer abc.def-1", "Authorization: bearer <secret>"),
        ("wandb 0123456789abcdef0123456789abcdef01234567", "wandb <secret>"),
        ("mine is s3cr3t-value.", "mine is <secret>."),
        ("mail jane.doe@example.test", "mail <email>"),
        # What a report is for stays.
        ("driver 580.159.04, CUDA 11.8, sm_61, 12:00:55", "driver 580.159.04, CUDA 11.8, sm_61, 12:00:55"),
        ("c10::Error at aten::add", "c10::Error at aten::add"),
        ("sha256 " + "0a" * 32, "sha256 " + "0a" * 32),
        ("FP32 product 512 x 896 x 896: 1.2e-07", "FP32 product 512 x 896 x 896: 1.2e-07"),
    ],
)  # fmt: skip
def test_scrubbing(text: str, clean: str) -> None:
    assert Scrubber(IDENTITY).text(text) == clean


def test_a_document_is_scrubbed_in_its_depths_and_keeps_its_keys() -> None:
    document = {"jane": [{"a": "jane"}, ("workstation", 3, None, True)], "n": 1.5}
    assert Scrubber(IDENTITY).document(document) == {
        "jane": [{"a": "<user>"}, ["<host>", 3, None, True]],
        "n": 1.5,
    }


def test_this_machine_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdefgh-12345")
    monkeypatch.setenv("SUDO_USER", "someone-else")
    identity = Identity.of_this_machine({"runs": tmp_path / "runs"})
    scrubber = Scrubber(identity)
    text = (
        f"{socket.gethostname()} {getpass.getuser()} someone-else {tmp_path / 'runs'}/a/train.log "
        f"abcdefgh-12345 {Path.home()}/x"
    )
    clean = scrubber.text(text)
    for word in (socket.gethostname(), "someone-else", str(tmp_path), "abcdefgh-12345"):
        assert word not in clean
    assert "<runs>/a/train.log" in clean
    assert str(Path.home()) not in clean


def test_the_projects_own_words_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The image's user may be called verl, and a compose service's host smoke."""
    for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME"):
        monkeypatch.setenv(name, "verl")
    monkeypatch.setenv("HOSTNAME", "smoke")
    scrubber = Scrubber(Identity.of_this_machine({}))
    assert scrubber.text("verl 0.4.1 in verl-p40 smoke") == "verl 0.4.1 in verl-p40 smoke"
