"""One snippet, one rule; and near misses, where there must be none."""

from __future__ import annotations

import textwrap

import pytest

from verl_p40.audit import words
from verl_p40.audit.pyscan import scan

HITS = [
    ("x = torch.bfloat16", "half-dtype"),
    ("x = torch.half", "half-dtype"),
    ("x = torch.cuda.HalfTensor", "half-dtype"),
    ("from torch import bfloat16", "half-dtype"),
    ("x = np.float16", "half-dtype"),
    ("x = ['fp32', 'BF16']", "half-literal"),
    ("x = {'float16': 2}", "half-literal"),
    ("def f(dtype='bf16'): pass", "half-default"),
    ("def f(*, dtype=torch.bfloat16): pass", "half-default"),
    ("x = cfg.get('param_dtype', 'bf16')", "half-default"),
    ("x = getattr(cfg, 'dtype', torch.float16)", "half-default"),
    ("x = os.environ.get('DTYPE', 'bfloat16')", "half-default"),
    ("class A:\n    dtype: str = 'bfloat16'", "half-default"),
    ("parser.add_argument('--dtype', default='half')", "half-default"),
    ("y = x.bfloat16()", "half-cast"),
    ("y = x.half()", "half-cast"),
    ("y = x.to(torch.bfloat16)", "half-cast"),
    ("y = x.to(dtype=torch.bfloat16)", "half-cast"),
    ("y = x.type(torch.half)", "half-cast"),
    ("if x.dtype == torch.bfloat16: pass", "half-test"),
    ("if x in ('bf16', 'fp32'): pass", "half-test"),
    ("cfg = Config(bf16=True)", "half-flag"),
    ("m = M.from_pretrained(p, torch_dtype='auto')", "auto-dtype"),
    ("class A:\n    dtype: str = 'auto'", "auto-dtype"),
    ("m = AutoModelForCausalLM.from_config(config)", "implicit-dtype"),
    ("m = auto_model_class.from_config(config)", "implicit-dtype"),
    ("d = config.torch_dtype", "implicit-dtype"),
    ("with torch.autocast('cuda', dtype=torch.bfloat16): pass", "autocast"),
    ("with torch.autocast(device_type=d, dtype=torch.half): pass", "autocast"),
    ("with torch.autocast('cuda'): pass", "autocast"),
    ("with torch.cuda.amp.autocast(): pass", "autocast"),
    ("from torch.cuda.amp import autocast\nwith autocast(): pass", "autocast"),
    ("s = torch.cuda.amp.GradScaler()", "autocast"),
    ("x = torch.float8_e4m3fn", "fp8"),
    ("x = 'fp8_e5m2'", "fp8"),
    ("import flash_attn", "flash-attn-import"),
    ("from flash_attn.bert_padding import pad_input", "flash-attn-import"),
    ("try:\n    import flash_attn\nexcept ImportError:\n    pass", "flash-attn-import"),
    ("m = importlib.import_module('flash_attn.layers')", "flash-attn-import"),
    ("m = importlib.util.find_spec('flash_attn')", "flash-attn-import"),
    ("from transformers.integrations import flash_attention", "flash-attn-import"),
    (
        "m = M.from_pretrained(p, attn_implementation='flash_attention_2')",
        "flash-attn-implementation",
    ),
    ("x = 'flash_attention_2'", "flash-attn-implementation"),
    ("m = M.from_pretrained(p, use_flash_attention_2=True)", "flash-attn-implementation"),
    ("y = flash_attn_varlen_func(q, k, v)", "flash-attn-use"),
    ("M.forward = _flash_attention_forward", "flash-attn-use"),
    ("x = config._attn_implementation", "attn-internal"),
    ("x = getattr(c, '_attn_implementation')", "attn-internal"),
    ("f = torch.compile(g, dynamic=True)", "torch-compile"),
    ("@torch.compile\ndef f(): pass", "torch-compile"),
    ("@torch.compile(dynamic=True)\ndef f(): pass", "torch-compile"),
    ("import torch._dynamo", "torch-compile"),
    ("torch._dynamo.config.cache_size_limit = 1", "torch-compile"),
    ("from torch import compile", "torch-compile"),
    ("x = cfg.get('use_torch_compile', True)", "torch-compile"),
    ("import triton", "triton-import"),
    ("import triton.language as tl", "triton-import"),
    ("from vllm.triton_utils import tl, triton", "triton-import"),
    ("@triton.jit\ndef k(): pass", "triton-kernel"),
    ("@triton.autotune(configs=[], key=[])\ndef k(): pass", "triton-kernel"),
    ("x = f(impl_backend='triton')", "triton-kernel"),
    ("c = torch.cuda.get_device_capability()", "capability"),
    ("if p.has_device_capability(80): pass", "capability"),
    ("def get_min_capability(cls): return 70", "capability"),
    ("import transformer_engine as te", "sm80-library"),
    ("from liger_kernel.transformers import x", "sm80-library"),
    ("import sglang.srt.utils", "sm80-library"),
    ("llm = LLM(enable_prefix_caching=True)", "prefix-caching"),
    ("kw = {'enable_prefix_caching': True}", "prefix-caching"),
    ("kw['enable_prefix_caching'] = True", "prefix-caching"),
    ("def f(enable_prefix_caching: bool = True): pass", "prefix-caching"),
    ("class A:\n    enable_chunked_prefill: bool = True", "chunked-prefill"),
    ("p.add_argument('--enable-prefix-caching', default=True)", "prefix-caching"),
    ("def f(use_remove_padding=True): pass", "remove-padding"),
    ("x = cfg.get('use_fused_kernels', True)", "fused-kernels"),
    ("def bf16(:", "unreadable"),
]

MISSES = [
    "x = torch.float32",
    "x = cfg.get('param_dtype', 'fp32')",
    "x = left_half + half",
    "half = n // 2",
    "y = rotate_half(x)",
    "def f():\n    'Uses bfloat16 and flash_attention_2.'",
    "x = 'the bf16 default is gone'",
    "x = f(dtype=torch.float32)",
    "with torch.autocast('cuda', enabled=False): pass",
    "with torch.autocast('cuda', dtype=dtype): pass",
    "from verl.utils.precision import autocast\nwith autocast(dtype): pass",
    "m = M.from_pretrained(p, attn_implementation='eager')",
    "m = M.from_pretrained(p, attn_implementation=choice)",
    "m = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)",
    "c = AutoConfig.from_config(x)",
    "e = SomeEngine.from_config(config)",
    "x = re.compile('bf')",
    "x = compile(source, 'f', 'exec')",
    "llm = LLM(enable_prefix_caching=False)",
    "llm = LLM(enable_prefix_caching=config.enable_prefix_caching)",
    "x = cfg.get('use_torch_compile', False)",
    "if p.has_device_capability(60): pass",
    "# torch.compile, bfloat16, flash_attn",
    "x = cfg.get('enable_prefix_caching')",
    "device_map = 'auto'",
    "logger.info('triton')",
]


def _rules(source: str) -> set[str]:
    return {finding.rule for finding in scan("pkg/mod.py", source.encode())}


@pytest.mark.parametrize(("source", "rule"), HITS)
def test_finds(source: str, rule: str) -> None:
    assert rule in _rules(source)


@pytest.mark.parametrize("source", MISSES)
def test_leaves_alone(source: str) -> None:
    assert _rules(source) == set()


@pytest.mark.parametrize(("source", "rule"), [hit for hit in HITS if hit[1] != "unreadable"])
def test_prefilter_lets_every_hit_through(source: str, rule: str) -> None:
    assert words.relevant(source.encode()), rule


def test_place_name_guard_and_code() -> None:
    source = textwrap.dedent(
        """
        class Worker:
            def build(self, config):
                if is_cuda_available:
                    from flash_attn.bert_padding import pad_input
                return Model(
                    config,
                    attn_implementation="flash_attention_2",
                )
        """
    )
    found = scan("verl/w.py", source.encode())
    assert [(f.line, f.column, f.rule, f.qualname) for f in found] == [
        (5, 13, "flash-attn-import", "Worker.build"),
        (8, 33, "flash-attn-implementation", "Worker.build"),
    ]
    assert (found[0].guard, found[0].guard_line) == ("if is_cuda_available:", 4)
    assert found[1].code == "return Model(config, attn_implementation='flash_attention_2')"
    assert found[1].source == 'attn_implementation="flash_attention_2",'


def test_identity_survives_a_move_and_a_neighbour() -> None:
    call = "x = LLM(\n    {}enable_prefix_caching=True,\n" + "    other=1,\n" * 12 + ")\n"
    first = scan("a.py", call.format("").encode())[0]
    moved = scan("a.py", ("\n\n" + call.format("new=2,\n    ")).encode())[0]
    assert first.line != moved.line
    assert first.identity == moved.identity
    assert first.code == "enable_prefix_caching=True"


def test_two_sites_of_one_function_differ() -> None:
    source = "def f(c):\n    a = c.get('x', 'bf16')\n    b = c.get('y', 'bf16')\n"
    assert len({f.identity for f in scan("a.py", source.encode())}) == 2


@pytest.mark.parametrize("data", [b"\x00bf16", b"x = '\xff bf16'", b"(" * 5000 + b"bf16"])
def test_odd_files_are_reported_not_fatal(data: bytes) -> None:
    assert [f.rule for f in scan("a.py", data)] == ["unreadable"]
