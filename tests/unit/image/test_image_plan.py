"""What stops a build before it starts, and the command that it becomes.

`docker` here only answers which version and plugins it has, as recorded from real ones; what the
command builds is tests/image/test_image_command.py's.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_p40 import __version__
from verl_p40.errors import ExitCode, MachineError, UsageError
from verl_p40.image import build, names
from verl_p40.image.build import Request, plan
from verl_p40.patches.queue import load_queue
from verl_p40.stack import lockfile, paths

REPOSITORY = Path(__file__).resolve().parents[3]
BUILDX = "github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3"
V20 = "Docker version 20.10.24+dfsg1, build 297e128"
V28 = "Docker version 28.2.2, build e6534b4"

Docker = Callable[..., None]


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for variable in (*build.CA_VARIABLES, *names.VARIABLES.values()):
        monkeypatch.delenv(variable, raising=False)

    def install(version: str, buildx: str = "") -> None:
        with_plugin = f'echo "{buildx}"' if buildx else "echo unknown command >&2; exit 1"
        script = f'#!/bin/sh\ncase "$1" in buildx) {with_plugin};; *) echo "{version}";; esac\n'
        (folder / "docker").write_text(script)
        (folder / "docker").chmod(0o755)

    return install


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    package = folder / "src" / "verl_p40"
    package.mkdir(parents=True)
    (folder / "Dockerfile").write_text("FROM scratch\n")
    (package / "__init__.py").write_text('__version__ = "1.2.3"\n')
    for name in ("patches", "locks"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def option(command: list[str], name: str) -> list[str]:
    return [command[at + 1] for at, word in enumerate(command) if word == name]


def test_the_command(docker: Docker, clone: Path, tmp_path: Path) -> None:
    docker(V28, BUILDX)
    ca = tmp_path / "ca.pem"
    ca.touch()
    made = plan(
        Request(
            flavor="cpu",
            base_image="debian:12",
            pypi_index="https://mirror.example/simple",
            runtime_packages="",
            ca=ca,
            build_args=["HTTPS_PROXY"],
            network="host",
            no_cache=True,
            context=clone,
        )
    )
    assert made.command[:4] == ["docker", "buildx", "build", "--load"]
    assert made.command[-1] == str(clone)
    assert made.tags == option(made.command, "--tag") == [f"{names.IMAGE}:{__version__}-cpu"]
    assert option(made.command, "--target") == ["train"]
    assert option(made.command, "--build-arg") == [
        "FLAVOR=cpu",
        "VERSION=1.2.3",
        f"PATCHES_DIGEST={load_queue().digest}",
        "BASE_IMAGE=debian:12",
        "PYPI_INDEX=https://mirror.example/simple",
        "RUNTIME_PACKAGES=",
        "HTTPS_PROXY",
    ]
    digest = lockfile.digest(paths.locks_dir() / "train-cpu.txt")
    assert option(made.command, "--label") == [f"io.verl-p40.lock-digest={digest}"]
    assert option(made.command, "--secret") == [f"id=ca,src={ca}"]
    assert option(made.command, "--network") == ["host"]
    assert "--no-cache" in made.command and "--pull" not in made.command
    assert option(made.command, "--progress") == ["plain"], "no terminal here"


def test_the_monitor(docker: Docker, clone: Path) -> None:
    docker(V28, BUILDX)
    made = plan(Request(target="monitor", context=clone))
    assert option(made.command, "--target") == ["monitor"]
    assert made.tags == [f"{names.IMAGE}:{__version__}-monitor"]
    assert option(made.command, "--label") == []


def test_the_certificates_of_the_environment(
    docker: Docker, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker(V28, BUILDX)
    assert option(plan(Request(context=clone)).command, "--secret") == []
    (tmp_path / "bundle.pem").touch()
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "bundle.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
    made = plan(Request(context=clone))
    assert option(made.command, "--secret") == [f"id=ca,src={tmp_path / 'bundle.pem'}"]


def test_an_old_docker_has_buildkit_without_buildx(docker: Docker, clone: Path) -> None:
    docker(V20)
    made = plan(Request(context=clone))
    assert made.command[:2] == ["docker", "build"] and "--load" not in made.command
    assert made.environ["DOCKER_BUILDKIT"] == "1"
    docker(V28)
    with pytest.raises(MachineError, match="no buildx plugin"):
        plan(Request(context=clone))


def test_no_docker_command(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(clone))
    with pytest.raises(MachineError, match="docker command is missing") as caught:
        plan(Request(context=clone))
    assert caught.value.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(pypi_index="https://me:secret@mirror.example/simple"), "user or password"),
        (Request(torch_index="https://token@mirror.example"), "user or password"),
        (Request(build_args=["X=https://me:secret@proxy.example"]), "user or password"),
        (Request(hf_endpoint="mirror.example"), "not an address"),
        (Request(build_args=["=x"]), "not a name"),
        (Request(tags=["Upper:1"]), "not an image name"),
        (Request(tags=[f"x@sha256:{'0' * 64}"]), "a build gets a tag"),
        (Request(ca=Path("/nonexistent.pem")), "not a file"),
    ],
)
def test_bad_input(docker: Docker, clone: Path, request_: Request, words: str) -> None:
    docker(V28, BUILDX)
    with pytest.raises(UsageError, match=words) as caught:
        plan(Request(**{**vars(request_), "context": clone}))
    assert "secret" not in caught.value.message


def test_no_dockerfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "site-packages" / "verl_p40")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="installed without its repository") as caught:
        build.find_context(None)
    assert "clone the repository" in caught.value.fix and "image pull" in caught.value.fix
    with pytest.raises(UsageError, match="no Dockerfile in"):
        build.find_context(tmp_path)


def test_a_clone_around_the_working_directory(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "site-packages" / "verl_p40")
    monkeypatch.chdir(clone)
    assert build.find_context(None) == clone


def test_something_else_than_a_clone(docker: Docker, tmp_path: Path) -> None:
    docker(V28, BUILDX)
    (tmp_path / "Dockerfile").touch()
    with pytest.raises(UsageError, match="not a clone of verl-p40"):
        plan(Request(context=tmp_path))


def test_the_revision_tells_of_changes(clone: Path) -> None:
    assert build.revision(clone) is None
    git = ["git", "-C", str(clone), "-c", "user.name=t", "-c", "user.email=t@t.invalid"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    commit = build.revision(clone)
    assert commit and len(commit) == 40
    (clone / "untracked").touch()
    assert build.revision(clone) == commit
    (clone / "Dockerfile").write_text("FROM scratch\nUSER 1\n")
    assert build.revision(clone) == f"{commit}+"
