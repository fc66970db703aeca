"""In the training stack: vLLM's own launch of the prefix kernel, compiled for 6.1 and recorded.

``python -m verl_p40.numerics.prefix_child TREE FOLDER`` calls ``context_attention_fwd`` of the
patched vLLM in ``TREE`` with tensors in ordinary memory that have the shapes of the cases. What
Triton would launch is compiled, and written to ``FOLDER`` as PTX; grid, warps, shared memory and
arguments are printed as one line of JSON. No GPU is needed, nor looked at.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from verl_p40.kernels import compile_child
from verl_p40.kernels.capability import Capability, limits
from verl_p40.kernels.standins import TreeFinder, answer_torch, answers
from verl_p40.numerics.cases import PREFIX, Prefix
from verl_p40.numerics.manifest import ARCH

_MODULE = "vllm.attention.ops.prefix_prefill"


class Launches:
    """Stands where Triton launches; has compiled what :func:`compile_child.arm` lets it see."""

    def __init__(self, triton: Any) -> None:
        self.compile = triton.compiler.compile
        self.last: tuple[dict[str, Any], Any] | None = None

    def run(self, function: Any, original: Any, args: Any, kwargs: Any) -> None:
        compiled = original(function, *args, **{**kwargs, "warmup": True})
        self.last = dict(zip(function.arg_names, args, strict=False)) | kwargs, compiled


def tensors(case: Prefix) -> dict[str, Any]:
    """Uninitialised, with the shapes, strides and dtypes of the run."""
    import torch

    new = sum(length for _, length in case.lengths)
    rows = len(case.lengths)
    pages, kv, size = sum(case.pages), case.heads.kv, case.head_size
    # A launch looks at shapes, strides and alignment alone: no element is ever written.
    return {
        "q": torch.empty(new, case.heads.query, size),
        "k": torch.empty(new, kv, size),
        "v": torch.empty(new, kv, size),
        "o": torch.empty(new, case.heads.query, size),
        "k_cache": torch.empty(pages, kv, size // 4, case.page, 4),
        "v_cache": torch.empty(pages, kv, size, case.page),
        "b_loc": torch.empty(rows, max(case.pages), dtype=torch.int32),
        "b_start_loc": torch.empty(rows + 1, dtype=torch.int32),
        "b_seq_len": torch.empty(rows, dtype=torch.int32),
        "k_scale": torch.empty(1),
        "v_scale": torch.empty(1),
    }


def record(case: Prefix, named: dict[str, Any], compiled: Any, given: dict[str, Any]) -> Any:
    """What a launch needs: arguments in their order, tensors by the name that ``given`` has."""
    import torch

    names = {id(tensor): name for name, tensor in given.items()}
    constants = compiled.src.constants
    arguments: list[list[Any]] = []
    for name, kind in compiled.src.signature.items():
        if name in constants:  # a stride of 1: specialised away
            continue
        value = named[name]
        if isinstance(value, torch.Tensor):
            arguments.append([kind, names[id(value)]])
        else:
            arguments.append([kind, value])
    grid = named["grid"]
    grid = grid(named) if callable(grid) else grid
    return {
        "case": repr(case),
        "entry": compiled.metadata.name,
        "grid": [*grid, 1, 1][:3],
        "threads": 32 * compiled.metadata.num_warps,
        "shared": compiled.metadata.shared,
        "blocks": [named["BLOCK_M"], named["BLOCK_N"]],
        "arguments": arguments,
    }


def main(tree: Path, folder: Path) -> None:
    import torch
    import triton

    if int(triton.__version__.split(".")[0]) < 3:
        raise SystemExit(f"this stack has Triton {triton.__version__}; the prefix kernel needs 3")
    card = Capability.from_sm(ARCH)
    answer_torch(card, limits(card))
    launches: Any = Launches(triton)
    compile_child.arm(launches, card)
    sys.meta_path.insert(0, TreeFinder(tree, "vllm", answers(card)))
    module = importlib.import_module(_MODULE)
    prefix: list[dict[str, Any]] = []
    modules: dict[str, str] = {}
    for case in PREFIX:
        given = tensors(case)
        slopes = {"alibi_slopes": torch.empty(case.heads.query)} if case.alibi else {}
        module.context_attention_fwd(
            **given,
            kv_cache_dtype="auto",
            max_seq_len=None,
            max_input_len=max(new for _, new in case.lengths),
            sliding_window=case.window,
            **slopes,
        )
        named, compiled = launches.last
        ptx = compiled.asm["ptx"]
        name = modules.setdefault(ptx, f"prefix-{len(modules)}")
        (folder / f"{name}.ptx").write_text(ptx, encoding="utf-8")
        figures = compile_child.assemble(ptx, card)
        launch = record(case, named, compiled, given | slopes)
        prefix.append({"module": name, **launch, **figures})
    document = {"triton": triton.__version__, "modules": list(modules.values()), "prefix": prefix}
    print(json.dumps(document))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
