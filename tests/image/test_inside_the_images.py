"""What is inside the images that the Dockerfile gives."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import docker
import pytest
from composekit import Images
from runkit import output

from verl_p40.errors import ExitCode
from verl_p40.image import contents
from verl_p40.patches.queue import load_queue
from verl_p40.stack import lockfile, pins

ANYBODY = "31337:0"
"""A user that the image does not know, in group 0."""


def inside(
    engine: docker.DockerClient,
    image: str,
    *command: str,
    user: str = ANYBODY,
    fails: bool = False,
) -> str:
    """Standard output of a command; ``fails`` lets it end with any exit code."""
    words = ["sh", "-c", '"$@"; true', "sh", *command] if fails else list(command)
    printed = output(engine, image, words, user=user, network_mode="none", cap_drop=["ALL"])
    return printed.decode()


def environment(engine: docker.DockerClient, image: str) -> dict[str, Any]:
    text = inside(engine, image, "cat", "/opt/verl-p40/environment.json")
    return dict(json.loads(text))


@pytest.mark.parametrize("target", ["train", "monitor"])
def test_labels_user_and_init(engine: docker.DockerClient, images: Images, target: str) -> None:
    image = engine.images.get(getattr(images, target))
    config = image.attrs["Config"]
    assert config["User"] == "1000:0"
    options = ["-s"] if target == "monitor" else []
    assert config["Entrypoint"] == ["/usr/bin/tini", *options, "--"]
    document = environment(engine, image.id)
    labels = config["Labels"]
    assert labels["io.verl-p40.target"] == document["target"] == target
    assert labels["org.opencontainers.image.version"] == document["verl_p40"]
    if target == "train":
        assert labels["io.verl-p40.patches-digest"] == load_queue().digest
        assert document["patches"][0]["digest"] == load_queue().digest
        assert document["lock"]["sha256"] == lockfile.digest(lockfile.lock_path("train-cpu.txt"))
        wanted = {name: pin.version for name, pin in pins.load().train.packages.items()}
        assert {n: document["packages"][n] for n in wanted} == wanted
        assert {"sm_60", "sm_70"} <= set(document["torch_architectures"])
    else:
        assert not {"torch", "verl", "ray", "uv", "setuptools"} & document["packages"].keys()


def test_labels_and_contents_agree(engine: docker.DockerClient, images: Images) -> None:
    for name in (images.train, images.monitor):
        labels = engine.images.get(name).attrs["Config"]["Labels"]
        assert contents.label_differences(labels, contents.read(engine, name)) == []


def test_the_patched_stack_is_whole_for_an_unknown_user(
    engine: docker.DockerClient, images: Images
) -> None:
    script = (
        "import getpass, os, tempfile, pathlib, torch, ray, verl, transformers\n"
        "import torch._inductor.runtime.cache_dir_utils as c\n"
        "import verl.trainer.main_ppo, verl.workers.fsdp_workers\n"
        "assert os.getuid() == 31337, os.getuid()\n"
        "c.cache_dir(); getpass.getuser(); pathlib.Path.home().joinpath('x').write_text('x')\n"
        "print(torch.__version__, verl.__version__, '\\nwhole')\n"
    )
    assert inside(engine, images.train, "python", "-W", "ignore", "-c", script).endswith("whole\n")
    status = inside(engine, images.train, "verl-p40", "patches", "status")
    assert "patched" in status


def test_the_audit_of_the_build_would_have_failed_without_the_patches(
    engine: docker.DockerClient, images: Images
) -> None:
    script = (
        "mkdir /tmp/site && cp -r /opt/verl-p40/lib/python3.*/site-packages/verl /tmp/site"
        " && verl-p40 audit /tmp/site/verl >/dev/null"
        " && verl-p40 patches revert /tmp/site >/dev/null"
        " && { verl-p40 audit /tmp/site/verl | tail -3; exit ${PIPESTATUS[0]}; }"
    )
    with pytest.raises(docker.errors.ContainerError) as failed:
        inside(engine, images.train, "bash", "-c", script)
    assert failed.value.exit_status == ExitCode.FOUND


def test_the_user_owns_only_what_it_must(engine: docker.DockerClient, images: Images) -> None:
    writable = inside(
        engine,
        images.train,
        *(
            "bash",
            "-c",
            "find / -xdev -writable -not -type l -not -path '/proc/*' 2>/dev/null; true",
        ),
        user="1000:0",
    ).splitlines()
    mine = (
        "/home/verl",
        "/cache",
        "/data",
        "/models",
        "/runs",
        "/tmp",
        "/var/tmp",
        "/dev",
        "/run/lock",
    )
    assert not [path for path in writable if not path.startswith(mine)]
    special = inside(
        engine, images.train, "find", "/opt", "-xdev", "-perm", "/6000", "-not", "-type", "d"
    )
    assert not special.strip()


def test_no_secret_and_no_leftover_in_any_layer(
    engine: docker.DockerClient, images: Images, tmp_path: Path
) -> None:
    for name in (images.train, images.monitor):
        history = json.dumps(engine.images.get(name).history())
        for word in ("BEGIN CERTIFICATE", "/etc/ssl/certs", str(Path.home()), "HF_TOKEN"):
            assert word not in history
        left = inside(
            engine,
            name,
            *("find", "/run/secrets", "/var/cache/uv", "/root", "/build", "/src", "/dist"),
            *("-mindepth", "1", "-not", "-name", ".bashrc", "-not", "-name", ".profile"),
            user="0:0",
            fails=True,
        )
        assert not left.strip(), left
    assert not inside(engine, images.train, "bash", "-c", "command -v uv pip gcc; true").strip()


def test_half_built_stays_unbuilt(
    engine: docker.DockerClient, engine_host: str, docker_config: Path, base_image: str
) -> None:
    """A label that would lie ends the build, with what to do."""
    done = subprocess.run(
        ["docker", "build", "--progress", "plain", "--target", "monitor",
         "--build-arg", f"BASE_IMAGE={base_image}", "--build-arg", "FLAVOR=cpu",
         "--build-arg", "PATCHES_DIGEST=0123", "--tag", "verl-p40-test/wrong:dev", "."],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "DOCKER_HOST": engine_host, "DOCKER_CONFIG": str(docker_config),
             "DOCKER_BUILDKIT": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode != 0
    assert "PATCHES_DIGEST is 0123" in done.stderr and "nox -s lock" in done.stderr
    assert not engine.images.list("verl-p40-test/wrong")
