"""The checks that need torch: they pass on a right stack, and fail on one that is broken on purpose."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from verl_p40.smoke import attention, matmul, tritoncheck  # noqa: E402
from verl_p40.smoke.model import Check, Context, Failed, Result, Skip  # noqa: E402
from verl_p40.smoke.process import run_check  # noqa: E402
from verl_p40.stack import pins  # noqa: E402
from verl_p40.stack.env import StackEnv  # noqa: E402

pytestmark = pytest.mark.stack

Probe = Callable[..., Check]


def to_tf32(value: Any) -> Any:
    """Rounded to TF32's 10 bits of mantissa, as a tensor core takes its inputs."""
    bits = value.detach().contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return value + (rounded - value.detach())


def to_bf16(value: Any) -> Any:
    return value.bfloat16().float()


def test_the_installed_wheel_has_code_for_a_p40() -> None:
    """Without a GPU ``torch.cuda.get_arch_list()`` is empty, and the flags are not."""
    from verl_p40.smoke.torchbuild import arch_flags, check_build

    assert set(pins.load().arch.torch_wheel) & set(arch_flags()) >= {"sm_60"}
    if not torch.cuda.is_available():
        assert torch.cuda.get_arch_list() == []
    found = check_build(Context("cpu", Path()))
    assert "sm_60" in found.text


def test_a_wrong_arch_list_fails_the_real_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_p40.smoke import torchbuild

    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: "sm_70 sm_80 sm_90 compute_90")
    with pytest.raises(Failed, match="no code for a P40"):
        torchbuild.check_build(Context("cpu", Path()))
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: None)
    with pytest.raises(Failed, match="CPU-only build"):
        torchbuild.check_build(Context("cpu", Path()))


def test_matmul() -> None:
    found = matmul.check(Context("cpu", Path()))
    assert 0 < found.details["worst_fraction_of_bound"] <= 1
    assert found.category == "CPU run"


@pytest.mark.parametrize("rounding", [to_tf32, to_bf16])
def test_matmul_with_rounded_inputs_fails(rounding: Callable[[Any], Any]) -> None:
    with pytest.raises(Failed, match="times the largest that FP32 can make"):
        matmul.compare("cpu", lambda a, b: rounding(a) @ rounding(b))


@pytest.mark.parametrize("shape", [s for s in matmul.SHAPES if s[1] <= 64])
def test_every_short_shape_alone_tells_tf32(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "SHAPES", (shape,))
    with pytest.raises(Failed):
        matmul.compare("cpu", lambda a, b: to_tf32(a) @ to_tf32(b))


def test_one_wrong_element_fails() -> None:
    def wrong(a: Any, b: Any) -> Any:
        out = a @ b
        out[-1, -1] *= 1 + 1e-3
        return out

    with pytest.raises(Failed):
        matmul.compare("cpu", wrong)


def test_not_a_number_fails() -> None:
    with pytest.raises(Failed, match="nan"):
        matmul.compare("cpu", lambda a, b: (a @ b) * float("nan"))


def test_the_bound_is_highams() -> None:
    unit = 2.0**-24
    assert matmul.gamma(1) == unit / (1 - unit)
    assert matmul.gamma(4864) == pytest.approx(4864 * unit, rel=1e-3)


def test_attention() -> None:
    found = attention.check(Context("cpu", Path()))
    assert found.details["kernel"] == "CPU fused"
    assert found.details["cases"] == 8
    assert found.details["backward_over_eager"] <= attention.FACTOR


@pytest.mark.parametrize("rounding", [to_tf32, to_bf16])
def test_attention_with_rounded_inputs_fails(rounding: Callable[[Any], Any]) -> None:
    right = attention.fused("cpu")

    def rounded(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return right(rounding(q), rounding(k), rounding(v), *rest)

    with pytest.raises(Failed, match="output is off by"):
        attention.compare("cpu", rounded)


def test_attention_that_forgets_the_mask_fails() -> None:
    right = attention.fused("cpu")

    def forgetful(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float) -> Any:
        return right(q, k, v, None, True, scale)

    with pytest.raises(Failed, match="causal with padding: output"):
        attention.compare("cpu", forgetful)


def test_a_wrong_gradient_alone_fails() -> None:
    right = attention.fused("cpu")

    class HalfGradient(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, value: Any) -> Any:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return to_bf16(gradient)

    def wrong(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return right(q, HalfGradient.apply(k), v, *rest)

    with pytest.raises(Failed, match="gradient of k is off by"):
        attention.compare("cpu", wrong)


def test_another_kernel_than_the_one_asked_for_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn import attention as torchs

    held = torchs.sdpa_kernel
    monkeypatch.setattr(torchs, "sdpa_kernel", lambda backend: held(torchs.SDPBackend.MATH))
    with pytest.raises(Failed, match="SDPA did not use the kernel asked for"):
        attention.compare("cpu", attention.fused("cpu"))


@pytest.fixture
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("triton_cache")
def test_triton_compiles_for_sm_61() -> None:
    pytest.importorskip("triton")
    found = tritoncheck.check(Context("cpu", Path()))
    assert found.category == "sm_61 code generation"
    assert 0 < found.details["shared_bytes"]["fp32_dot"] <= 48 * 1024
    _, dot = tritoncheck.compile_all()
    assert "\n.target sm_61\n" in dot.ptx
    assert dot.cubin.startswith(b"\x7fELF")
    assert "fma.rn.f32" in dot.ptx
    assert "tf32" not in dot.ptx
    assert dot.parameters >= 4


@pytest.mark.usefixtures("triton_cache")
def test_too_much_shared_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(tritoncheck, "SHARED_LIMIT", 1024)
    with pytest.raises(Failed, match="fp32_dot wants"):
        tritoncheck.check(Context("cpu", Path()))


def test_without_triton_it_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritoncheck.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Skip, match="triton is not installed"):
        tritoncheck.check(Context("cpu", Path()))


def test_a_compiler_that_aborts_is_a_failed_check(
    stack: StackEnv, probe: Probe, tmp_path: Path
) -> None:
    """The real thing: LLVM ends the process when a dot of FP16 inputs is compiled for sm_61."""
    pytest.importorskip("triton")
    check = Check("llvm", "aborts", "half_dot:check", gpu="none", limit=120)
    result: Result = run_check(check, Context("cpu", tmp_path), stack, tmp_path / "log")
    assert result.verdict == "failed"
    assert "killed by SIGABRT" in result.text
    assert "LLVM ERROR" in result.text
    after = run_check(probe("good"), Context("cpu", tmp_path), stack, tmp_path / "log")
    assert after.verdict == "ok"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scratch folder with the demo's tokenizer and model, the latter not trained."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from verl_p40.data import tokenizer as tokenizers
    from verl_p40.data import warm_start
    from verl_p40.data.problems import make_problems
    from verl_p40.data.rows import make_row, write_parquet

    folder = tmp_path_factory.mktemp("demo")
    train, test = make_problems(1, 256, 24)
    tokenizer = tokenizers.train_tokenizer(
        text for problem in train for text in (problem.question, problem.answer)
    )
    warm_start.build_model(tokenizer, warm_start.Shape(), 1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [make_row(p.question, p.answer, str(p.result), "test", n) for n, p in enumerate(test)]
    write_parquet(rows, folder / "test.parquet")
    document = {"model": str(folder / "model"), "test": str(folder / "test.parquet")}
    (folder / "demo.json").write_text(json.dumps(document))
    return folder


def test_the_demo_model_computes_in_fp32(demo: Path) -> None:
    from verl_p40.smoke import halfprecision

    found = halfprecision.check(Context("cpu", demo))
    assert found.details["operators"] > 500


def test_a_model_that_computes_in_half_precision_fails(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl_p40.smoke import halfprecision

    train = halfprecision._train

    def in_autocast(*args: Any) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            train(*args)

    monkeypatch.setattr(halfprecision, "_train", in_autocast)
    with pytest.raises(Failed, match=r"half precision in .* bfloat16\["):
        halfprecision.check(Context("cpu", demo))


def test_a_tripwire_that_sees_nothing_fails(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_p40.smoke import halfprecision
    from verl_p40.tripwire import mode

    monkeypatch.setattr(mode, "HALF", frozenset())
    with pytest.raises(Failed, match="did not see a planted bfloat16"):
        halfprecision.check(Context("cpu", demo))


def test_vllm_is_skipped_without_it(demo: Path) -> None:
    from verl_p40.smoke import generate

    if generate.importlib.util.find_spec("vllm"):
        pytest.skip("vllm is installed")
    with pytest.raises(Skip, match="vllm is not installed"):
        generate.check(Context("cpu", demo))


def test_tokens_are_compared_one_by_one(demo: Path) -> None:
    """All of the vLLM check but vLLM: the model, Hugging Face's tokens, the comparison."""
    from verl_p40.smoke import generate

    folder, prompts = generate.make_model(Context("cpu", demo))
    assert len(prompts) == generate.PROMPTS
    expected = generate.huggingface_tokens(folder, prompts)
    assert {len(tokens) for tokens in expected} == {generate.NEW_TOKENS}
    assert len({tuple(tokens) for tokens in expected}) > 1
    same, ties = generate.compare(folder, prompts, expected, expected)
    assert (same, ties) == (generate.PROMPTS * generate.NEW_TOKENS, 0)
    wrong = [list(tokens) for tokens in expected]
    wrong[2][5] = (wrong[2][5] + 1) % 50
    with pytest.raises(Failed, match="prompt 2, token 5: vLLM chose"):
        generate.compare(folder, prompts, expected, wrong)
    with pytest.raises(Failed, match="vLLM gave 11 tokens, not 12"):
        generate.compare(folder, prompts, expected, [t[:11] for t in expected])


def test_a_tie_is_not_an_error(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_p40.smoke import generate

    folder, prompts = generate.make_model(Context("cpu", demo))
    expected = generate.huggingface_tokens(folder, prompts)
    other = [list(tokens) for tokens in expected]
    other[0][3] += 1
    monkeypatch.setattr(generate, "_gap", lambda *args: generate.TIE / 2)
    same, ties = generate.compare(folder, prompts, expected, other)
    assert ties == 1
    assert same == (generate.PROMPTS - 1) * generate.NEW_TOKENS + 3


def test_the_real_cheap_checks_through_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verl-p40 smoke --only matmul --only triton --json` in processes, with the real stack."""
    import subprocess

    from verl_p40.stack import paths

    if not os.environ.get("VERL_P40_ENV"):
        pytest.skip("VERL_P40_ENV does not name the stack")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "verl_p40.cli.main", "smoke", "--device", "cpu", "--json"),
            *("--only", "build", "--only", "matmul", "--only", "triton"),
        ],
        env={
            **os.environ,
            "VERL_P40_RUNS": str(tmp_path),
            "PYTHONPATH": str(paths.package_dir().parent),
        },
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert [check["verdict"] for check in document["checks"]] == ["ok", "ok", "ok"]
    assert document["stack"]["versions"]["torch"].startswith("2.")
