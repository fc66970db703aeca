"""Finding and downloading a model of the hub. The downloads run in the stack's Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hubserver import COMMIT, Hub, serving

from verl_p40.data import models
from verl_p40.data.model_files import File, wanted
from verl_p40.errors import DataError, DiskError, MachineError, NetworkError
from verl_p40.stack.env import StackEnv
from verl_p40.stack.record import EnvRecord

NAME = "Qwen/Qwen2.5-0.5B-Instruct"
FILES = {
    ".gitattributes": b"*.safetensors lfs",
    "README.md": b"# a model",
    "config.json": b'{"model_type": "qwen2"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "model.safetensors": b"\x01" * 3_000_000,
    "pytorch_model.bin": b"\x02" * 1000,
    "onnx/model.onnx": b"\x03" * 1000,
}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_P40_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(FILES.get(name, b"x"))
    return folder


WHOLE = ("config.json", "tokenizer.json", "model.safetensors")


def test_a_name_of_the_hub_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.is_hub_name(NAME)
    assert models.is_hub_name("gpt2")
    for value in ("/models/x", "./x", "../a/b", "~/models/x", "a/b/c", "hdfs://a/b", "", None, 3):
        assert not models.is_hub_name(value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    assert not models.is_hub_name("models/tiny")


def test_the_cache_is_where_the_hub_s_client_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/x/hf")
    assert models.hub_cache() == Path("/x/hf/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "/y")
    assert models.hub_cache() == Path("/y")
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/z")
    assert models.hub_cache() == Path("/z/huggingface/hub")


@pytest.mark.parametrize("lacks", WHOLE)
def test_what_a_folder_lacks(tmp_path: Path, lacks: str) -> None:
    folder = put(tmp_path / "m", *(name for name in WHOLE if name != lacks))
    assert models.missing(folder) == lacks
    put(folder, lacks)
    assert models.missing(folder) is None


def test_every_shard_has_to_be_there(tmp_path: Path) -> None:
    folder = put(tmp_path, "config.json", "tokenizer.json")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}))
    put(folder, "m-1.safetensors")
    assert models.missing(folder) == "m-2.safetensors"
    put(folder, "m-2.safetensors")
    assert models.missing(folder) is None
    index.write_text("{")
    assert models.missing(folder) == "a readable model.safetensors.index.json"


@pytest.mark.parametrize("place", [NAME, "Qwen2.5-0.5B-Instruct"])
def test_a_mounted_folder_comes_first(tmp_path: Path, place: str) -> None:
    folder = put(tmp_path / "models" / place, *WHOLE)
    found = models.find(NAME)
    assert found == models.Model(NAME, folder, "models")
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"is not a whole model: it has no model\.safetensors"):
        models.find(NAME)


def test_what_transformers_loads_is_downloaded_weights_last() -> None:
    listed = [File(name, len(body)) for name, body in FILES.items()]
    names = [file.name for file in wanted(listed)]
    assert names == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ]
    pickled = [file for file in listed if not file.name.endswith(".safetensors")]
    assert wanted(pickled)[-1].name == "pytorch_model.bin"


@pytest.fixture
def env() -> StackEnv:
    record = EnvRecord(
        flavor="cpu",
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        lock_digest="0" * 64,
        created="2025-01-01T00:00:00Z",
    )
    return StackEnv(Path(sys.prefix), Path(sys.executable), record)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    with serving(Hub({}, {NAME: dict(FILES)})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.mark.stack
def test_a_model_is_downloaded_once(env: StackEnv, hub: Hub, tmp_path: Path) -> None:
    said: list[str] = []
    got = models.ensure(NAME, stack_env=env, progress=lambda text, _: said.append(text))
    assert got.source == "downloaded"
    assert got.folder == tmp_path / "hf" / "hub" / f"models--{NAME.replace('/', '--')}" / (
        f"snapshots/{COMMIT}"
    )
    assert sorted(p.name for p in got.folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (got.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert said[0] == f"downloading {NAME} from {hub.url}"
    hub.requests.clear()
    again = models.ensure(NAME, stack_env=env)
    assert (again.source, again.folder) == ("cache", got.folder)
    assert hub.requests == []


@pytest.mark.stack
def test_a_broken_download_goes_on(env: StackEnv, hub: Hub) -> None:
    hub.models[NAME]["config.json"] += b" " * 10
    hub.break_after = 1_000_000
    got = models.ensure(NAME, stack_env=env)
    assert (got.folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


ASK = """
import sys
from pathlib import Path
from verl_p40.data import models
from verl_p40.stack.env import StackEnv
from verl_p40.stack.record import EnvRecord
record = EnvRecord(flavor="cpu", python="3.10", lock_digest="0" * 64, created="2025-01-01T00:00:00Z")
env = StackEnv(Path(sys.prefix), Path(sys.executable), record)
got = models.ensure(sys.argv[1], stack_env=env, progress=lambda t, f: print(t, flush=True))
print("got", got.source, flush=True)
"""


@pytest.mark.stack
def test_of_two_at_once_one_downloads_and_the_other_says_what_it_waits_for(hub: Hub) -> None:
    both = [
        subprocess.Popen([sys.executable, "-c", ASK, NAME], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = sorted((process.communicate(timeout=120)[0] for process in both), key=len)
    assert "got downloaded" in said[0] + said[1]
    assert "got cache" in said[0] + said[1]
    waited = next(text for text in said if "got cache" in text)
    assert f"another process is downloading {NAME}: waiting for it" in waited
    assert sum("GET" in line and "model.safetensors" in line for line in hub.requests) == 1


@pytest.mark.stack
def test_offline_is_one_line(env: StackEnv, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NetworkError, match=f"HF_HUB_OFFLINE is set and {NAME} is not in") as caught:
        models.ensure(NAME, stack_env=env)
    assert "VERL_P40_MODELS" in caught.value.fix
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(NetworkError, match=r"cannot reach http://127\.0\.0\.1:1: ") as caught:
        models.ensure(NAME, stack_env=env)
    assert "\n" not in caught.value.message
    assert "HF_ENDPOINT" in caught.value.fix and "VERL_P40_MODELS" in caught.value.fix


@pytest.mark.stack
@pytest.mark.parametrize("name", ["Qwen/Qwen9", "Qwen/no-weights"])
def test_a_model_that_the_hub_has_not(env: StackEnv, hub: Hub, name: str) -> None:
    hub.models["Qwen/no-weights"] = {
        name: body for name, body in FILES.items() if "model." not in name
    }
    with pytest.raises(DataError, match=f"{hub.url} has no (public|whole model) {name}"):
        models.ensure(name, stack_env=env)


@pytest.mark.stack
def test_a_model_that_does_not_fit(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import shutil

    from verl_p40.data import model_files

    free = shutil.disk_usage(tmp_path)._replace(free=400_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(DiskError, match=r"needs 1\.0 GB and the disk of .* has 0\.4 GB free"):
        model_files._require_space(NAME, 1_000_000_000)


def test_a_cache_that_cannot_be_written(env: StackEnv, tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("a file")
    with pytest.raises(MachineError, match=f"{NAME} has to be downloaded, and the model cache"):
        models.ensure(NAME, stack_env=env)
