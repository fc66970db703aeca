"""The precision tripwire on real runs: silent on our verl, loud on the one without our patches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from conftest import START, Cli

from verl_p40.patches.queue import load_queue
from verl_p40.patches.release import unpack_pinned
from verl_p40.patches.tree import apply_queue
from verl_p40.stack import paths
from verl_p40.train.compose import assign, to_yaml
from verl_p40.train.process import make_ray_tmp, remove_ray_tmp
from verl_p40.tripwire import ARM_MODULE, record


def test_patched_verl_trains_without_half_precision(cli: Cli) -> None:
    """Rollout, reference, critic and actor, backward, optimizer, save and validation."""
    done = cli.run(str(cli.preset), "trainer.total_training_steps=2", "--tripwire", "--json")
    assert done.returncode == 0, done.stdout
    document = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert document["status"] == "finished"
    assert document["step"] == 2
    assert document["tripwire_operators"] > 10_000


def test_a_half_precision_rollout_ends_the_run(cli: Cli) -> None:
    done = cli.run(str(cli.preset), "actor_rollout_ref.rollout.dtype=bfloat16", "--tripwire")
    assert done.returncode == 10, done.stdout
    assert "half precision in rollout: aten." in done.stdout
    assert "bfloat16[" in done.stdout
    assert "verl/workers/rollout/hf_rollout.py:" in done.stdout


def test_verl_without_the_precision_patches_trips_it(cli: Cli, tmp_path: Path) -> None:
    """The pinned release with nothing but CPU support and upstream's bugs fixed.

    GRPO, because without our patches the critic takes no other attention than FlashAttention-2.
    """
    tree = unpack_pinned("verl", tmp_path / "tree")
    apply_queue(tree, load_queue(), groups=["fix", "cpu"])
    grpo = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true"]
    plan = cli.run(str(cli.preset), *grpo, "--dry-run", "--json")
    assert plan.returncode == 0, plan.stdout
    document = json.loads(plan.stdout[plan.stdout.index("{\n") :])
    config = document["config"]
    model = config["actor_rollout_ref"]["model"]
    model["external_lib"] = ARM_MODULE
    # Upstream's only way to another attention for the actor is this private name.
    model["override_config"] = {"_attn_implementation": "eager"}
    # Our presets name FP32 wherever verl has a setting for it: upstream's own defaults here.
    for role in ("actor", "ref"):
        fsdp = config["actor_rollout_ref"][role]["fsdp_config"]
        fsdp.pop("model_dtype")
        fsdp.pop("mixed_precision")
    run = tmp_path / "run"
    run.mkdir()
    assign(config, "trainer.default_local_dir", str(run / "checkpoints"))
    (run / "config.yaml").write_text(to_yaml(config))
    ray_tmp = make_ray_tmp()
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(run),
         "--config-name", "config", f"hydra.run.dir={run}/hydra"],
        cwd=tmp_path,
        env={
            **os.environ,
            **document["env"],
            "RAY_TMPDIR": str(ray_tmp),
            "VERL_P40_TRIPWIRE_DIR": str(run),
            "PYTHONPATH": os.pathsep.join([str(tree), str(paths.package_dir().parent)]),
        },
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=START,
    )  # fmt: skip
    remove_ray_tmp(ray_tmp)
    trip = record.read_trip(run)
    assert trip is not None, done.stdout[-4000:]
    assert done.returncode != 0
    assert any(tensor.startswith("bfloat16[") for tensor in trip.made)
    # The reference is the first to be loaded, and upstream loads it in BF16.
    assert trip.role == "reference"
    assert "verl/workers/fsdp_workers.py:" in trip.via
    assert "HalfPrecisionError: half precision in" in done.stdout
