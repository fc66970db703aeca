"""A compose project for one test: the repository's files in a folder of its own, removed after."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import yaml
from docker.errors import APIError
from docker.models.containers import Container

ROOT = Path(__file__).resolve().parents[2]
FILES = ("docker-compose.yml", "docker-compose.cpu.yml")
REVIEWED = Path(__file__).with_name("reviewed_log_lines.yaml")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_ALARM = re.compile(r"\b(warn(ing)?|error|critical|fatal|traceback|exception)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Images:
    """The images that the Dockerfile gives on the stand-in base."""

    train: str
    monitor: str
    seconds: float
    """What building both took, from whatever the engine's build cache held."""


@dataclass
class Project:
    """``docker compose`` with the CPU overlay (unless ``files`` says otherwise)."""

    folder: Path
    name: str
    engine: docker.DockerClient
    config: Path
    host: str
    files: tuple[str, ...] = FILES
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def environ(self) -> dict[str, str]:
        """No variable of this process reaches Compose but what it needs to run."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return {**kept, "DOCKER_CONFIG": str(self.config), "DOCKER_HOST": self.host}

    def command(self, *arguments: str) -> list[str]:
        files = [word for name in self.files for word in ("-f", name)]
        return ["docker", "compose", "--progress", "plain", "--ansi", "never", *files, *arguments]

    def compose(
        self, *arguments: str, check: bool = True, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            raise AssertionError(
                f"docker compose {' '.join(arguments)}: exit code {done.returncode}\n"
                f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        return done

    def start(self, *arguments: str, log: Path) -> subprocess.Popen[str]:
        """The same in the background, its output in ``log``."""
        with log.open("w") as out:
            process = subprocess.Popen(
                self.command(*arguments),
                cwd=self.folder,
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.started.append(process)
        return process

    def set(self, **values: str) -> None:
        """Change the project's ``.env``."""
        path = self.folder / ".env"
        lines = dict(line.split("=", 1) for line in path.read_text().splitlines())
        lines.update(values)
        path.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))

    def container(self, service: str) -> Container:
        (one,) = self.containers(service)
        return one

    def containers(self, service: str = "") -> list[Container]:
        labels = [f"com.docker.compose.project={self.name}"]
        labels += [f"com.docker.compose.service={service}"] if service else []
        return self.engine.containers.list(all=True, filters={"label": labels})

    def health(self, service: str) -> str:
        """``none`` while the container has not been started yet, ``stopped`` once it has ended: the
        engine calls every container that it no longer checks unhealthy."""
        state = self.container(service).attrs["State"]
        if state["Status"] in ("exited", "dead"):
            return "stopped"
        return str(state.get("Health", {}).get("Status", "none"))

    def exec(self, service: str, *command: str) -> str:
        code, output = self.container(service).exec_run(list(command))
        assert code == 0, output.decode()
        return str(output.decode())

    def logs(self, service: str) -> str:
        return "\n".join(c.logs().decode("utf-8", "replace") for c in self.containers(service))

    def events(self, service: str = "train") -> list[dict[str, Any]]:
        """The events of the only run, read through a container that has the volume."""
        text = self.read("/runs", "events.jsonl", service)
        return [json.loads(line) for line in text.splitlines()]

    def steps(self, service: str = "train") -> list[int]:
        text = self.read("/runs", "metrics.jsonl", service)
        rows = [json.loads(line) for line in text.splitlines()]
        return [row["step"] for row in rows if "actor/lr" in row["data"]]

    def read(self, folder: str, name: str, service: str) -> str:
        """A file of the newest run; empty while it, or the container, is not there."""
        script = f"cat $(ls -td {folder}/*/ | grep -v smoke | head -1){name} 2>/dev/null || true"
        try:
            code, output = self.container(service).exec_run(["sh", "-c", script], stderr=False)
        except APIError as error:
            if error.status_code == 409:  # created, and not running yet (or any more)
                return ""
            raise
        text = str(output.decode()) if code == 0 else ""
        return text[: text.rfind("\n") + 1]  # a line that is being written is not one yet

    def down(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.compose("--profile", "*", "down", "--volumes", "--timeout", "5", check=False)
        for container in self.containers():
            container.remove(force=True)


@contextmanager
def project(
    folder: Path,
    name: str,
    engine: docker.DockerClient,
    config: Path,
    host: str,
    settings: Mapping[str, str],
) -> Iterator[Project]:
    for file in (*FILES, ".env.example"):
        shutil.copy2(ROOT / file, folder / file)
    lines = {"VERL_P40_PROJECT": name, **settings}
    (folder / ".env").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    made = Project(folder, name, engine, config, host)
    try:
        yield made
    finally:
        made.down()


def limits() -> dict[str, str]:
    """What an engine started here may grant: in a sandbox less than the file's defaults."""
    settings = {}
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if files != resource.RLIM_INFINITY and files < 65536:
        settings["VERL_P40_NOFILE"] = str(files)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if locked != resource.RLIM_INFINITY:
        settings["VERL_P40_MEMLOCK"] = str(locked)
    return settings


def wait_for(what: str, done: Callable[[], Any], *, seconds: float, every: float = 0.5) -> Any:
    """The first true value of ``done``; fails with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = done()
        if value:
            return value
        time.sleep(every)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def alarms(log: str) -> list[str]:
    """The lines that speak of a warning or an error and are not on the reviewed list."""
    known = [
        re.compile(entry["pattern"])
        for entry in yaml.safe_load(REVIEWED.read_text(encoding="utf-8"))
    ]
    lines = [_COLOUR.sub("", line).strip() for line in log.splitlines()]
    return [
        line
        for line in lines
        if _ALARM.search(line) and not any(pattern.search(line) for pattern in known)
    ]
