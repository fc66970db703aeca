from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from verl_p40.errors import MachineError
from verl_p40.stack import pins
from verl_p40.stack.pins import Pins

PROJECT = Path(__file__).resolve().parents[3]


def test_every_table_says_why() -> None:
    """pydantic enforces it field by field; here the file is read as people read it."""
    document = pins.read_toml(pins.PINS_FILE)
    document.pop("schema")
    reasons = re.findall(r"why = ", pins.PINS_FILE.read_text())
    packages = len(document["train"]["packages"])
    assert len(reasons) > packages + len(document["release"]) + len(document["index"])


def test_supported_pythons_are_those_of_the_package() -> None:
    project = pins.read_toml(PROJECT / "pyproject.toml")["project"]
    allowed = Requirement(f"x{project['requires-python']}").specifier
    for minor in range(8, 16):
        version = f"3.{minor}"
        assert (version in pins.load().python.supported) == allowed.contains(f"{version}.5")


def test_the_override_contradicts_torch_as_it_says() -> None:
    """If torch's own requirement ever matches, the override has to go."""
    loaded = pins.load()
    declared = next(
        Requirement(line)
        for line in loaded.release["torch-cu118"].requires_dist
        if line.startswith("triton")
    )
    assert not declared.specifier.contains(loaded.flavor["cu118"].overrides["triton"].version)
    assert (
        loaded.packages("cu118")["triton"].version
        == loaded.flavor["cu118"].overrides["triton"].version
    )


def test_a_flavor_adds_to_the_common_packages() -> None:
    loaded = pins.load()
    assert loaded.packages("cpu")["torch"].version == "2.6.0"
    assert loaded.packages("cu118")["torch"].version == "2.6.0+cu118"
    assert loaded.packages("cu118")["ray"].requirement("ray") == "ray[default]==2.47.1"


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"schema": 2}, "schema"),
        ({"uv": {"version": "1", "why": "short"}}, "why"),
        ({"extra_table": {}}, "extra_table"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    broken: dict[str, object], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = pins.read_toml(pins.PINS_FILE) | broken
    monkeypatch.setattr(pins, "read_toml", lambda path: document)
    with pytest.raises(MachineError) as caught:
        pins.load.__wrapped__()
    assert complaint in caught.value.message
    assert "\n" not in caught.value.message


def test_references_between_tables_are_checked() -> None:
    document = pins.read_toml(pins.PINS_FILE)
    document["release"]["verl"]["index"] = "nowhere"
    with pytest.raises(ValueError, match=r"release\.verl names an unknown index"):
        Pins.model_validate(document)
