"""The NVIDIA driver against the pins: new enough for CUDA 11.8, old enough for Pascal."""

from __future__ import annotations

import re

from verl_p40.smoke import gpu
from verl_p40.smoke.model import Context, Failed, Finding, Skip
from verl_p40.stack import pins
from verl_p40.stack.pins import CudaPin


def check(context: Context) -> Finding:
    """Skips on a machine without an NVIDIA driver."""
    return judge(gpu.look(), pins.load().cuda)


def judge(seen: gpu.Seen, pin: CudaPin) -> Finding:
    """The verdict on what was seen.

    The limits are NVIDIA's: CUDA 11.8 wants ``minimum_driver``, or ``minimum_driver_compatibility_mode``
    by minor-version compatibility (CUDA 11.8 release notes, table 3); the last driver branch with
    Pascal support is ``last_pascal_driver_branch``.
    """
    if not seen.driver and not seen.gpus:
        raise Skip(seen.problem or "no NVIDIA driver on this machine")
    branch = f"R{seen.driver.split('.')[0]}"
    details = {
        "driver": seen.driver,
        "driver_branch": branch,
        "cuda_of_driver": seen.cuda,
        "source": seen.source,
        "gpus": [card.public() for card in seen.gpus],
    }
    beyond = (
        number(seen.driver) and number(seen.driver)[0] > number(pin.last_pascal_driver_branch)[0]
    )
    if not seen.gpus:
        hint = (
            f"; {pin.last_pascal_driver_branch} is the last branch that drives a P40"
            if beyond
            else "; in a container, start it with the NVIDIA runtime"
        )
        problem = seen.problem or "it lists no card"
        raise Failed(f"driver {seen.driver} is loaded, and {problem}{hint}", details)
    if number(seen.driver) < number(pin.minimum_driver_compatibility_mode):
        raise Failed(
            f"driver {seen.driver} is older than {pin.minimum_driver_compatibility_mode}, the "
            f"oldest that runs CUDA {pin.version} (wanted: {pin.minimum_driver} or newer)",
            details,
        )
    names = ", ".join(f"{card.name} (sm_{card.capability.replace('.', '')})" for card in seen.gpus)
    text = f"driver {seen.driver} ({branch}): {names}"
    if number(seen.driver) < number(pin.minimum_driver):
        text += f"; CUDA {pin.version} runs in minor-version compatibility mode"
    if beyond:
        text += (
            f"; {branch} does not drive Pascal cards, {pin.last_pascal_driver_branch} is the last"
        )
    return Finding(text, "", details)


def number(version: str) -> tuple[int, ...]:
    """``(520, 61, 5)`` of ``520.61.05`` or ``R580``; empty for no digits."""
    return tuple(int(part) for part in re.findall(r"\d+", version))
