"""A checkpoint's shards become a model that transformers loads: real shards, real merger."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from verl_p40.errors import DataError
from verl_p40.train import merge


def _actor(assets: Path, folder: Path, state: dict[str, Any], *, world: int = 1) -> Path:
    """What verl saves of an actor: on one rank plain tensors, on more of them DTensors."""
    import torch

    folder.mkdir()
    for rank in range(world):
        part = state if world == 1 else _sharded(state, rank, world)
        torch.save(part, folder / f"model_world_size_{world}_rank_{rank}.pt")
    fsdp = {"FSDP_version": 1, "world_size": world}
    (folder / "fsdp_config.json").write_text(json.dumps(fsdp))
    shutil.copytree(
        assets / "model", folder / "huggingface", ignore=shutil.ignore_patterns("*.safetensors")
    )
    return folder


def _sharded(state: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Rows of every tensor, as this rank of an FSDP mesh holds them; the others are not there."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
        return {
            name: DTensor.from_local(
                weight.chunk(world)[rank].clone(), mesh, [Shard(0)], run_check=False
            )
            for name, weight in state.items()
        }
    finally:
        dist.destroy_process_group()


def _order(actor: Path, out: Path, **other: Any) -> dict[str, Any]:
    return {"actor": str(actor), "out": str(out), "dtype": None, "lora_alpha": 16,
            "prompt": "1 + 2", **other}  # fmt: skip


def _model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto")


def test_shards_of_two_ranks_become_the_model(assets: Path, tmp_path: Path) -> None:
    import torch

    state = _model(assets / "model").state_dict()
    actor = _actor(assets, tmp_path / "actor", state, world=2)
    report = merge.export(_order(actor, tmp_path / "out"))
    assert report["dtype"] == "float32"
    assert report["tokens"] > 0
    merged = _model(tmp_path / "out").state_dict()
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[name], state[name]) for name in state)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json"} < names
    assert {"tokenizer.json", "tokenizer_config.json"} < names


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_chosen_dtype(assets: Path, tmp_path: Path, dtype: str) -> None:
    import torch

    state = _model(assets / "model").state_dict()
    actor = _actor(assets, tmp_path / "actor", state)
    assert merge.export(_order(actor, tmp_path / "out", dtype=dtype))["dtype"] == dtype
    merged = _model(tmp_path / "out")
    wanted = getattr(torch, dtype)
    assert all(torch.equal(w, state[n].to(wanted)) for n, w in merged.state_dict().items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype


def test_weights_that_no_float16_holds_are_refused(assets: Path, tmp_path: Path) -> None:
    state = _model(assets / "model").state_dict()
    state["model.norm.weight"][0] = 1e6
    actor = _actor(assets, tmp_path / "actor", state)
    with pytest.raises(DataError, match=r"too large for float16 \(model.norm.weight\)"):
        merge.export(_order(actor, tmp_path / "out", dtype="float16"))
    state["model.norm.weight"][0] = float("nan")
    diverged = _actor(assets, tmp_path / "diverged", state)
    with pytest.raises(DataError, match="not finite: training has diverged"):
        merge.export(_order(diverged, tmp_path / "other"))


def test_a_lora_adapter_is_added_with_its_alpha(assets: Path, tmp_path: Path) -> None:
    import peft
    import torch

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules="all-linear", init_lora_weights=False
    )
    model = peft.get_peft_model(_model(assets / "model"), config).eval()
    actor = _actor(assets, tmp_path / "actor", model.state_dict())
    merge.export(_order(actor, tmp_path / "out", lora_alpha=32))
    ids = torch.arange(3, 19).reshape(2, 8)
    with torch.no_grad():
        wanted, got = model(ids).logits, _model(tmp_path / "out")(ids).logits
        base = _model(assets / "model")(ids).logits
    assert torch.allclose(wanted, got, atol=1e-5)
    assert not torch.allclose(wanted, base, atol=1e-2)
    adapter = json.loads((tmp_path / "out" / merge.ADAPTER / "adapter_config.json").read_text())
    assert adapter["lora_alpha"] == 32
