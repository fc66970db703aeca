"""References and the default name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl_p40 import __version__
from verl_p40.errors import UsageError
from verl_p40.image import names
from verl_p40.image.names import Reference, parse

DIGEST = f"sha256:{'0123456789abcdef' * 4}"


@pytest.mark.parametrize(
    ("text", "expected", "repository"),
    [
        ("verl", Reference("docker.io", "library/verl", "latest"), "verl"),
        ("me/verl:1.2-cpu", Reference("docker.io", "me/verl", "1.2-cpu"), "me/verl"),
        ("ghcr.io/a/b/c:1", Reference("ghcr.io", "a/b/c", "1"), "ghcr.io/a/b/c"),
        ("localhost/x", Reference("localhost", "x", "latest"), "localhost/x"),
        ("127.0.0.1:5000/x:1", Reference("127.0.0.1:5000", "x", "1"), "127.0.0.1:5000/x"),
        ("[::1]:5000/x:1", Reference("[::1]:5000", "x", "1"), "[::1]:5000/x"),
        (f"x@{DIGEST}", Reference("docker.io", "library/x", "", DIGEST), "x"),
        (f"r.io/x:1@{DIGEST}", Reference("r.io", "x", "1", DIGEST), "r.io/x"),
        ("docker.io/library/x:1", Reference("docker.io", "library/x", "1"), "x"),
        ("a__b/c-d.e:A_b.c-D", Reference("docker.io", "a__b/c-d.e", "A_b.c-D"), "a__b/c-d.e"),
    ],
)
def test_a_reference(text: str, expected: Reference, repository: str) -> None:
    found = parse(text)
    assert found == expected
    assert found.repository == repository
    assert parse(str(found)) == found


def test_the_digest_picks_before_the_tag() -> None:
    assert parse(f"x:1@{DIGEST}").version == DIGEST
    assert parse("x:1").version == "1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "Verl:1",
        "a//b",
        "a/",
        "/a",
        "a b",
        "a:",
        "a:-x",
        f"a:{'x' * 129}",
        "https://a/b",
        "a@sha256:12",
        f"a@{DIGEST[:-1]}",
        f"a@{DIGEST.upper()}",
        "a@",
        "-a",
        "a..b",
        "r_x.io/a",
    ],
)
def test_no_reference(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in names.VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def test_the_default_is_this_versions_image() -> None:
    assert names.default() == f"{names.IMAGE}:{__version__}"
    assert names.default("train", "cpu") == f"{names.IMAGE}:{__version__}-cpu"
    assert names.default("monitor") == f"{names.IMAGE}:{__version__}-monitor"
    assert names.default("monitor", "cpu") == names.default("monitor")


def test_a_variable_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_P40_IMAGE", "127.0.0.1:5000/mine:2")
    assert names.default() == names.default("train", "cpu") == "127.0.0.1:5000/mine:2"
    assert names.default("monitor") == f"{names.IMAGE}:{__version__}-monitor"
    monkeypatch.setenv("VERL_P40_MONITOR_IMAGE", "mine:monitor")
    assert names.default("monitor") == "mine:monitor"
    monkeypatch.setenv("VERL_P40_IMAGE", "Mine")
    with pytest.raises(UsageError):
        names.default()


def test_compose_uses_the_same_names() -> None:
    """One place says what the image is called; docker-compose.yml has to agree with it."""
    text = (Path(__file__).resolve().parents[3] / "docker-compose.yml").read_text()
    found = dict(re.findall(r"image: \$\{(\w+):-([^}]+)\}", text))
    assert found == {names.VARIABLES[target]: names.default(target) for target in names.VARIABLES}


def test_what_compose_has_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names.compose_needs("train", [f"{names.IMAGE}:{__version__}"]) == ""
    cpu = names.default("train", "cpu")
    assert names.compose_needs("train", [cpu]) == f"VERL_P40_IMAGE={cpu}"
    assert names.compose_needs("monitor", ["mine:1"]) == "VERL_P40_MONITOR_IMAGE=mine:1"
    monkeypatch.setenv("VERL_P40_IMAGE", "mine:1")
    assert names.compose_needs("train", ["other:1", "mine:1"]) == ""
