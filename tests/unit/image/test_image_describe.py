"""Instructions behind layers, and sizes by step."""

from __future__ import annotations

import pytest

from verl_p40.image.describe import instruction
from verl_p40.image.registry import Stored, is_loopback


@pytest.mark.parametrize(
    ("created_by", "expected"),
    [
        # BuildKit
        ("RUN /bin/sh -c apt-get update # buildkit", "RUN apt-get update"),
        (
            "RUN |2 FLAVOR=cpu INDEX=https://x/y /bin/bash -eo pipefail -c make   all # buildkit",
            "RUN make all",
        ),
        (
            "RUN /bin/bash -eo pipefail -c apt-get update -qq && /bin/sh -c true # buildkit",
            "RUN apt-get update -qq && /bin/sh -c true",
        ),
        ("COPY /opt/verl-p40 /opt/verl-p40 # buildkit", "COPY /opt/verl-p40 /opt/verl-p40"),
        ("USER 1000:0", "USER 1000:0"),
        ('CMD ["service" "train"]', 'CMD ["service" "train"]'),
        # the older builder
        ("/bin/sh -c #(nop)  USER 1000:0", "USER 1000:0"),
        ("/bin/sh -c #(nop) COPY file:73e2 in /bin/busybox ", "COPY file:73e2 in /bin/busybox"),
        ("/bin/sh -c apt-get update", "RUN apt-get update"),
        ("|1 FLAVOR=cpu /bin/sh -c make", "RUN make"),
        # docker import
        ("Imported from -", "Imported from -"),
        ("", ""),
    ],
)
def test_the_instruction_behind_a_layer(created_by: str, expected: str) -> None:
    assert instruction(created_by) == expected


def test_compressed_sizes_go_to_the_steps_that_made_layers() -> None:
    stored = Stored((100, 20), (True, False, True, False))
    assert stored.size == 120
    assert stored.by_step() == [100, None, 20, None]


def test_a_history_that_does_not_fit_its_layers_gives_no_sizes() -> None:
    assert Stored((100, 20), (True, False)).by_step() == []
    assert Stored((100,), ()).by_step() == []


@pytest.mark.parametrize(
    ("registry", "loopback"),
    [
        ("127.0.0.1:5000", True),
        ("localhost:5000", True),
        ("localhost", True),
        ("[::1]:5000", True),
        ("127.1.2.3", True),
        ("192.0.2.1:5000", False),
        ("ghcr.io", False),
        ("localhost.example.org", False),
    ],
)
def test_plain_http_is_for_this_machine_only(registry: str, loopback: bool) -> None:
    assert is_loopback(registry) is loopback
