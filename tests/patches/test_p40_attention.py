"""Proofs of patches/verl/p40 on attention: flash-attn is neither demanded nor assumed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest

ATTENTION = pytest.mark.parametrize(
    ("override", "expected"),
    [((), "eager"), (("{}.override_config.attn_implementation=sdpa",), "sdpa")],
    ids=["default", "sdpa"],
)


def overrides(templates: tuple[str, ...], model: str) -> list[str]:
    return ["+" + template.format(model) for template in templates]


@ATTENTION
def test_actor_attention_from_override_config(
    worker_config: Any, override: tuple[str, ...], expected: str
) -> None:
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    config = worker_config(*overrides(override, "actor_rollout_ref.model"))
    for role, attribute in (("actor_rollout", "actor_module_fsdp"), ("ref", "ref_module_fsdp")):
        worker = ActorRolloutRefWorker(config.copy().actor_rollout_ref, role=role)
        worker.init_model()
        model = getattr(worker, attribute)
        assert model.config._attn_implementation == expected


@ATTENTION
def test_critic_attention_from_override_config(
    worker_config: Any, override: tuple[str, ...], expected: str
) -> None:
    from verl.workers.fsdp_workers import CriticWorker

    critic = CriticWorker(worker_config(*overrides(override, "critic.model")).critic)
    critic.init_model()
    assert critic.critic_module.config._attn_implementation == expected


@ATTENTION
def test_reward_model_attention_from_override_config(
    worker_config: Any, value_model_dir: Any, override: tuple[str, ...], expected: str
) -> None:
    from verl.workers.fsdp_workers import RewardModelWorker

    config = worker_config(
        f"reward_model.model.path={value_model_dir}",
        *overrides(override, "reward_model.model"),
    ).reward_model
    config.model.input_tokenizer = None
    worker = RewardModelWorker(config)
    worker.init_model()
    assert worker.reward_module.config._attn_implementation == expected


def run_with_cuda_pretended(body: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process where verl believes in a CUDA card; flash-attn is not installed."""
    script = "import torch\ntorch.cuda.is_available = lambda: True\n" + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )


def test_workers_import_with_cuda_and_without_flash_attn() -> None:
    done = run_with_cuda_pretended(
        """
        import importlib.util
        assert importlib.util.find_spec("flash_attn") is None
        import verl.workers.actor.dp_actor
        import verl.workers.critic.dp_critic
        import verl.workers.fsdp_workers
        """
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_remove_padding_without_flash_attn_says_what_to_do(worker_config: Any) -> None:
    from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

    config = worker_config(
        "actor_rollout_ref.model.use_remove_padding=True", "critic.model.use_remove_padding=True"
    )
    for worker in (
        ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout"),
        CriticWorker(config.critic),
    ):
        with pytest.raises(ImportError, match="use_remove_padding=True needs flash-attn"):
            worker.init_model()


def test_remove_padding_with_a_masked_attention_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With flash-attn there, a model that runs eager would attend across packed sequences."""
    from types import SimpleNamespace

    from verl.utils import attention_utils

    monkeypatch.setattr(attention_utils, "unpad_input", lambda *a: None)
    eager = SimpleNamespace(config=SimpleNamespace(_attn_implementation="eager"))
    with pytest.raises(ValueError, match="this model uses eager"):
        attention_utils.check_remove_padding(eager)
    flash = SimpleNamespace(config=SimpleNamespace(_attn_implementation="flash_attention_2"))
    attention_utils.check_remove_padding(flash)
