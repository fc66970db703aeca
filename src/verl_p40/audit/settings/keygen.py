"""Extracts every configuration key of a verl tree: those of its YAML files and those its code reads.

Run by a maintainer when the pin or the queue changes::

    python -m verl_p40.audit.settings.keygen PRISTINE [PATCHED] --output KEYS.json
    python -m verl_p40.audit.settings.keygen --environment VLLM_ VLLM_SOURCE_FOLDER

PRISTINE and PATCHED are anything that ``verl-p40 audit`` reads. The code side follows
configuration objects by their source: ``self.config.actor.get("x")`` in a class whose
``self.config`` is ``actor_rollout_ref`` reads ``actor_rollout_ref.actor.x``. Where each class gets
its config from is in :data:`ROOTS`, read off verl's constructors.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_p40.audit import yamlio
from verl_p40.audit.pyscan import parse
from verl_p40.audit.trees import Tree, open_trees

CONFIGS = {
    "ppo_trainer": "verl/trainer/config/ppo_trainer.yaml",
    "ppo_megatron_trainer": "verl/trainer/config/ppo_megatron_trainer.yaml",
    "sft_trainer": "verl/trainer/config/sft_trainer.yaml",
    "generation": "verl/trainer/config/generation.yaml",
    "evaluation": "verl/trainer/config/evaluation.yaml",
}

_ACTOR = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
_OPTIM = ("actor_rollout_ref.actor.optim",)
_FSDP = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config")
_OTHER_FSDP = ("critic.model.fsdp_config", "reward_model.model.fsdp_config")
_SFT = "verl/trainer/fsdp_sft_trainer.py"
_GENERATION = "verl/trainer/main_generation.py"
_ROLLOUT = ("actor_rollout_ref.rollout",)

ROOTS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    # file, qualname prefix, expression, the keys that the expression stands for
    ("verl/trainer/main_ppo.py", "", "config", ("",)),
    ("verl/trainer/main_ppo.py", "create_rl_dataset", "data_config", ("data",)),
    ("verl/trainer/main_ppo.py", "create_rl_sampler", "data_config", ("data",)),
    ("verl/trainer/ppo/ray_trainer.py", "", "self.config", ("",)),
    ("verl/trainer/ppo/ray_trainer.py", "RayPPOTrainer", "config", ("",)),
    ("verl/trainer/ppo/ray_trainer.py", "compute_advantage", "config", ("algorithm",)),
    ("verl/trainer/ppo/reward.py", "", "config", ("",)),
    ("verl/trainer/ppo/core_algos.py", "compute_grpo_passk_outcome_advantage", "config", ("algorithm",)),
    ("verl/trainer/ppo/core_algos.py", "compute_policy_loss_clip_cov", "config", _ACTOR[:1]),
    ("verl/trainer/ppo/core_algos.py", "compute_policy_loss_kl_cov", "config", _ACTOR[:1]),
    ("verl/trainer/ppo/core_algos.py", "get_kl_controller", "kl_ctrl", ("algorithm.kl_ctrl",)),
    ("verl/workers/fsdp_workers.py", "ActorRolloutRefWorker", "self.config", ("actor_rollout_ref",)),
    ("verl/workers/fsdp_workers.py", "ActorRolloutRefWorker", "config", ("actor_rollout_ref",)),
    ("verl/workers/fsdp_workers.py", "ActorRolloutRefWorker", "fsdp_config", _FSDP),
    ("verl/workers/fsdp_workers.py", "ActorRolloutRefWorker", "optim_config", _OPTIM),
    ("verl/workers/fsdp_workers.py", "AsyncActorRolloutRefWorker", "self.config", ("actor_rollout_ref",)),
    ("verl/workers/fsdp_workers.py", "CriticWorker", "self.config", ("critic",)),
    ("verl/workers/fsdp_workers.py", "CriticWorker", "config", ("critic",)),
    ("verl/workers/fsdp_workers.py", "RewardModelWorker", "self.config", ("reward_model",)),
    ("verl/workers/fsdp_workers.py", "RewardModelWorker", "config", ("reward_model",)),
    ("verl/workers/actor/dp_actor.py", "", "self.config", _ACTOR),
    ("verl/workers/critic/dp_critic.py", "", "self.config", ("critic",)),
    ("verl/workers/rollout/hf_rollout.py", "", "self.config", _ROLLOUT),
    ("verl/workers/rollout/vllm_rollout/vllm_rollout_spmd.py", "", "self.config", _ROLLOUT),
    ("verl/workers/rollout/vllm_rollout/vllm_rollout_spmd.py", "", "config", _ROLLOUT),
    ("verl/workers/rollout/vllm_rollout/vllm_async_server.py", "", "self.config", ("actor_rollout_ref",)),
    ("verl/workers/rollout/vllm_rollout/vllm_async_server.py", "AsyncvLLMServer.init_engine", "config", _ROLLOUT),
    ("verl/workers/rollout/async_server.py", "", "self.config", ("actor_rollout_ref",)),
    ("verl/workers/rollout/chat_scheduler.py", "ChatCompletionScheduler", "self.config", _ROLLOUT),
    ("verl/workers/rollout/chat_scheduler.py", "", "config", ("",)),
    ("verl/workers/rollout/sglang_rollout/sglang_rollout.py", "", "self.config", _ROLLOUT),
    ("verl/workers/rollout/sglang_rollout/sglang_rollout.py", "", "config", _ROLLOUT),
    ("verl/workers/rollout/sglang_rollout/async_sglang_server.py", "", "self.config", ("actor_rollout_ref",)),
    ("verl/workers/megatron_workers.py", "ActorRolloutRefWorker", "self.config", ("actor_rollout_ref",)),
    ("verl/workers/megatron_workers.py", "CriticWorker", "self.config", ("critic",)),
    ("verl/workers/megatron_workers.py", "RewardModelWorker", "self.config", ("reward_model",)),
    ("verl/workers/actor/megatron_actor.py", "", "self.config", _ACTOR),
    ("verl/workers/critic/megatron_critic.py", "", "self.config", ("critic",)),
    ("verl/utils/dataset/rl_dataset.py", "RLHFDataset", "self.config", ("data",)),
    ("verl/utils/dataset/rl_dataset.py", "RLHFDataset", "config", ("data",)),
    ("verl/utils/fsdp_utils.py", "get_fsdp_wrap_policy", "config", tuple(f"{k}.wrap_policy" for k in _FSDP)),
    ("verl/utils/fsdp_utils.py", "apply_fsdp2", "config", _FSDP),
    ("verl/utils/precision.py", "get_compute_dtype", "fsdp_config", (*_FSDP, *_OTHER_FSDP)),
    (_SFT, "", "self.config", ("",)),
    (_SFT, "", "config", ("",)),
    (_GENERATION, "", "config", ("",)),
)  # fmt: skip

PROGRAMS = {"sft_trainer": _SFT, "generation": _GENERATION}
"""Files whose keys belong to another program's config than PPO's."""

_TESTS = {"tests", "examples", "benchmarks", "docs"}
_DICT_METHODS = frozenset({"get", "pop", "keys", "items", "values", "update", "copy", "setdefault"})


def yaml_keys(tree: Tree, path: str) -> dict[str, Any]:
    """Leaf keys of a config file with their defaults; an empty mapping is a leaf ``{}``."""
    leaves: dict[str, Any] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{prefix}.{key}" if prefix else str(key))
        else:
            leaves[prefix] = node

    walk(yamlio.load(tree.read(path)), "")
    leaves.pop("hydra.searchpath", None)
    return leaves


def code_keys(tree: Tree, program: str) -> set[str]:
    """Every dotted key of ``program``'s config that the code of :data:`ROOTS` reads."""
    others = set(PROGRAMS.values())
    wanted = {PROGRAMS[program]} if program in PROGRAMS else {root[0] for root in ROOTS} - others
    keys: set[str] = set()
    for path in sorted(wanted):
        if path in tree.files:
            module = parse(path, tree.read(path))
            for qualname, function in _functions(module, ""):
                names = {
                    expression: roots
                    for file, prefix, expression, roots in ROOTS
                    if file == path and (qualname == prefix or qualname.startswith(f"{prefix}." if prefix else ""))
                }  # fmt: skip
                keys |= _Reader(names).read(function)
    return {key for key in keys if key}


def _functions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")


class _Reader:
    """Follows configuration expressions and their local names through one function."""

    def __init__(self, names: dict[str, tuple[str, ...]]) -> None:
        self._names = dict(names)
        self.keys: set[str] = set()

    def read(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
        for node in _in_source_order(function):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                found = self.resolve(node.value)
                if found and isinstance(target, ast.Name):
                    self._names[target.id] = tuple(found)
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                left = node.left
                if isinstance(left, ast.Constant) and isinstance(left.value, str):
                    for base in self.resolve(node.comparators[0]):
                        self.keys.add(_join(base, left.value))
            if isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
                self.keys.update(self.resolve(node))
        return self.keys

    def resolve(self, node: ast.AST) -> list[str]:
        """The keys that an expression stands for; none when it is no configuration."""
        if isinstance(node, ast.Name | ast.Attribute):
            text = ast.unparse(node)
            if text in self._names:
                return list(self._names[text])
        if isinstance(node, ast.Attribute) and node.attr not in _DICT_METHODS:
            return [_join(base, node.attr) for base in self.resolve(node.value)]
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return [_join(base, str(node.slice.value)) for base in self.resolve(node.value)]
        if isinstance(node, ast.BoolOp):
            return [key for value in node.values for key in self.resolve(value)]
        if isinstance(node, ast.IfExp):
            return self.resolve(node.body) + self.resolve(node.orelse)
        if isinstance(node, ast.Call):
            return self._call(node)
        return []

    def _call(self, node: ast.Call) -> list[str]:
        first = node.args[0] if node.args else None
        key = first.value if isinstance(first, ast.Constant) else None
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in {"get", "pop"}
            and isinstance(key, str)
        ):
            return [_join(base, key) for base in self.resolve(node.func.value)]
        name = ast.unparse(node.func)
        if name in {"OmegaConf.select", "getattr"} and len(node.args) > 1:
            second = node.args[1]
            if (
                isinstance(second, ast.Constant)
                and isinstance(second.value, str)
                and first is not None
            ):
                return [_join(base, second.value) for base in self.resolve(first)]
        if name in {"OmegaConf.to_container", "deepcopy", "dict"} and first is not None:
            return self.resolve(first)
        return []


def _in_source_order(function: ast.AST) -> list[ast.AST]:
    nodes = [node for node in ast.walk(function) if hasattr(node, "lineno")]
    return sorted(nodes, key=lambda n: (n.lineno, n.col_offset))  # type: ignore[attr-defined]


def _join(base: str, key: str) -> str:
    return f"{base}.{key}" if base else key


def generate(pristine: Tree, patched: Tree | None = None) -> dict[str, Any]:
    """The content of the key file: YAML keys with defaults, code keys, and the queue's additions."""
    document: dict[str, Any] = {
        "package": pristine.package,
        "version": pristine.version,
        "yaml": {
            name: yaml_keys(pristine, path)
            for name, path in CONFIGS.items()
            if path in pristine.files
        },
    }
    after = patched or pristine
    document["code"], document["patched"] = {}, {"yaml": {}, "code": {}}
    for name in ("ppo_trainer", *PROGRAMS):
        before = document["yaml"][name]
        code = _unlisted(code_keys(pristine, name), before)
        document["code"][name] = sorted(code)
        yaml_after = yaml_keys(after, CONFIGS[name])
        document["patched"]["yaml"][name] = {
            key: value for key, value in yaml_after.items() if (key, value) not in before.items()
        }
        code_after = _unlisted(code_keys(after, name), before | yaml_after)
        document["patched"]["code"][name] = sorted(code_after - code)
    return document


def _unlisted(keys: set[str], listed: dict[str, Any]) -> set[str]:
    """Code keys that YAML lacks, without YAML's sections and without parts of plain values."""
    sections = {
        ".".join(parts[:depth])
        for key in listed
        for parts in [key.split(".")]
        for depth in range(1, len(parts) + 1)
    }
    values = {key for key, value in listed.items() if value != {}}

    def real(key: str) -> bool:
        parents = [key[:i] for i, char in enumerate(key) if char == "."]
        return not any(parent in values for parent in parents) and not key.rpartition(".")[
            2
        ].startswith("__")

    return {key for key in keys - sections if real(key) and not key.endswith(".0")}


_SOURCES = frozenset(
    {".py", ".pyi", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".cmake", ".txt", ".toml", ".so"}
)


def environment_names(folder: Path, prefix: str) -> list[str]:
    """Names with ``prefix`` that the sources (or shared libraries) under ``folder`` hold."""
    pattern = re.compile(rb"(?<![A-Za-z0-9_])" + prefix.encode() + rb"[A-Z0-9_]*[A-Z0-9](?![a-z])")
    names: set[str] = set()
    for file in folder.rglob("*"):
        if file.suffix in _SOURCES and file.is_file() and not _TESTS & set(file.parts):
            names |= {match.decode() for match in pattern.findall(file.read_bytes())}
    return sorted(names)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--environment", metavar="PREFIX", help="list variable names instead")
    parser.add_argument("pristine", type=Path)
    parser.add_argument("patched", type=Path, nargs="?")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    if options.environment:
        print("\n".join(environment_names(options.pristine, options.environment)))
        return 0
    patched = open_trees(options.patched)[0] if options.patched else None
    document = generate(open_trees(options.pristine)[0], patched)
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
