"""Proofs of patches/verl/cpu: what the real verl needs to train without a GPU."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest


def test_cpu_device_namespace() -> None:
    import torch
    from verl.utils.device import get_torch_device

    device = get_torch_device()
    device.empty_cache()
    before = torch.get_rng_state()
    device.manual_seed(7)
    assert torch.initial_seed() == 7
    torch.set_rng_state(before)
    assert torch.equal(device.get_rng_state(), before)
    # bytes of this process: more than the interpreter alone, less than the machine
    free, total = device.mem_get_info()
    assert 50e6 < device.memory_allocated() <= device.max_memory_allocated() < total
    assert 0 < free <= total
    assert device.get_device_name() == "CPU"
    assert device.is_available() is True


def test_offloaded_model_loads_back_on_the_cpu(worker_config: Any, batch: Any) -> None:
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    config = worker_config("actor_rollout_ref.actor.fsdp_config.param_offload=True")
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout")
    worker.init_model()
    first = worker.compute_log_prob(batch).batch["old_log_probs"]
    second = worker.compute_log_prob(batch).batch["old_log_probs"]
    assert first.shape == (4, 6)
    assert (first == second).all()


def test_workers_start_a_gloo_process_group(worker_config: Any) -> None:
    """In a process of its own: the group of the other tests must not exist yet."""
    script = """
        import os, socket, sys
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
        from omegaconf import OmegaConf
        from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker
        import torch.distributed
        config = OmegaConf.create(sys.stdin.read())
        ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout")
        assert torch.distributed.get_backend() == "gloo"
        torch.distributed.destroy_process_group()
        CriticWorker(config.critic)
        assert torch.distributed.get_backend() == "gloo"
    """
    from omegaconf import OmegaConf

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        input=OmegaConf.to_yaml(worker_config()),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_fsdp_wraps_on_the_cpu(worker_config: Any, model_dir: Any) -> None:
    """Actor, reference and critic are wrapped, on the CPU, with the weights on disk."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from transformers import AutoModelForCausalLM
    from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker

    config = worker_config()
    actor = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor_rollout")
    actor.init_model()
    reference = ActorRolloutRefWorker(worker_config().actor_rollout_ref, role="ref")
    reference.init_model()
    critic = CriticWorker(config.critic)
    critic.init_model()
    stored = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    for module in (actor.actor_module_fsdp, reference.ref_module_fsdp):
        assert isinstance(module, FSDP)
        with FSDP.summon_full_params(module):
            for name, weight in module.state_dict().items():
                assert weight.device.type == "cpu"
                torch.testing.assert_close(weight, stored[name], rtol=0, atol=0)
    assert isinstance(critic.critic_module, FSDP)


def test_timings_are_averaged_with_gloo(worker_config: Any) -> None:
    import torch.distributed
    from verl.utils.debug.performance import reduce_timing
    from verl.workers.fsdp_workers import CriticWorker

    CriticWorker(worker_config().critic)  # starts the process group
    assert torch.distributed.is_initialized()
    assert reduce_timing({"b": 2.0, "a": 1.5}) == {"a": 1.5, "b": 2.0}


@pytest.fixture
def ray_without_gpus() -> Any:
    import ray

    ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def test_resource_pool_without_gpus(ray_without_gpus: Any) -> None:
    from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role

    manager = ResourcePoolManager(
        resource_pool_spec={"pool": [1]}, mapping={Role.ActorRollout: "pool"}, device_name="cpu"
    )
    manager.create_resource_pool()
    (group,) = manager.get_resource_pool(Role.ActorRollout).get_placement_groups()
    assert group.bundle_specs == [{"CPU": 1}]
