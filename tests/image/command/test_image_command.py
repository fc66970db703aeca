"""Push, remove, pull, verify, inspect and run: a real engine, a real registry."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import docker
import pytest
import registrykit as kit
from commandkit import Command, io_tar, on_terminal, refused, remove
from docker.errors import ImageNotFound
from runkit import output

from verl_p40.errors import ExitCode
from verl_p40.image import contents as inside
from verl_p40.patches.queue import load_queue

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


# --- push, pull, run, verify ---------------------------------------------------------------


def test_pushed_removed_pulled_verified_and_run(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    tag = name(registry)
    built = kit.make(engine, programs["busybox"], tag, extra=os.urandom(200_000))
    pushed = image("push", tag, "--json")
    assert pushed.code == 0 and pushed.err == ""
    digest = pushed.document["digest"]
    assert DIGEST.fullmatch(digest)
    assert pushed.document["pinned"] == f"{tag.removesuffix(':1')}@{digest}"

    remove(engine, tag)
    with pytest.raises(ImageNotFound):
        engine.images.get(built)
    refused(image("verify", tag), ExitCode.DATA, "no image", "verl-p40 image pull")

    pulled = image("pull", tag)
    assert pulled.code == 0
    assert f"@{digest}" in pulled.out and f"VERL_P40_IMAGE={tag}" in pulled.out
    layers = re.findall(r"(\w{12}): pull complete.*\((\d) of (\d) layers\)", pulled.err)
    assert [(int(at), int(of)) for _, at, of in layers][-1] == (3, 3), pulled.err
    assert engine.images.get(tag).id == built
    assert "VERL_P40_IMAGE=" not in image("pull", tag, VERL_P40_IMAGE=tag).out
    again = image("pull", tag, "--json")
    assert again.document["digest"] == digest and "up to date" in again.document["status"]

    release = tmp_path / "environment.json"
    release.write_text(json.dumps(kit.environment()))
    for reference in (tag, f"{tag}@{digest}", f"{tag.removesuffix(':1')}@{digest}"):
        verified = image("verify", reference, "--against", str(release))
        assert verified.code == 0, verified
        assert f"is the image that was published: {digest}" in verified.out
        assert verified.out.count("same  ") == 4 and "differs" not in verified.out

    printed = output(engine, tag, network_mode="none")
    assert json.loads(printed) == kit.environment()
    assert output(engine, tag, ["id", "-u"]).strip() == b"1000"


def test_pull_by_digest(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
) -> None:
    tag = name(registry)
    built = kit.make(engine, programs["busybox"], tag)
    digest = image("push", tag, "--json").document["digest"]
    remove(engine, tag)
    pinned = f"{tag.removesuffix(':1')}@{digest}"
    assert image("pull", pinned, "--json").document["digest"] == digest
    assert engine.images.get(pinned).id == built
    assert image("verify", pinned).code == 0
    other = f"{tag.removesuffix(':1')}@sha256:{'0' * 64}"
    refused(image("pull", other), ExitCode.NETWORK, "no ", "in the registry")


def test_the_tag_was_replaced_in_the_registry(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
) -> None:
    """Same tag, other content: what is here is no longer what is published, and the reverse."""
    tag = name(registry)
    kit.make(engine, programs["busybox"], tag, extra=b"as released")
    first = image("push", tag, "--json").document["digest"]
    kit.make(engine, programs["busybox"], tag, extra=b"tampered with")
    here = image("verify", f"{tag}@{first}", "--json")
    assert here.code == ExitCode.FOUND
    (digest_check, *others) = here.document["checks"]
    assert digest_check["name"] == "digest" and not digest_check["ok"]
    assert all(check["ok"] for check in others), "its words are the same: the digest tells"

    second = image("push", tag, "--json").document["digest"]
    assert second != first
    remove(engine, tag)
    assert image("pull", tag).code == 0
    assert image("verify", tag).code == 0
    shown = image("verify", f"{tag}@{first}")
    assert shown.code == ExitCode.FOUND
    assert f"{first} is the one asked for\n    the image here is {second}\n" in shown.out
    assert "NOT the image that was published: 1 difference" in shown.out


def test_an_image_built_here_is_not_the_published_one(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
) -> None:
    tag = name(registry)
    kit.make(engine, programs["busybox"], tag, extra=b"published")
    assert image("push", tag).code == 0
    remove(engine, tag)
    kit.make(engine, programs["busybox"], tag, extra=b"mine")
    done = image("verify", tag)
    assert done.code == ExitCode.FOUND and "built on this machine" in done.out


def test_every_difference_is_named(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    honest = kit.environment()
    queue = honest["patches"][0]
    lying = {**queue, "digest": "f" * 64, "patches": queue["patches"][1:]}
    document = kit.environment(
        flavor="cu118", patches=[lying], packages={"verl": "0.4.1", "torch": "2.5.1"}
    )
    tag = name(registry)
    kit.make(engine, programs["busybox"], tag, document=document, stated=kit.labels(honest))
    assert image("push", tag).code == 0
    release = tmp_path / "environment.json"
    release.write_text(json.dumps(honest))
    done = image("verify", tag, "--against", str(release), "--json")
    assert done.code == ExitCode.FOUND
    found = {check["name"]: check["differences"] for check in done.document["checks"]}
    assert found["digest"] == []
    stated = "\n".join(found["labels"])
    for label in ("flavor is cpu", "torch is 2.6.0", f"patches-digest is {load_queue().digest}"):
        assert f"label io.verl-p40.{label}" in stated
    assert len(found["labels"]) == 3
    assert f"patch {queue['patches'][0]} is not in the image" in found["patches"]
    assert found["environment.json"] == [
        "flavor: cu118, should be cpu",
        f"patches[0].digest: {'f' * 64}, should be {load_queue().digest}",
        f"patches[0].patches: a list of {len(queue['patches']) - 1}, "
        f"should be a list of {len(queue['patches'])}",
        "packages.torch: 2.5.1, should be 2.6.0+cpu",
    ]


def test_another_versions_queue_is_not_compared(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
) -> None:
    tag = name(registry)
    document = kit.environment(verl_p40="9.9.9")
    document["patches"][0]["digest"] = "e" * 64
    kit.make(engine, programs["busybox"], tag, document=document)
    assert image("push", tag).code == 0
    done = image("verify", tag)
    assert done.code == 0
    assert "note  the image is of verl-p40 9.9.9" in done.out


# --- inspect -------------------------------------------------------------------------------


def test_inspect(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    image: Command,
    name: Callable[[str], str],
) -> None:
    tag = name(registry)
    built = kit.make(engine, programs["busybox"], tag, extra=b"0" * 500_000)
    before = image("inspect", tag, "--json").document
    assert before["compressed"] is None and "never pushed" in before["compressed_reason"]
    digest = image("push", tag, "--json").document["digest"]

    found = image("inspect", tag, "--json").document
    assert found["id"] == built and found["tags"] == [tag]
    assert found["digests"] == [f"{tag.removesuffix(':1')}@{digest}"]
    assert (found["user"], found["entrypoint"]) == ("1000:0", ["/bin/busybox"])
    assert found["environment"] == kit.environment()
    assert found["patches_digest"] == load_queue().digest
    assert found["labels"]["io.verl-p40.flavor"] == "cpu"
    assert sum(step["size"] for step in found["steps"]) == found["size"]
    sizes = {step["instruction"].split()[-1]: step for step in found["steps"]}
    assert sizes["/bin/busybox"]["size"] == programs["busybox"].stat().st_size
    assert sizes["/extra"]["size"] == 500_000
    # Half a megabyte of one byte packs to next to nothing: the column is about the right layer.
    assert 0 < sizes["/extra"]["compressed"] < 5_000 < sizes["/bin/busybox"]["compressed"]
    stored = sum(step["compressed"] or 0 for step in found["steps"])
    assert stored == found["compressed"]
    assert [step for step in found["steps"] if step["instruction"].startswith("USER")]

    table = image("inspect", tag).out
    for words in (digest, "1000:0", "torch 2.6.0+cpu", load_queue().digest, "500.0 kB", "download"):
        assert words in table
    assert "\x1b" not in table
    offline = image("inspect", tag, "--local", "--json").document
    assert offline["compressed"] is None and offline["size"] == found["size"]


def test_an_image_of_something_else(
    engine: docker.DockerClient, image: Command, name: Callable[[str], str]
) -> None:
    tag = name("")
    root = io_tar({"hello": b"hello"})
    repository, _, version = tag.partition(":")
    engine.api.import_image_from_data(root, repository=repository, tag=version)
    shown = image("inspect", tag)
    assert shown.code == 0 and "not an image of verl-p40" in shown.out
    refused(image("verify", f"{tag}@sha256:{'0' * 64}"), ExitCode.DATA, "not an image of verl-p40")


@pytest.mark.parametrize(
    ("data", "words"), [(b"{", "not JSON"), (b"[]", "not a JSON object")], ids=["half", "list"]
)
def test_a_damaged_environment_file(
    engine: docker.DockerClient, image: Command, name: Callable[[str], str], data: bytes, words: str
) -> None:
    tag = name("")
    repository, _, version = tag.partition(":")
    root = io_tar({inside.PATH.lstrip("/"): data})
    engine.api.import_image_from_data(root, repository=repository, tag=version)
    refused(image("verify", f"{tag}@sha256:{'0' * 64}"), ExitCode.DATA, words)


def test_bars_on_a_terminal(
    engine: docker.DockerClient,
    programs: dict[str, Path],
    registry: str,
    engine_host: str,
    name: Callable[[str], str],
) -> None:
    tag = name(registry)
    kit.make(engine, programs["busybox"], tag, extra=os.urandom(4 << 20))
    code, out, shown = on_terminal("push", tag, DOCKER_HOST=engine_host)
    assert code == 0
    assert "pushed" in out and DIGEST.search(out)
    assert "\x1b[" in shown and "Pushed" in shown and re.search(r"\d(\.\d)?/\d\.\d MB", shown)


def test_ctrl_c_ends_a_transfer_that_hangs(engine_host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "verl_p40.cli.main", "image", "pull", f"{address}/x:1"],
            env={**os.environ, "DOCKER_HOST": engine_host},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Ignored where a shell started the tests in the background, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        connection, _ = silent.accept()  # the engine asks, and is left waiting
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        connection.close()
    assert (process.returncode, out) == (ExitCode.INTERRUPTED, ""), err
    assert "Traceback" not in err
