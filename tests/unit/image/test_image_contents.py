"""environment.json against labels and against another one."""

from __future__ import annotations

import copy
import io
import tarfile
from typing import Any

import pytest

from verl_p40.errors import DataError
from verl_p40.image import contents

TRAIN: dict[str, Any] = {
    "verl_p40": "0.1.0",
    "revision": "abc",
    "target": "train",
    "flavor": "cu118",
    "base_image": "nvidia/cuda:11.8.0-base-ubuntu22.04@sha256:00",
    "lock": {"file": "train-cu118.txt", "sha256": "11"},
    "patches": [{"project": "verl", "digest": "22", "patches": ["fix/a.patch"]}],
    "packages": {"torch": "2.6.0+cu118", "verl": "0.4.1"},
}
LABELS = {
    "org.opencontainers.image.version": "0.1.0",
    "org.opencontainers.image.revision": "abc",
    "org.opencontainers.image.base.name": "nvidia/cuda:11.8.0-base-ubuntu22.04@sha256:00",
    "io.verl-p40.target": "train",
    "io.verl-p40.flavor": "cu118",
    "io.verl-p40.verl": "0.4.1",
    "io.verl-p40.torch": "2.6.0",
    "io.verl-p40.patches-digest": "22",
    "io.verl-p40.lock-digest": "11",
}
MONITOR = {k: v for k, v in TRAIN.items() if k not in {"lock", "patches"}} | {
    "target": "monitor",
    "packages": {"rich": "14"},
}


def test_labels_that_fit() -> None:
    assert contents.label_differences(LABELS, TRAIN) == []


@pytest.mark.parametrize("label", sorted(LABELS))
def test_a_label_that_does_not(label: str) -> None:
    (found,) = contents.label_differences({**LABELS, label: "9.9"}, TRAIN)
    assert label in found and "9.9" in found


@pytest.mark.parametrize("label", sorted(set(LABELS) - {"io.verl-p40.lock-digest"}))
def test_a_label_that_is_missing(label: str) -> None:
    labels = {key: value for key, value in LABELS.items() if key != label}
    (found,) = contents.label_differences(labels, TRAIN)
    assert label in found and "not set" in found


def test_the_lock_label_may_be_missing() -> None:
    labels = {k: v for k, v in LABELS.items() if k != "io.verl-p40.lock-digest"}
    assert contents.label_differences(labels, TRAIN) == []


def test_neither_side_says_a_thing_that_an_image_has_to() -> None:
    document = {key: value for key, value in TRAIN.items() if key != "patches"}
    labels = {k: v for k, v in LABELS.items() if k != "io.verl-p40.patches-digest"}
    (found,) = contents.label_differences(labels, document)
    assert "patches-digest" in found and "neither" in found


def test_an_image_built_outside_of_git_has_no_revision() -> None:
    document = {**TRAIN, "revision": None}
    assert contents.label_differences({**LABELS, f"{contents.OCI}revision": ""}, document) == []


def test_a_monitor_has_no_verl_to_speak_of() -> None:
    labels = {k: v for k, v in LABELS.items() if k.startswith(contents.OCI)}
    labels["io.verl-p40.target"] = "monitor"
    assert contents.label_differences(labels, MONITOR) == []
    labels["io.verl-p40.verl"] = "0.4.1"
    (found,) = contents.label_differences(labels, MONITOR)
    assert "io.verl-p40.verl" in found


@pytest.mark.parametrize(
    ("stated", "inside", "same"),
    [
        ("2.6.0", "2.6.0+cpu", True),
        ("2.6.0+cpu", "2.6.0+cpu", True),
        ("2.6.0+cu118", "2.6.0+cpu", False),
        ("2.6.1", "2.6.0+cpu", False),
        ("2.6.0", "nonsense", False),
    ],
)
def test_the_torch_label_is_for_every_flavor(stated: str, inside: str, same: bool) -> None:
    document = {**TRAIN, "packages": {**TRAIN["packages"], "torch": inside}}
    found = contents.label_differences({**LABELS, "io.verl-p40.torch": stated}, document)
    assert (found == []) is same


def test_fields_by_name() -> None:
    assert contents.value(TRAIN, "packages.torch") == "2.6.0+cu118"
    assert contents.value(TRAIN, "patches.verl.digest") == "22"
    for field in ("patches.vllm.digest", "packages.torch.x", "nothing.at.all"):
        assert contents.value(TRAIN, field) is None


def test_equal_documents_have_no_differences() -> None:
    assert list(contents.differences(TRAIN, copy.deepcopy(TRAIN))) == []


def test_every_difference_has_its_place() -> None:
    other = copy.deepcopy(TRAIN)
    other["packages"]["torch"] = "2.5.1"
    other["packages"]["ray"] = "2"
    del other["flavor"]
    other["patches"][0]["digest"] = "33"
    other["target"] = ["train"]
    assert sorted(contents.differences(TRAIN, other)) == [
        "flavor: cu118, which should not be there",
        "packages.ray: missing, should be 2",
        "packages.torch: 2.6.0+cu118, should be 2.5.1",
        "patches[0].digest: 22, should be 33",
        "target: train, should be a list of 1",
    ]
    assert list(contents.differences({"a": 1}, {"a": True})) == ["a: 1, should be true"]


def packed(**entry: Any) -> list[bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("environment.json")
        data = entry.pop("data", b"")
        info.size = len(data)
        for name, value in entry.items():
            setattr(info, name, value)
        archive.addfile(info, io.BytesIO(data))
    return [buffer.getvalue()]


def test_the_file_out_of_the_engines_archive() -> None:
    assert contents._only_file(iter(packed(data=b"{}")), "x") == b"{}"


@pytest.mark.parametrize(
    "chunks",
    [
        packed(type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        packed(type=tarfile.DIRTYPE),
        [b"not an archive" * 100],
        [b"\0" * 2**20] * 17,
    ],
    ids=["link", "folder", "rubbish", "huge"],
)
def test_something_else_in_its_place(chunks: list[bytes]) -> None:
    with pytest.raises(DataError):
        contents._only_file(iter(chunks), "x")
