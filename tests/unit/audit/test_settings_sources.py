"""What the settings rules say about verl and vLLM, read again in their released sources."""

from __future__ import annotations

import ast
import json
import re
import tarfile
from importlib.resources import files
from pathlib import Path

import pytest

from verl_p40.audit.settings import keygen, keys
from verl_p40.audit.settings.model import SettingRule, rule_book
from verl_p40.audit.settings.paths_check import release_files
from verl_p40.audit.trees import Tree, open_trees

CITED = re.compile(r"((?:verl|vllm)/[\w/]+\.py)(?::(\d+))?")


@pytest.fixture(scope="module")
def sources(verl: Tree, vllm_sdist: Path) -> dict[str, list[str]]:
    """Lines of every Python file of both releases."""
    lines: dict[str, list[str]] = {}
    for tree in (verl, open_trees(vllm_sdist)[0]):
        for path in tree:
            if path.endswith(".py"):
                lines[path] = tree.read(path).decode("utf-8", "replace").splitlines()
    return lines


@pytest.mark.parametrize("rule", rule_book().rules, ids=lambda rule: rule.id)
def test_cited_lines_say_what_the_rule_says(
    rule: SettingRule, sources: dict[str, list[str]]
) -> None:
    cited = CITED.findall(rule.source)
    for path, _ in cited:
        assert path in sources, path
    numbered = [(path, int(line)) for path, line in cited if line]
    if numbered:
        path, line = numbered[0]
        assert rule.says, "a rule that cites a line says what stands there"
        assert rule.says in sources[path][line - 1]


def test_key_file_is_what_the_sources_give(verl: Tree, patched: Path) -> None:
    """Regenerate with: python -m verl_p40.audit.settings.keygen PRISTINE PATCHED --output ..."""
    shipped = json.loads(
        (files("verl_p40.audit.settings") / "data" / "verl-0.4.1-keys.json").read_text("utf-8")
    )
    made = keygen.generate(verl, open_trees(patched)[0])
    assert json.loads(json.dumps(made)) == shipped


def test_keys_of_the_code_are_found() -> None:
    """A sample read by eye in verl's sources, one of each way that code reads a key."""
    known = keys.load()
    for key in (
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",  # through two locals
        "actor_rollout_ref.ref.fsdp_config.model_dtype",  # through an argument
        "critic.optim.betas",
        "data.gen_batch_size",  # .get on a section
        "custom_reward_function.reward_kwargs",
        "trainer.remove_previous_ckpt_in_save",
        "algorithm.pf_ppo_reweight_method",
        "actor_rollout_ref.rollout.limit_images",
        "reward_model.truncation",
    ):
        assert known.read(key), key
        assert not known.in_yaml(key), key
    assert not known.known("actor_rollout_ref.fsdp_config.cpu_offload")
    assert keys.load("sft_trainer").known("model.fsdp_config.cpu_offload")


def test_keys_said_to_be_unread_are_named_in_no_reader(sources: dict[str, list[str]]) -> None:
    rollout = "\n".join(
        line
        for path, lines in sources.items()
        if path.startswith("verl/") and "third_party/vllm/vllm_v_" not in path
        for line in lines
    )
    for name in ("max_num_seqs", "return_raw_input_ids"):
        assert not re.search(rf"\b{name}\b", rollout), name


def test_sampling_parameters_are_those_of_vllm(sources: dict[str, list[str]]) -> None:
    module = ast.parse("\n".join(sources["vllm/sampling_params.py"]))
    (body,) = [
        n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == "SamplingParams"
    ]
    fields = {
        node.target.id
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    public = {name for name in fields if not name.startswith("_")}
    assert public - {"output_text_buffer_length"} == keys.SAMPLING


@pytest.fixture(scope="module")
def vllm_folder(vllm_sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    with tarfile.open(vllm_sdist) as archive:
        for member in archive:
            # The sdist is pinned by hash; only plain files below the folder are taken.
            if member.isfile() and ".." not in member.name and not member.name.startswith("/"):
                archive.extract(member, folder)
    return folder


def test_vllm_variables(vllm_folder: Path, sources: dict[str, list[str]]) -> None:
    families = {family.prefix: family for family in rule_book().environments}
    named = set(keygen.environment_names(vllm_folder, "VLLM_"))
    listed = set(families["VLLM_"].names)
    declared = set(re.findall(r'"(VLLM_[A-Z0-9_]+)":', "\n".join(sources["vllm/envs.py"])))
    assert len(declared) > 80
    assert declared <= listed  # nothing that vLLM reads is called a no-op
    assert listed <= named
    assert "VLLM_DTYPE" not in named
    for rule in rule_book().rules:  # what has a rule of its own as a no-op is not read either
        if rule.id == "vllm-dtype":
            assert not any(re.fullmatch(rule.env, name) for name in named)


def test_verl_variables(unpatched: Path, patched: Path) -> None:
    (family,) = [f for f in rule_book().environments if f.prefix == "VERL_"]
    named = {
        name for tree in (unpatched, patched) for name in keygen.environment_names(tree, "VERL_")
    }
    assert named == set(family.names)


def test_release_files_are_those_of_the_wheel(verl: Tree) -> None:
    assert {path for path in verl if path.endswith((".py", ".yaml"))} <= release_files()
    assert "verl/trainer/main_ppo.py" in release_files()
    assert not any(path.endswith("modeling/llm.py") for path in release_files())
