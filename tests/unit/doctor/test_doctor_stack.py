"""The stack, settings, model, data and presets checks, on environments made of real small files."""

from __future__ import annotations

import json
import py_compile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl_p40.doctor import State, fits, select
from verl_p40.doctor.checks import models, stack
from verl_p40.doctor.machine import Live, Subject
from verl_p40.doctor.model import Outcome
from verl_p40.doctor.recording import Recorded, Recording
from verl_p40.plan.fit import MIB
from verl_p40.stack import lockfile, paths, pins
from verl_p40.stack.env import StackEnv
from verl_p40.stack.record import EnvRecord
from verl_p40.train import source

NOTHING = Subject()


def ask(check: str, subject: Subject = NOTHING) -> Outcome:
    (found,) = [c for c in select() if c.id == check]
    return found.run(Live(subject))


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StackEnv:
    """An environment with every pinned package's metadata, and a verl of one file."""
    monkeypatch.setenv("VERL_P40_HOME", str(tmp_path / "home"))
    prefix = paths.env_home() / "cpu-py310-0"
    record = EnvRecord(flavor="cpu", python="3.10", lock_digest="0", created="2026-01-01T00:00:00Z")
    found = StackEnv(prefix, prefix / "bin" / "python", record)
    site = found.site_packages
    (site / "verl").mkdir(parents=True)
    (site / "verl" / "__init__.py").write_text("")
    (prefix / "pyvenv.cfg").write_text("")
    (prefix / "bin").mkdir()
    markers = {"python_version": "3.10", "python_full_version": "3.10.0", "sys_platform": "linux"}
    for item in lockfile.parse(lockfile.lock_path(pins.load().flavor["cpu"].lock)):
        if item.applies(markers):
            metadata(site, item.name, item.version)
    monkeypatch.setattr(fits, "stack_env", lambda: found)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return found


def metadata(site: Path, name: str, version: str) -> None:
    for old in site.glob(f"{name.replace('-', '_')}-*.dist-info"):
        (old / "METADATA").unlink()
        old.rmdir()
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_packages_as_pinned_and_not(env: StackEnv) -> None:
    assert ask("packages").state is State.OK
    pinned = pins.load().train.packages["transformers"].version
    metadata(env.site_packages, "transformers", "5.0.0")
    changed = ask("packages")
    assert changed.state is State.FAILURE
    assert changed.text == f"transformers: 5.0.0, pinned {pinned}"
    assert changed.fix == (
        "verl-p40 stack remove --flavor cpu --yes && verl-p40 stack install --flavor cpu",
    )
    metadata(env.site_packages, "torch", "2.6.0+cu118")
    assert "torch" not in ask("packages").text, "another build of the pinned version"


def test_a_package_that_is_gone(env: StackEnv) -> None:
    (folder,) = env.site_packages.glob("tensordict-*.dist-info")
    (folder / "METADATA").unlink()
    folder.rmdir()
    outcome = ask("packages")
    assert (outcome.state, "tensordict: missing" in outcome.text) == (State.FAILURE, True)


def torch_says(env: StackEnv, body: str) -> None:
    env.python.write_text(f"#!/bin/sh\n{body}\n")
    env.python.chmod(0o755)


def arches(env: StackEnv, cuda: str | None, *names: str) -> None:
    answer = json.dumps({"version": "2.6.0", "cuda": cuda, "arches": names})
    torch_says(env, f"echo '{answer}'")


def test_torch_s_architectures(env: StackEnv) -> None:
    arches(env, "11.8", "sm_50", "sm_60", "sm_70", "sm_90")
    fine = ask("torch")
    assert (fine.state, "sm_60" in fine.text) == (State.OK, True), "6.0 code runs on a 6.1 card"
    arches(env, "12.8", "sm_75", "sm_80", "sm_90", "compute_90")
    gone = ask("torch")
    assert (gone.state, "nothing for 6.1" in gone.text) == (State.FAILURE, True)
    arches(env, "12.1", "sm_80", "compute_52")
    assert ask("torch").state is State.OK, "PTX from which the driver compiles"
    arches(env, None)
    assert "no GPU code" in ask("torch").text


def test_a_torch_that_does_not_import(env: StackEnv) -> None:
    torch_says(env, "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    (check,) = [c for c in select() if c.id == "torch"]
    from verl_p40.doctor import run_checks

    (report,) = run_checks([check], Live())
    assert "No module named 'torch'" in report.outcome.text
    assert report.outcome.state is State.WARNING


def test_nothing_shadows(env: StackEnv) -> None:
    assert ask("shadows").text == "nothing does"


def editable(env: StackEnv, tmp: Path) -> None:
    folder = next(iter(env.site_packages.glob("verl-*.dist-info")), None)
    folder = folder or env.site_packages / "verl-0.4.1.dist-info"
    folder.mkdir(exist_ok=True)
    origin = {"url": "file:///src/verl", "dir_info": {"editable": True}}
    (folder / "direct_url.json").write_text(json.dumps(origin))


def finder(env: StackEnv, tmp: Path) -> None:
    (env.site_packages / "__editable___verl_0_4_1_finder.py").write_text("")


def path_file(env: StackEnv, tmp: Path) -> None:
    other = tmp / "checkout"
    (other / "verl").mkdir(parents=True)
    (other / "verl" / "__init__.py").write_text("")
    (env.site_packages / "easy.pth").write_text(f"{other}\n")


def working_directory(env: StackEnv, tmp: Path) -> None:
    (tmp / "verl").mkdir()
    (tmp / "verl" / "__init__.py").write_text("")


def sourceless(env: StackEnv, tmp: Path) -> None:
    file = env.site_packages / "verl" / "old.py"
    file.write_text("x = 1\n")
    py_compile.compile(str(file), cfile=str(file.with_suffix(".pyc")))
    file.unlink()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (editable, "editable install of file:///src/verl"),
        (finder, "__editable___verl_0_4_1_finder.py"),
        (path_file, "easy.pth adds"),
        (working_directory, "working directory has a verl/"),
        (sourceless, "old.pyc without its source"),
    ],
)
def test_what_shadows(
    env: StackEnv, tmp_path: Path, make: Callable[[StackEnv, Path], None], words: str
) -> None:
    make(env, tmp_path)
    outcome = ask("shadows")
    assert (outcome.state, words in outcome.text) == (State.FAILURE, True), outcome.text


def test_another_verl_on_pythonpath(
    env: StackEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    (other / "verl").mkdir(parents=True)
    (other / "verl" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", f"/nowhere:{other}")
    assert ask("shadows").fix == ("unset PYTHONPATH",)


def test_stale_bytecode_is_a_note(env: StackEnv) -> None:
    file = env.site_packages / "verl" / "gone.py"
    file.write_text("x = 1\n")
    py_compile.compile(str(file))
    assert ask("shadows").text == "nothing does"
    file.unlink()
    outcome = ask("shadows")
    assert (outcome.state, outcome.text[:17]) == (State.NOTE, "1 bytecode files ")


def test_an_unpatched_tree(env: StackEnv) -> None:
    outcome = ask("patches")
    assert outcome.state is State.FAILURE
    assert "files differ" in outcome.text


def test_a_tree_that_still_wants_ampere(env: StackEnv) -> None:
    """The audit runs in a process of its own and is read from its JSON."""
    (env.site_packages / "verl" / "worker.py").write_text("import torch\nDTYPE = torch.bfloat16\n")
    outcome = ask("audit")
    assert (outcome.state, outcome.fix) == (State.FAILURE, ("verl-p40 audit",))
    assert "verl/worker.py:2 (half-dtype)" in outcome.text


def test_without_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "stack_env", lambda: None)
    for check in ("packages", "torch", "patches", "audit", "vllm", "shadows"):
        outcome = ask(check)
        assert (outcome.state, outcome.fix) == (State.NA, ("verl-p40 stack install",))
    assert ask("stack-env").state is State.NOTE


def test_no_op_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_MAX_SHARED_MEMORY", "49152")
    outcome = ask("environment")
    assert outcome.state in {State.NOTE, State.WARNING}
    assert any("TRITON_MAX_SHARED_MEMORY" in line for line in outcome.details)


def test_no_op_settings_of_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ask("scripts").state is State.NA
    (tmp_path / "other.sh").write_text("echo hello\n")
    assert ask("scripts").state is State.NA, "it does not start verl"
    script = tmp_path / "train.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo ++actor_rollout_ref.fsdp_config.cpu_offload=true\n"
    )
    found = ask("scripts")
    assert found.state in {State.NOTE, State.WARNING}
    assert "cpu_offload" in " ".join([found.text, *found.details])
    assert any("verl-p40 audit" in line for line in found.fix)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert ask("scripts", Subject(scripts=(str(script),))).state is found.state


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", "81,920 of 49,152"),
        ("Qwen/Qwen2.5-1.5B-Instruct", "131,072 of 49,152"),
    ],
)
def test_a_model_s_head_size(name: str, words: str) -> None:
    outcome = ask("model", Subject(model=name))
    assert words in outcome.text
    assert outcome.facts["prefix_bytes"] == models.PREFIX_BYTES[outcome.facts["head_size"]]


def test_a_model_s_own_config(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 64,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    outcome = ask("model", Subject(model=str(tmp_path)))
    assert (outcome.state, outcome.facts["head_size"]) == (State.NOTE, 32)
    assert "saved as bfloat16" in outcome.text
    assert ask("model", Subject(model=str(tmp_path / "none"))).state is State.NA


def test_data_is_read_by_the_stack(env: StackEnv, tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    file.write_bytes(b"PAR1")
    torch_says(
        env,
        """echo '{"ok": false, "message": "train.parquet: no rows", "fix": "make it"}'; exit 5""",
    )
    bad = ask("data", Subject(data=(str(file),)))
    assert (bad.state, bad.text, bad.fix) == (State.FAILURE, "train.parquet: no rows", ("make it",))
    torch_says(env, """echo '{"ok": true, "rows": 7473}'""")
    assert "7,473 rows" in ask("data", Subject(data=(str(file),))).text


P40 = """| NVIDIA-SMI 535.309.01             Driver Version: 535.309.01   CUDA Version: 12.2     |
|   0  Tesla P40                      On  | 00000000:84:00.0 Off |                    0 |
| N/A   21C    P8              10W / 250W |      0MiB / 23040MiB |      0%      Default |
"""


def presets(text: str, memory_gb: int = 64) -> Outcome:
    files = {"/proc/meminfo": f"MemTotal: {memory_gb * 1_000_000} kB\n"}
    machine = Recorded(
        Recording.model_validate({"commands": {"nvidia-smi": {"text": text}}, "files": files})
    )
    (check,) = select(["presets"])
    return check.run(machine)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of the presets, composed from the real config of verl."""
    folder = source.config_folder(None)
    composed = {n: fits._composed(n, folder) for n in ("cpu-demo", "p40-ppo", "p40x2")}
    monkeypatch.setattr(fits, "configs", lambda: composed)
    fits.plans.cache_clear()


@pytest.mark.usefixtures("planner")
def test_what_this_machine_can_run() -> None:
    outcome = presets(P40)
    assert outcome.state is State.OK
    assert outcome.facts == {"fits": ["cpu-demo", "p40-ppo"], "card_mib": 23040, "cards": 1}
    assert "p40x2: wants 2 card(s)" in outcome.details
    small = presets(P40.replace("23040MiB", "8192MiB").replace("Tesla P40 ", "Tesla P4  "))
    assert small.state is State.WARNING
    assert small.facts["fits"] == ["cpu-demo"]
    assert "too large for the card" in " ".join(small.details)
    assert presets("nothing", memory_gb=2).state is State.FAILURE


def test_without_verl_s_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "plans", lambda card: ())
    assert presets(P40).state is State.NA


def test_the_card_is_the_smallest_of_the_p40s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(fits, "plans", lambda card: asked.append(card) or ())
    second = P40.replace("|   0 ", "|   1 ").replace("23040MiB", "22919MiB")
    presets(P40 + second + P40.replace("|   0  Tesla P40 ", "|   2  Tesla M60 "))
    assert asked == [22919 * MIB]


def test_an_environment_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERL_P40_ENV", str(tmp_path))
    outcome = ask("stack-env")
    assert (outcome.state, "unset VERL_P40_ENV" in outcome.fix[0]) == (State.FAILURE, True)
    assert ask("packages").state is State.NA


def test_one_that_is_named_is_not_removed(env: StackEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_P40_HOME", "/elsewhere")
    metadata(env.site_packages, "transformers", "5.0.0")
    assert ask("packages").fix == ("unset VERL_P40_ENV && verl-p40 stack install --flavor cpu",)


def test_environments_of_another_lock_are_told(env: StackEnv) -> None:
    assert ask("stack-env").state is State.WARNING
    current = lockfile.digest(lockfile.lock_path(pins.load().flavor["cpu"].lock))
    assert stack.ready() is env
    fresh = replace(env, record=env.record.model_copy(update={"lock_digest": current}))
    assert fresh.lock_digest == current
