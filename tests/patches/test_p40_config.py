"""Proofs of patches/verl/p40 on defaults and on what vLLM is asked for."""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest


def test_rollout_dtype_defaults_to_float32(compose: Any) -> None:
    assert compose().actor_rollout_ref.rollout.dtype == "float32"
    assert compose(name="generation").rollout.dtype == "float32"


def test_no_chunked_prefill_by_default(compose: Any) -> None:
    """And vLLM's condition for that holds: all tokens of the longest sequence in one batch."""
    rollout = compose().actor_rollout_ref.rollout
    assert rollout.enable_chunked_prefill is False
    assert rollout.max_num_batched_tokens >= rollout.prompt_length + rollout.response_length
    assert compose(name="generation").rollout.enable_chunked_prefill is False


def test_actor_is_not_compiled_by_default(worker_config: Any) -> None:
    import torch
    import verl.utils.torch_functional as verl_F
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    config = worker_config().actor_rollout_ref
    assert config.actor.use_torch_compile is False
    assert config.ref.use_torch_compile is False
    # and where the config says nothing, as in older configs
    del config.actor.use_torch_compile
    actor = ActorRolloutRefWorker(config, role="actor_rollout")
    actor.init_model()
    assert actor.actor.compute_entropy_from_logits is verl_F.entropy_from_logits
    # asked for, it is still there
    config = worker_config("actor_rollout_ref.actor.use_torch_compile=True").actor_rollout_ref
    actor = ActorRolloutRefWorker(config, role="actor_rollout")
    actor.init_model()
    assert actor.actor.compute_entropy_from_logits is not verl_F.entropy_from_logits
    torch.compiler.reset()


class Refused(Exception):
    """Stops the construction once vLLM has been asked: nothing after that is under test."""


@pytest.fixture
def vllm_asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keyword arguments that verl passes to vLLM's LLM and AsyncEngineArgs.

    vLLM is not in the CPU stack; the stand-in takes down what it is asked for and stops there.
    """
    asked: dict[str, Any] = {}

    def take_down(**kwargs: Any) -> None:
        asked.update(kwargs)
        raise Refused

    class Anything(ModuleType):
        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (MagicMock,), {})

    for name in (
        "vllm",
        "vllm.distributed",
        "vllm.engine",
        "vllm.engine.arg_utils",
        "vllm.entrypoints",
        "vllm.entrypoints.logger",
        "vllm.entrypoints.openai",
        "vllm.entrypoints.openai.protocol",
        "vllm.entrypoints.openai.serving_chat",
        "vllm.entrypoints.openai.serving_models",
        "vllm.lora",
        "vllm.lora.request",
        "vllm.v1",
        "vllm.v1.engine",
        "vllm.v1.engine.async_llm",
        "vllm.v1.executor",
        "vllm.v1.executor.abstract",
        "vllm.worker",
        "vllm.worker.worker_base",
        "cachetools",  # these come with vLLM
        "fastapi",
        "openai",
        "openai.types",
        "openai.types.chat",
        "openai.types.chat.chat_completion",
        "starlette.requests",
        "starlette.responses",
        "uvicorn",
    ):
        module = Anything(name)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm"].LLM = take_down  # type: ignore[attr-defined]
    sys.modules["vllm"].SamplingParams = lambda **kwargs: object()  # type: ignore[attr-defined]
    sys.modules["vllm.engine.arg_utils"].AsyncEngineArgs = take_down  # type: ignore[attr-defined]

    real_version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "0.8.5.post1" if name == "vllm" else real_version(name),
    )
    for name in [m for m in sys.modules if "vllm" in m and m.startswith("verl.")]:
        monkeypatch.delitem(sys.modules, name)
    return asked


def ask_for_a_rollout(config: Any) -> None:
    """Make verl's synchronous rollout, as far as what it asks vLLM for."""
    from transformers import AutoConfig
    from verl.workers.fsdp_workers import CriticWorker

    CriticWorker(config.critic)  # starts the process group that the rollout asks about

    from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout

    with pytest.raises(Refused):
        vLLMRollout(
            model_path=config.actor_rollout_ref.model.path,
            config=config.actor_rollout_ref.rollout,
            tokenizer=None,
            model_hf_config=AutoConfig.from_pretrained(config.actor_rollout_ref.model.path),
        )


@pytest.mark.parametrize("setting", [None, True, False])
def test_prefix_caching_from_the_config(
    worker_config: Any, vllm_asked: dict[str, Any], setting: bool | None
) -> None:
    overrides = (
        [] if setting is None else [f"actor_rollout_ref.rollout.enable_prefix_caching={setting}"]
    )
    config = worker_config("actor_rollout_ref.rollout.name=vllm", *overrides)

    ask_for_a_rollout(config)
    assert vllm_asked.pop("enable_prefix_caching") is bool(setting)
    assert vllm_asked.pop("dtype") == "float32"

    from verl.workers.rollout.vllm_rollout.vllm_async_server import AsyncvLLMServer

    server_class = AsyncvLLMServer.__ray_metadata__.modified_class
    server = object.__new__(server_class)
    server.config, server.vllm_dp_rank = config.actor_rollout_ref, 0
    with pytest.raises(Refused):
        asyncio.run(server.init_engine())
    assert vllm_asked["enable_prefix_caching"] is bool(setting)
    assert vllm_asked["dtype"] == "float32"


@pytest.mark.parametrize("eager", [True, False])
def test_cuda_graphs_by_one_setting(
    worker_config: Any, vllm_asked: dict[str, Any], eager: bool
) -> None:
    """free_cache_engine stays at its default, which frees nothing with this vLLM."""
    config = worker_config(
        "actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.rollout.enforce_eager={eager}"
    )
    assert config.actor_rollout_ref.rollout.free_cache_engine

    ask_for_a_rollout(config)
    assert vllm_asked["enforce_eager"] is eager
    assert vllm_asked["enable_sleep_mode"] is True
