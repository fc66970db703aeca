"""What the compose files mean, resolved by Compose itself, compared with reviewed results.

A GPU reservation cannot be tried on a machine without the NVIDIA runtime; that the files say the
right thing is what is checked here. After a change on purpose: VERL_P40_GOLDEN=write pytest ...
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from composekit import FILES, REVIEWED, ROOT

from verl_p40 import __version__
from verl_p40.health.check import LIMITS
from verl_p40.image import names
from verl_p40.stack import dockerfile, pins

GOLDEN = Path(__file__).with_name("golden")
GPU, CPU = FILES[:1], FILES

VARIANTS = {
    "gpu": (GPU, {}),
    "cpu": (CPU, {}),
    # A machine behind mirrors, with folders of its own and another uid.
    "build": (
        CPU,
        {
            "VERL_P40_BASE_IMAGE": "registry.local/cuda:11.8",
            "VERL_P40_FLAVOR": "cpu",
            "VERL_P40_PYPI_INDEX": "https://mirror.local/simple",
            "VERL_P40_TORCH_INDEX": "https://mirror.local/cu118",
            "VERL_P40_RUNTIME_PACKAGES": "",
            "VERL_P40_CA_FILE": "/etc/ssl/own-ca.pem",
            "HF_ENDPOINT": "https://hub.local",
            "VERL_P40_UID": "4711",
            "VERL_P40_RUNS": "/mnt/runs",
            "VERL_P40_DATA": "./data",
            "VERL_P40_DATA_MODE": "ro",
            "HF_TOKEN": "only-in-the-container",
        },
    ),
}


def resolve(
    folder: Path, config: Path, files: tuple[str, ...], settings: dict[str, str]
) -> dict[str, Any]:
    for name in FILES:
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".env").write_text("".join(f"{k}={v}\n" for k, v in settings.items()))
    done = subprocess.run(
        ["docker", "compose", *(w for name in files for w in ("-f", name)), "config"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "DOCKER_CONFIG": str(config)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "variable is not set" not in done.stderr
    document = yaml.safe_load(done.stdout.replace(str(folder), "<project>"))
    return {key: value for key, value in document.items() if not key.startswith("x-")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_resolved_as_reviewed(variant: str, tmp_path: Path, docker_config: Path) -> None:
    files, settings = VARIANTS[variant]
    resolved = yaml.safe_dump(resolve(tmp_path, docker_config, files, settings))
    golden = GOLDEN / f"{variant}.yaml"
    if os.environ.get("VERL_P40_GOLDEN") == "write":
        golden.write_text(resolved, encoding="utf-8")
    assert resolved == golden.read_text(encoding="utf-8")


def test_only_the_gpu_variant_reserves_devices(tmp_path: Path, docker_config: Path) -> None:
    def devices(files: tuple[str, ...]) -> dict[str, Any]:
        services = resolve(tmp_path, docker_config, files, {})["services"]
        return {
            name: service["deploy"]["resources"]["reservations"]["devices"]
            for name, service in services.items()
            if "deploy" in service
        }

    found = devices(GPU)
    assert {name: one[0]["capabilities"] for name, one in found.items()} == {
        "train": ["gpu"],
        "smoke": ["gpu"],
        "monitor": ["utility"],
    }
    assert all(one[0]["driver"] == "nvidia" for one in found.values())
    assert devices(CPU) == {}


def variables(text: str) -> dict[str, str]:
    """Every variable that a compose file reads, with its default."""
    return {
        name: default or ""
        for name, default in re.findall(r"\$\{([A-Z0-9_]+)(?::?-([^}]*))?\}", text)
    }


def test_every_knob_is_documented_with_its_default() -> None:
    read = variables((ROOT / FILES[0]).read_text())
    documented = dict(
        re.findall(r"^#([A-Z0-9_]+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    )
    assert set(read) <= set(documented)
    assert {k: v for k, v in documented.items() if k in read and k != "VERL_P40_OVERRIDES"} == {
        k: v for k, v in read.items() if k != "VERL_P40_OVERRIDES"
    }
    # What is passed through env_file, or read by Compose itself.
    assert set(documented) - set(read) == {"COMPOSE_FILE", "HF_TOKEN", *LIMITS}
    assert {name: float(documented[name]) for name in LIMITS} == LIMITS


def test_an_example_that_is_copied_whole_changes_nothing(
    tmp_path: Path, docker_config: Path
) -> None:
    text = (ROOT / ".env.example").read_text()
    settings = dict(re.findall(r"^#([A-Z0-9_]+)=(.*)$", text, re.MULTILINE))
    for name in ("COMPOSE_FILE", "HF_TOKEN", "VERL_P40_OVERRIDES"):
        del settings[name]
    given = resolve(tmp_path, docker_config, GPU, settings)
    plain = resolve(tmp_path, docker_config, GPU, {})
    for service in given["services"].values():
        # env_file hands every line of .env to the containers as well.
        for name in settings.keys() - plain["services"]["train"]["environment"].keys():
            service["environment"].pop(name, None)
    for document in (given, plain):
        for service in document["services"].values():
            del service["environment"]
    assert given == plain


def test_names_and_defaults_are_those_of_the_package(tmp_path: Path, docker_config: Path) -> None:
    services = resolve(tmp_path, docker_config, GPU, {})["services"]
    assert services["train"]["image"] == services["smoke"]["image"] == names.default("train")
    assert services["monitor"]["image"] == names.default("monitor")
    assert services["train"]["image"].endswith(f":{__version__}")
    arguments = services["train"]["build"]["args"]
    text = (ROOT / "Dockerfile").read_text()
    defaults = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    assert {name: defaults[name] for name in arguments} == arguments
    assert not dockerfile.problems(ROOT / "Dockerfile", pins.load())


def test_the_reviewed_log_lines_say_why() -> None:
    for entry in yaml.safe_load(REVIEWED.read_text(encoding="utf-8")):
        assert re.compile(entry["pattern"])
        assert len(entry["why"]) > 20
