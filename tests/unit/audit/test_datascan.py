"""YAML, JSON and shell files of a tree."""

from __future__ import annotations

import pytest

from verl_p40.audit.tree_audit import scan_file

YAML_HITS = [
    ("dtype: bfloat16", "half-default"),
    ("a:\n  dtype: 'fp16'", "half-default"),
    ("choices: [fp32, bf16]", "half-default"),
    ("use_torch_compile: true", "torch-compile"),
    ("use_torch_compile: True", "torch-compile"),
    ("enable_prefix_caching: yes", "prefix-caching"),
    ("enable_chunked_prefill: true", "chunked-prefill"),
    ("use_remove_padding: true", "remove-padding"),
    ("attn_implementation: flash_attention_2", "flash-attn-implementation"),
    ("impl_backend: triton", "triton-kernel"),
    ("torch_dtype: auto", "auto-dtype"),
    ("kv_cache_dtype: fp8", "fp8"),
    ("dtype: [bf16\n", "unreadable"),
]
YAML_MISSES = [
    "dtype: float32",
    "use_torch_compile: false",
    "use_torch_compile: ${actor.use_torch_compile}",
    "use_torch_compile: 'true'",
    "resume_mode: auto",
    "impl_backend: torch",
    "# dtype: bfloat16",
    "note: bfloat16 is not for this card",
]


@pytest.mark.parametrize(("text", "rule"), YAML_HITS)
def test_yaml_finds(text: str, rule: str) -> None:
    assert [f.rule for f in scan_file("a.yaml", text.encode())] == [rule]


@pytest.mark.parametrize("text", YAML_MISSES)
def test_yaml_leaves_alone(text: str) -> None:
    assert scan_file("a.yaml", text.encode()) == []


def test_yaml_place_and_path() -> None:
    text = "# one\nrollout:\n  a:\n    dtype: bfloat16 # why\n---\ndtype: half\n"
    found = scan_file("a.yml", text.encode())
    assert [(f.line, f.column, f.qualname, f.code) for f in found] == [
        (4, 12, "rollout.a", "rollout.a.dtype: bfloat16"),
        (6, 8, "<document>", "dtype: half"),
    ]
    assert found[0].source == "dtype: bfloat16 # why"


def test_yaml_anchor_loop_ends() -> None:
    assert scan_file("a.yaml", b"a: &x\n  b: *x\n  dtype: bf16\n")[0].code == "a.dtype: bf16"


def test_json_place_and_path() -> None:
    text = '{\n "a": {"torch_dtype": "bfloat16", "k": [1, "x"]},\n "b": [{"use_liger": true}],\n "c": "}"\n}'
    found = scan_file("c.json", text.encode())
    assert [(f.line, f.column, f.rule, f.code) for f in found] == [
        (2, 23, "half-default", "a.torch_dtype: bfloat16"),
        (3, 22, "sm80-library", "b.use_liger: true"),
    ]


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ('{"torch_dtype": "float32"}', []),
        ('{"bf16": ', ["unreadable"]),
        ('{"bf16": false}', []),
        ('{"bf16": true}', ["half-flag"]),
        ('"bf16"', ["half-default"]),
        ('{"a": ["bf16", "fp16"]}', ["half-default", "half-default"]),
        ('{"esc\\"aped": "\\u0062f16"}', ["half-default"]),
    ],
)
def test_json(text: str, rules: list[str]) -> None:
    # The escaped name is only seen where something else lets the file through the prefilter.
    padded = text if "u0062" not in text else text[:-1] + ', "x": "fp32 bf16 "}'
    assert [f.rule for f in scan_file("a.json", padded.encode())] == rules


def test_shell() -> None:
    text = """
    python -m x a.dtype=bfloat16 ++b.use_torch_compile=true \\
       --dtype half --enable-prefix-caching
    pip install 'flash-attn>=2' # dtype=bfloat16
    echo "a.dtype=float32" --dtype float32
    """
    found = scan_file("run.sh", text.encode())
    assert [(f.line, f.rule) for f in found] == [
        (2, "half-default"),
        (2, "torch-compile"),
        (3, "half-default"),
        (3, "prefix-caching"),
        (4, "flash-attn-import"),
    ]
