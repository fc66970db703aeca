"""Step one, without a GPU: PTX for ``compute_61`` of every kernel, and a manifest beside it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl_p40.errors import MachineError
from verl_p40.numerics import units
from verl_p40.numerics.manifest import MANIFEST, SCHEMA, describe
from verl_p40.numerics.nvcc import Nvcc
from verl_p40.patches.marker import read_marker
from verl_p40.patches.queue import default_directory, load_queue
from verl_p40.patches.release import patched_release
from verl_p40.patches.swap import new_folder
from verl_p40.stack.env import StackEnv

_CHILD = "verl_p40.numerics.prefix_child"

Say = Callable[[str], None]


def build(folder: Path, nvcc: Nvcc, env: StackEnv, tree: Path | None, jobs: int, say: Say) -> None:
    """Fill ``folder`` with PTX and ``manifest.json``.

    Args:
        folder: new, or empty.
        env: the training stack: torch's headers, and Triton 3 for the prefix kernel.
        tree: the patched sources of vLLM; None fetches and patches the pinned sdist.
        jobs: compilers at a time, a gigabyte each.
        say: told what is being done.

    Raises:
        UsageError: ``folder`` holds something.
        MachineError: a compiler refuses, or the stack has Triton 2.
        NetworkError, TreeError: as :func:`verl_p40.patches.release.patched_release`.
    """
    with tempfile.TemporaryDirectory(prefix="verl-p40-numerics-") as name, new_folder(folder) as to:
        scratch = Path(name)
        to.mkdir(parents=True)
        if tree is None:
            say("vLLM's sources, patched")
            tree = scratch / "vllm"
            patched_release(load_queue(default_directory("vllm")), tree)
        marker = read_marker(tree / "vllm")
        modules, kernels = _cuda(tree, to, scratch, nvcc, env, jobs, say)
        say("the prefix kernel, by Triton")
        triton = _prefix(tree, to, env)
        document = {
            "schema": SCHEMA,
            "vllm": marker.version if marker else None,
            "queue": marker.digest if marker else None,
            "nvcc": nvcc.version,
            "triton": triton["triton"],
            "modules": {**modules, **triton["modules"]},
            "kernels": kernels,
            "prefix": triton["prefix"],
        }
        (to / MANIFEST).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _cuda(
    tree: Path, to: Path, scratch: Path, nvcc: Nvcc, env: StackEnv, jobs: int, say: Say
) -> tuple[dict[str, Any], dict[str, Any]]:
    csrc = tree / "csrc"
    torch = env.site_packages / "torch" / "include"
    include = [torch, torch / "torch" / "csrc" / "api" / "include"]
    attention = scratch / "attention.cu"
    attention.write_text(units.attention_source(), encoding="utf-8")
    sources = {"attention": attention}
    sources |= {name: csrc / file for name, file in units.SOURCES.items()}

    def compiled(name: str) -> tuple[dict[str, str], dict[str, Any]]:
        say(f"{sources[name].name}, by nvcc {nvcc.chain.cuda}")
        output = to / f"{name}.ptx"
        nvcc.ptx(sources[name], output, include, csrc)
        chosen = units.find_kernels(name, units.entries(output.read_text(encoding="utf-8")))
        figures = nvcc.figures(output)
        return describe(output), {
            kernel: {"module": name, "entry": entry, **figures[entry]}
            for kernel, entry in chosen.items()
        }

    modules: dict[str, Any] = {}
    kernels: dict[str, Any] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for name, (module, found) in zip(sources, pool.map(compiled, sources), strict=True):
            modules[name] = module
            kernels |= found
    return modules, kernels


def _prefix(tree: Path, to: Path, env: StackEnv) -> dict[str, Any]:
    """vLLM's own launch of the prefix kernel, in the stack; it writes its PTX to ``to``."""
    done = env.run_module(_CHILD, [str(tree), str(to)], capture=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise MachineError(f"the prefix kernel does not compile: {said[-1] if said else ''}")
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    document["modules"] = {name: describe(to / f"{name}.ptx") for name in document["modules"]}
    return document
