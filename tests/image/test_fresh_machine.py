"""The newcomer's trial: a bare machine, a clone, and the two commands of the README.

The machine is a container made from a minimal Debian root: python3 and git, no pip, no venv
module, no compiler. The commands are read from the README between ``<!-- newcomer: NAME -->``
and the end of the code block that follows, and run by an ordinary user in a fresh clone of the
committed state.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container

REPOSITORY = Path(__file__).resolve().parents[2]


def readme_command(name: str) -> str:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"<!-- newcomer: {name} -->\s*```(?:sh|console)\n(.+?)```", text, re.DOTALL)
    assert found, f"README.md marks no command 'newcomer: {name}'"
    (command,) = found.group(1).strip().splitlines()
    return command


@dataclass
class Newcomer:
    """An ordinary user in a container, standing in a fresh clone."""

    container: Container

    def run(self, command: str) -> str:
        """Run a command, show its output as it comes, return it; fails on a non-zero exit."""
        api = self.container.client.api
        started = time.monotonic()
        execution = api.exec_create(
            self.container.id,
            ["/bin/sh", "-c", command],
            user="newcomer",
            workdir="/home/newcomer/verl-p40",
            environment={"HOME": "/home/newcomer", "LANG": "C.UTF-8"},
        )["Id"]
        output = []
        for chunk in api.exec_start(execution, stream=True):
            text = chunk.decode(errors="replace")
            output.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
        code = api.exec_inspect(execution)["ExitCode"]
        print(f"\n[newcomer] {command!r}: exit {code} after {time.monotonic() - started:.0f} s")
        assert code == 0
        return "".join(output)


@pytest.fixture(scope="module")
def newcomer(
    engine: docker.DockerClient,
    bare_debian: str,
    network_environment: tuple[dict[str, str], dict[str, dict[str, str]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Newcomer]:
    bundle = tmp_path_factory.mktemp("clone") / "verl-p40.bundle"
    git = ["git", "-C", str(REPOSITORY), "-c", f"safe.directory={REPOSITORY}"]
    subprocess.run([*git, "bundle", "create", "-q", str(bundle), "HEAD"], check=True)
    bundle.chmod(0o644)
    environment, volumes = network_environment
    container = engine.containers.run(
        bare_debian,
        ["sleep", "infinity"],
        detach=True,
        init=True,
        shm_size="2g",
        environment=environment,
        volumes={**volumes, str(bundle): {"bind": "/verl-p40.bundle", "mode": "ro"}},
        labels={"verl-p40-test": "newcomer"},
    )
    try:
        for command in (
            "useradd --create-home newcomer",
            "su newcomer -c 'git clone -q /verl-p40.bundle /home/newcomer/verl-p40'",
        ):
            code, output = container.exec_run(["/bin/sh", "-c", command])
            assert code == 0, output.decode()
        yield Newcomer(container)
    finally:
        container.remove(force=True, v=True)


def test_nothing_is_installed_beforehand(newcomer: Newcomer) -> None:
    out = newcomer.run(
        "python3 --version; python3 -c 'import pip' 2>&1 | tail -1; "
        "python3 -c 'import ensurepip' 2>&1 | tail -1; command -v gcc uv nox pip || echo none"
    )
    assert "No module named 'pip'" in out
    assert "No module named 'ensurepip'" in out
    assert out.rstrip().split("\n[newcomer]")[0].endswith("none")


def test_the_first_command_trains(newcomer: Newcomer) -> None:
    """Reward and greedy accuracy rise, and the run folder holds what the end says."""
    out = newcomer.run(readme_command("train"))
    extend = re.search(r"^extend +(.+?)\r?$", out, re.MULTILINE)
    assert extend
    assert "would resume from step 60" in newcomer.run(f"{extend.group(1)} --dry-run")
    found = newcomer.run("ls -d runs/*/ && cat runs/*/metrics.jsonl")
    records = [json.loads(line) for line in found.splitlines() if line.startswith("{")]
    accuracy = [
        value
        for record in records
        for key, value in record["data"].items()
        if key.startswith("val-core/") and key.endswith("mean@1")
    ]
    assert accuracy[0] < 0.4
    assert accuracy[-1] > 0.8


def test_the_second_command_passes_the_tests(newcomer: Newcomer) -> None:
    newcomer.run(readme_command("test"))
