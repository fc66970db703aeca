"""A real registry, and `verl-p40 image` as its user calls it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
import registrykit as kit
from commandkit import Command, Done, remove

from verl_p40.cli.main import run
from verl_p40.image import contents as inside
from verl_p40.image import names

BUILD_VARIABLES = (
    *("VERL_P40_BASE_IMAGE", "VERL_P40_FLAVOR", "VERL_P40_PYPI_INDEX", "VERL_P40_TORCH_INDEX"),
    "HF_ENDPOINT",
)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("debian")
    return {
        "registry": kit.program("docker-registry", "usr/bin/docker-registry", folder / "registry"),
        "busybox": kit.program("busybox-static", "bin/busybox", folder / "busybox"),
    }


@pytest.fixture(scope="session")
def registry(programs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with kit.serve(programs["registry"], tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture
def image(
    engine_host: str,
    docker_config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Command:
    """Calls `verl-p40 image`, as its entry point does, without anyone's docker login."""
    own = tmp_path / "docker"
    own.mkdir()
    (own / "config.json").write_text("{}")
    (own / "cli-plugins").symlink_to(docker_config / "cli-plugins")
    for variable in ("DOCKER_CONTEXT", "FORCE_COLOR", *names.VARIABLES.values(), *BUILD_VARIABLES):
        monkeypatch.delenv(variable, raising=False)

    def call(*arguments: str, **environ: str) -> Done:
        with monkeypatch.context() as patch:
            settings = {
                "DOCKER_CONFIG": str(own),
                "DOCKER_HOST": engine_host,
                "NO_COLOR": "1",
                **environ,
            }
            for variable, value in settings.items():
                patch.setenv(variable, value)
            capfd.readouterr()
            with pytest.raises(SystemExit) as ended:
                run(["image", *arguments])
        shown = capfd.readouterr()
        return Done(int(ended.value.code or 0), shown.out, shown.err)

    return call


@pytest.fixture
def name(engine: docker.DockerClient) -> Iterator[Callable[[str], str]]:
    """Names images of a repository of this test; they are removed, and no container is left."""
    repository = f"verl-p40-test/{uuid.uuid4().hex[:12]}"
    try:
        yield lambda registry: f"{registry}/{repository}:1" if registry else f"{repository}:1"
    finally:
        for found in engine.images.list():
            for tag in [*found.tags, *(found.attrs["RepoDigests"] or ())]:
                if repository in tag:
                    remove(engine, tag)
        left = engine.containers.list(all=True, filters={"label": inside.TEMPORARY})
        assert left == [], "a container was left behind"
