"""Where torch is: ``python -m verl_p40.numerics.child FOLDER SEED`` compares on the GPU.

Prints a line of JSON for every comparison and one for the whole.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from verl_p40.errors import ExitCode, VerlP40Error
from verl_p40.hardware.cudadriver import CudaError
from verl_p40.kernels.capability import Capability
from verl_p40.numerics import launches
from verl_p40.numerics.compare import BOUND, Row, compare
from verl_p40.numerics.device import LIMIT, Device, opened
from verl_p40.numerics.manifest import ARCH, MARK


def emit(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)


def driver_version() -> str:
    """As nvidia-smi says it; ``unknown`` without one."""
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.stdout.splitlines()[0].strip()


def v1_longest(kernels: Mapping[str, Mapping[str, Any]]) -> int:
    """Tokens up to which every compiled ``paged_attention_v1`` fits a block of a P40."""
    found = []
    for kernel, facts in kernels.items():
        name, _, instance = kernel.partition("/")
        if name == "paged_attention_v1":
            page = int(instance.partition("/")[2])
            found.append(launches.v1_longest(facts["shared"], page, LIMIT))
    return min(found)


def report(device: Device, rows: list[Row]) -> dict[str, Any]:
    """Everything that a reader needs to judge and repeat the run."""
    capability = Capability(*torch.cuda.get_device_capability())
    name = torch.cuda.get_device_name()
    native = capability == Capability.from_sm(ARCH)
    manifest = device.manifest
    longest = v1_longest(manifest["kernels"])
    return {
        "category": f"run on {name}" if native else f"sm_{ARCH} PTX run on a newer GPU",
        "gpu": name,
        "compute_capability": str(capability),
        "driver": driver_version(),
        "torch": torch.__version__,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **{key: manifest[key] for key in ("vllm", "queue", "nvcc", "triton")},
        "ptx_targets": sorted({module["target"] for module in manifest["modules"].values()}),
        "driver_compiled": device.compiled,
        "bound": BOUND,
        "shared_limit": LIMIT,
        "v1_longest": longest,
        "v1_used_to": launches.V1_LONGEST,
        "ok": all(row.ok for row in rows) and longest >= launches.V1_LONGEST,
        "rows": [row.to_json() for row in rows],
    }


def main(folder: Path, seed: int) -> None:
    try:
        with opened(folder) as device:
            rows = compare(device, seed, lambda row: emit({"row": row.to_json()}))
            emit({"report": report(device, rows)})
    except VerlP40Error as error:
        emit({"error": error.message, "fix": error.fix, "code": int(error.exit_code)})
    except CudaError as error:
        emit({"error": str(error), "fix": "", "code": int(ExitCode.ENVIRONMENT)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
