"""The torch of the stack: its version, the code in its wheel, and the card as it sees it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from verl_p40.smoke.model import Context, Failed, Finding
from verl_p40.stack import pins


def check_build(context: Context) -> Finding:
    """Needs no GPU: the wheel says for which architectures it was compiled."""
    import torch

    flags = arch_flags()
    cuda = str(torch.version.cuda or "")
    return judge(str(torch.__version__), flags, cuda)


def arch_flags() -> list[str]:
    """The architectures that this torch was compiled for, ``["sm_50", ...]``.

    ``torch.cuda.get_arch_list()`` gives an empty list where CUDA is not available; the flags
    behind it are in the library and need no device (torch 2.6.0 and 2.11.0).
    """
    import torch

    flags = torch._C._cuda_getArchFlags() if hasattr(torch._C, "_cuda_getArchFlags") else None
    return str(flags or "").split()


def judge(version: str, flags: Iterable[str], cuda: str) -> Finding:
    """Code for sm_60 or sm_61 must be there: code of the same major version runs on 6.1.

    (CUDA C++ Programming Guide, binary compatibility: within a major version, from a minor
    version to the same or a later one.)
    """
    flags = list(flags)
    details = {"torch": version, "cuda": cuda, "arch_flags": flags}
    wanted = {pin.version for pin in _torch_pins()}
    if not flags:
        raise Failed(f"torch {version} is a CPU-only build: it has no code for any GPU", details)
    usable = [flag for flag in flags if runs_on(flag, (6, 1))]
    if not usable:
        raise Failed(
            f"torch {version} has no code for a P40 (sm_60 or sm_61): {' '.join(flags)}", details
        )
    text = f"torch {version}, CUDA {cuda}, {' and '.join(usable)} for the P40"
    if version.split("+")[0] not in {pin.split("+")[0] for pin in wanted}:
        text += f"; not the pinned {' or '.join(sorted(wanted))}"
    return Finding(text, "", details)


def _torch_pins() -> list[pins.PackagePin]:
    loaded = pins.load()
    return [loaded.packages(flavor)["torch"] for flavor in loaded.flavor]


def runs_on(flag: str, capability: tuple[int, int]) -> bool:
    """Whether code compiled for ``flag`` (``sm_60``, ``compute_50``) runs on a card.

    ``sm_`` is machine code, for its major version; ``compute_`` is PTX, which the driver
    compiles for every later card.
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", flag)
    if found is None:
        return False
    built = (int(found[2]), int(found[3]))
    if found[1] == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def check_device(context: Context) -> Finding:
    """Torch sees the card, has code for it, and computes on it."""
    import torch

    if not torch.cuda.is_available():
        raise Failed(
            "the driver shows a card and torch does not: the driver is older than torch's CUDA "
            f"{torch.version.cuda} needs, or CUDA_VISIBLE_DEVICES hides it"
        )
    limit_memory(context)
    properties = torch.cuda.get_device_properties(0)
    capability = (int(properties.major), int(properties.minor))
    details = {
        "name": properties.name,
        "compute_capability": f"{capability[0]}.{capability[1]}",
        "memory_mib": properties.total_memory // 2**20,
        "multiprocessors": properties.multi_processor_count,
        "devices": torch.cuda.device_count(),
    }
    if not any(runs_on(flag, capability) for flag in arch_flags()):
        raise Failed(
            f"torch has no code for {properties.name} (sm_{capability[0]}{capability[1]}): "
            "'no kernel image is available' would be next",
            details,
        )
    total = float(torch.arange(1000, device="cuda", dtype=torch.float32).sum())
    if total != 499500.0:
        raise Failed(f"0 + 1 + ... + 999 is {total} on {properties.name}, not 499500", details)
    size = details["memory_mib"]
    text = f"{properties.name}, compute capability {details['compute_capability']}, {size:,} MiB"
    return Finding(text, context.category, details)


def limit_memory(context: Context) -> None:
    """Keep this process below what the check has declared, whatever else is on the card."""
    import torch

    if context.device == "cuda" and context.gpu_mib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, context.gpu_mib * 2**20 / total))
