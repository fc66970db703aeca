"""Programs from Debian packages, without changing the system.

The Compose and buildx plugins of Debian 12 are missing or too old; those of Debian 13 need only
its C library's 2.34. They are downloaded with apt, from the machine's own mirror with the suite
changed, into folders of their own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
COMPOSE = (2, 24, 4)
"""The first with ``!reset`` and ``required: false`` for env_file."""


def unpacked(package: str, folder: Path, *, suite: str | None = None) -> Path:
    """The contents of a Debian package, below ``folder``; of another suite where one is named."""
    return all_unpacked([package], folder, suite=suite)


def all_unpacked(
    packages: Sequence[str],
    folder: Path,
    *,
    suite: str | None = None,
    components: str = "main",
) -> Path:
    """The contents of several packages in one folder; ``components`` count with a suite only."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip(f"this is no Debian to get {packages[0]} from")
    folder.mkdir(parents=True, exist_ok=True)
    options: list[str] = []
    if suite is not None:
        options = _other_suite(suite, components, folder)
    done = subprocess.run(
        ["apt-get", *options, "download", *packages], cwd=folder, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"Debian's {packages[0]} cannot be downloaded: {done.stderr[-300:]}")
    root = folder / "root"
    for package in packages:
        (archive,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, root], check=True)
        archive.unlink()
    return root


def _other_suite(suite: str, components: str, folder: Path) -> list[str]:
    """apt's options for the machine's own mirror with another suite; its lists are fetched."""
    if not SOURCES.is_file():
        pytest.skip(f"no {SOURCES} to learn the Debian mirror from")
    first = SOURCES.read_text().split("\n\n")[0]
    text = first
    for key, value in (("Suites", suite), ("Components", components)):
        text = re.sub(rf"^{key}:.*$", f"{key}: {value}", text, flags=re.MULTILINE)
    for name in ("lists/partial", "cache/archives/partial", "sources"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "sources" / "other.sources").write_text(text + "\n")
    options = ["-qq", "-o", "APT::Sandbox::User=root", "-o", "APT::Update::Post-Invoke::="]
    for name, value in {
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": folder / "sources",
    }.items():
        options += ["-o", f"{name}={value}"]
    done = subprocess.run(["apt-get", *options, "update"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"Debian {suite} is out of reach: {done.stderr[-300:]}")
    return options


def plugins(folder: Path) -> Path:
    """A docker configuration folder whose Compose and buildx are new enough; no credentials."""
    target = folder / "docker-config" / "cli-plugins"
    target.mkdir(parents=True)
    for name in ("compose", "buildx"):
        own = Path.home() / ".docker" / "cli-plugins" / f"docker-{name}"
        if _suffices(name):
            if own.is_file():  # not seen through another configuration folder
                shutil.copy2(own, target)
            continue
        root = unpacked(f"docker-{name}", folder / name, suite="trixie")
        (found,) = root.glob(f"usr/libexec/docker/cli-plugins/docker-{name}")
        shutil.copy2(found, target)
    return target.parent


def _suffices(plugin: str) -> bool:
    done = subprocess.run(["docker", plugin, "version"], capture_output=True, text=True)
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", done.stdout) if done.returncode == 0 else None
    if found is None:
        return False
    return plugin != "compose" or tuple(int(part) for part in found.groups()) >= COMPOSE
