"""What the dispatch mode sees and what it lets pass. Needs torch: run in the stack's environment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from verl_p40.tripwire import record  # noqa: E402
from verl_p40.tripwire.mode import HALF, HalfPrecisionError, Tripwire  # noqa: E402
from verl_p40.tripwire.record import Trip  # noqa: E402

pytestmark = pytest.mark.stack


@pytest.fixture
def trips() -> Iterator[list[Trip]]:
    found: list[Trip] = []
    with Tripwire(on_trip=found.append):
        yield found


def _linear() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))


@pytest.mark.parametrize("dtype", sorted(HALF, key=str))
def test_every_half_type_trips(trips: list[Trip], dtype: Any) -> None:
    with pytest.raises(HalfPrecisionError):
        torch.empty(2, 3, dtype=dtype)
    assert trips[0].made == (f"{str(dtype).removeprefix('torch.')}[2, 3]",)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.complex64, torch.int8, torch.uint8, torch.int16,
     torch.int64, torch.bool],
)  # fmt: skip
def test_near_misses_pass(trips: list[Trip], dtype: Any) -> None:
    value = torch.ones(4, dtype=dtype)
    assert value.to(torch.float32).sum().item() == 4
    assert trips == []


def test_the_finding_names_operator_inputs_and_this_line(trips: list[Trip]) -> None:
    value = torch.ones(3, 5)
    with pytest.raises(HalfPrecisionError) as caught:
        value.to(torch.bfloat16)
    (trip,) = trips
    assert trip.operator == "aten._to_copy.default"
    assert trip.inputs == ("float32[3, 5]",)
    assert "test_mode.py:" in trip.site
    assert trip.site.endswith(" test_the_finding_names_operator_inputs_and_this_line")
    assert str(caught.value) == trip.line()


def test_a_cast_that_is_made_inside_autocast_trips(trips: list[Trip]) -> None:
    model, value = _linear(), torch.ones(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(HalfPrecisionError):
        model(value)
    assert trips[0].operator == "aten._to_copy.default"


def test_autocast_to_fp32_and_disabled_autocast_pass(trips: list[Trip]) -> None:
    model, value = _linear(), torch.ones(2, 4)
    with torch.autocast("cpu", enabled=False):
        model(value).sum().backward()
    assert trips == []


class _HalfGradient(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Any) -> Any:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.half().float() * 2


def test_the_backward_pass_is_seen(trips: list[Trip]) -> None:
    value = torch.ones(3, requires_grad=True)
    loss = _HalfGradient.apply(value).sum()
    with pytest.raises(HalfPrecisionError):
        loss.backward()
    assert trips[0].made == ("float16[3]",)
    assert trips[0].site.endswith(" backward")


def test_recomputed_activations_are_seen(trips: list[Trip]) -> None:
    from torch.utils.checkpoint import checkpoint

    calls = []

    def block(value: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the recomputation
            value = value.bfloat16().float()
        return value * value

    value = torch.ones(3, requires_grad=True)
    loss = checkpoint(block, value, use_reentrant=False).sum()
    with pytest.raises(HalfPrecisionError):
        loss.backward()
    assert len(trips) == 1


@pytest.mark.parametrize("foreach", [False, True])
def test_the_optimizer_is_seen(trips: list[Trip], foreach: bool) -> None:
    model = _linear()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert trips == []
    state = optimizer.state[model[0].weight]
    with pytest.raises(HalfPrecisionError):
        state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
    assert trips[0].made == ("bfloat16[8, 4]",)


def test_foreach_results_are_looked_into(trips: list[Trip]) -> None:
    before = [torch.ones(2), torch.ones(3)]
    assert len(torch._foreach_add(before, 1.0)) == 2
    with torch.utils._python_dispatch._disable_current_modes():
        half = [torch.ones(2), torch.ones(3, dtype=torch.float16)]
    with pytest.raises(HalfPrecisionError):
        torch._foreach_add(half, 1.0)
    assert trips[0].made == ("float16[3]",)
    assert trips[0].inputs == ("float32[2]", "float16[3]")


def test_meta_tensors_trip(trips: list[Trip]) -> None:
    with torch.device("meta"), pytest.raises(HalfPrecisionError):
        torch.nn.Linear(2, 2, dtype=torch.bfloat16)


def test_saving_and_loading_fp32_passes_and_half_trips(trips: list[Trip], tmp_path: Path) -> None:
    torch.save(_linear().state_dict(), tmp_path / "ok.pt")
    torch.load(tmp_path / "ok.pt")
    assert trips == []
    with torch.utils._python_dispatch._disable_current_modes():
        torch.save({"w": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "half.pt")
    with pytest.raises(HalfPrecisionError):
        torch.load(tmp_path / "half.pt")


def test_leaving_the_mode_ends_the_watch() -> None:
    with Tripwire() as tripwire:
        torch.ones(2)
    torch.ones(2).half()
    assert tripwire.operators >= 1


def test_other_threads_are_not_watched_and_not_broken(trips: list[Trip]) -> None:
    """A worker of verl computes in one thread; another's tensors are not its business."""
    done = []
    thread = threading.Thread(target=lambda: done.append(torch.ones(2).half()))
    thread.start()
    thread.join()
    assert done[0].dtype is torch.float16
    assert trips == []


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A model as hubs publish them: saved in BF16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_published_bf16_file_may_be_read_into_fp32(published: Path) -> None:
    from transformers import AutoModelForCausalLM

    found: list[Trip] = []
    with Tripwire(on_trip=found.append):
        model = AutoModelForCausalLM.from_pretrained(
            published, torch_dtype=torch.float32, attn_implementation="eager"
        )
        model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert found == []
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_model_that_stays_bf16_trips(published: Path) -> None:
    from transformers import AutoModelForCausalLM

    found: list[Trip] = []
    with Tripwire(on_trip=found.append), pytest.raises(HalfPrecisionError):
        AutoModelForCausalLM.from_pretrained(published, torch_dtype=torch.bfloat16)
    assert len(found) == 1


ARMING = """
import torch, verl_p40.tripwire.arm, verl_p40.tripwire.arm as again
assert again.TRIPWIRE is verl_p40.tripwire.arm.TRIPWIRE
torch.ones(2)

class ActorRolloutRefWorker:
    role = "ref"
    def compute(self):
        return torch.ones(2, 2).to(torch.float16)

ActorRolloutRefWorker().compute()
"""


def _python(folder: Path, script: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "VERL_P40_TRIPWIRE_DIR": str(folder), **extra},
        cwd=folder,
        text=True,
        capture_output=True,
    )


def test_importing_arm_arms_the_process(tmp_path: Path) -> None:
    done = _python(tmp_path, ARMING, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    assert done.returncode == 1
    assert "verl-p40 tripwire armed in process" in done.stdout
    trip = record.read_trip(tmp_path)
    assert trip is not None, done.stderr
    assert (trip.role, trip.operator) == ("reference", "aten._to_copy.default")
    assert trip.made == ("float16[2, 2]",)
    assert trip.site.endswith(" compute")
    assert "HalfPrecisionError: half precision in reference" in done.stderr
    assert record.armed(tmp_path)


def test_arming_imports_the_library_it_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('my library is here')\n")
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    done = _python(tmp_path, ARMING, PYTHONPATH=path, VERL_P40_TRIPWIRE_CHAIN="mine")
    assert "my library is here" in done.stdout


def test_every_operator_is_counted(tmp_path: Path) -> None:
    """Also those of the last moment: Ray ends a worker with a kill."""
    script = """
import os, signal, torch
from verl_p40.tripwire.arm import TRIPWIRE
value = torch.ones(2)
for _ in range(600):
    value = value + 1
print(TRIPWIRE.operators, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = _python(tmp_path, script, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    assert done.returncode == -9
    counted = int(done.stdout.split()[-1])
    assert counted > 600
    assert record.operators(tmp_path) == counted
