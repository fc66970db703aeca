"""Driver and kernel module: there, new enough for CUDA 11.8, not too new for Pascal."""

from __future__ import annotations

import re
from typing import Any

from verl_p40.doctor import cards as smi
from verl_p40.doctor.machine import Machine
from verl_p40.doctor.model import Outcome, check, failure, na, ok, warning
from verl_p40.doctor.where import in_container
from verl_p40.hardware.p40 import P40
from verl_p40.stack import pins

INSTALL = (
    "sudo apt-get install nvidia-driver-580-server && sudo reboot   # Ubuntu; not one that ends in -open",
    f"elsewhere: the data centre driver of branch R{P40.last_driver_branch}, with the proprietary "
    "(not the open) kernel module: https://www.nvidia.com/drivers",
)

OPEN_LICENSE = "Dual MIT/GPL"
"""What the open kernel modules declare (``MODULE_LICENSE``, kernel-open/nvidia/nv.c); NVIDIA's own
say ``NVIDIA``."""

_LEGACY = re.compile(r"supported through the NVIDIA (\d+)\.xx Legacy drivers")
_OPEN_REFUSES = re.compile(r"not supported by\s+(?:NVRM:\s+)?open\s+(?:NVRM:\s+)?nvidia\.ko", re.S)
_OLD_REFUSES = re.compile(
    r"not supported by the\s+(?:NVRM:\s+)?NVIDIA ([\d.]+) driver release", re.S
)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def kernel_log(machine: Machine) -> str:
    """What the kernel said of the driver: dmesg, else the journal (dmesg may want root)."""
    for words in (("dmesg",), ("journalctl", "-k", "-b", "--no-pager", "-q")):
        said = machine.command(*words)
        if said is not None and "NVRM" in said.text:
            return "\n".join(line for line in said.text.splitlines() if "NVRM" in line)
    return ""


@check("driver", "NVIDIA driver", limit=60)
def driver(machine: Machine) -> Outcome:
    """Thresholds are the pins: CUDA 11.8's release notes, NVIDIA's end of Pascal with R580."""
    found = smi.driver(machine)
    if found.complaint or not found.version:
        return _no_answer(machine, found)
    cuda = pins.load().cuda
    listed = smi.cards(machine)
    facts: dict[str, Any] = {"version": found.version, "cuda": found.cuda}
    version = numbers(found.version)
    if found.cuda == "Not Found" and any(card.host_vgpu for card in listed):
        return failure(
            f"{found.version} is the vGPU manager of a virtualisation host: it has no CUDA",
            "train in a virtual machine that has the card (PCI passthrough), or install the data "
            "centre driver here",
            **facts,
        )
    if version < numbers(cuda.minimum_driver_compatibility_mode):
        return failure(
            f"{found.version} is too old for CUDA {cuda.version} (it wants "
            f"{cuda.minimum_driver}, at the very least {cuda.minimum_driver_compatibility_mode})",
            *INSTALL,
            **facts,
        )
    old = [card for card in listed if card.capability and card.capability < smi.TURING]
    if version[0] > P40.last_driver_branch and old:
        return failure(_too_new(found.version, old[0].name), *INSTALL, **facts)
    if version < numbers(cuda.minimum_driver):
        return warning(
            f"{found.version} runs CUDA {cuda.version} in minor-version compatibility only "
            f"(native from {cuda.minimum_driver}): no JIT of newer PTX",
            *INSTALL,
            **facts,
        )
    last = version[0] == P40.last_driver_branch and old
    return ok(
        f"{found.version}: runs CUDA {cuda.version}"
        + (", and is Pascal's last branch: hold it there" if last else ""),
        **facts,
    )


def _too_new(version: str, name: str) -> str:
    return (
        f"{version} does not drive {name}: R{P40.last_driver_branch} is the last branch for "
        "Maxwell, Pascal and Volta"
    )


def _no_answer(machine: Machine, found: smi.Driver) -> Outcome:
    devices = smi.pci(machine)
    log = kernel_log(machine)
    what = devices[0].name if devices else "the card"
    many = f"{len(devices)} x {what}" if len(devices) > 1 else what
    if "version mismatch" in found.complaint.lower():
        loaded = f": the kernel still has {found.version} loaded" if found.version else ""
        return failure(
            f"the driver's library and its kernel module differ{loaded}",
            "sudo reboot",
            "still so afterwards: two installations; remove both (sudo apt-get purge '*nvidia*', "
            "sudo nvidia-uninstall), then install one",
        )
    if refused := _LEGACY.search(log):
        version = re.search(r"The ([\d.]+) NVIDIA driver will ignore", log)
        name = re.search(r"The NVIDIA (?:NVIDIA )?((?:Tesla|GeForce|Quadro) .+?) GPU", log)
        return failure(
            _too_new(version.group(1) if version else "the driver", name.group(1) if name else what)
            + f" (the kernel: supported through the {refused.group(1)}.xx legacy drivers)",
            *INSTALL,
        )
    installed = _installed(machine)
    known = [name for name in _old_cards(machine) if name]
    if known and installed and numbers(installed)[0] > P40.last_driver_branch:
        return failure(_too_new(installed, known[0]), *INSTALL)
    if _OPEN_REFUSES.search(log):
        return failure(f"the open kernel module does not drive {what}: see kernel-module", *INSTALL)
    if refused := _OLD_REFUSES.search(log):
        return failure(f"driver {refused.group(1)} does not support {what}", *INSTALL)
    if in_container(machine):
        return _in_container(machine, devices, found)
    if found.complaint:
        return failure(f"nvidia-smi has no answer: {found.complaint}", *INSTALL)
    if devices:
        return failure(f"{many} on the bus ({devices[0].bus}), and no NVIDIA driver", *INSTALL)
    return na("no NVIDIA card and no driver: the CPU presets run here", "verl-p40 train cpu-demo")


def _installed(machine: Machine, field: str = "version") -> str:
    """What modinfo says of the module on the disk: dmesg is root's alone on many distributions."""
    said = machine.command("modinfo", "-F", field, "nvidia")
    return said.text.strip() if said is not None and said.code == 0 else ""


def _in_container(machine: Machine, devices: tuple[smi.PciCard, ...], found: smi.Driver) -> Outcome:
    wanted = machine.variable("NVIDIA_VISIBLE_DEVICES")
    if devices or found.complaint or wanted not in (None, "", "void", "none"):
        return failure(
            "no driver in this container: it was started without the NVIDIA runtime",
            "docker compose up train   # or: docker run --gpus all ...",
            "verl-p40 doctor --only nvidia-runtime   # on the host",
        )
    return na("no NVIDIA card in this container: the CPU presets run", "verl-p40 train cpu-demo")


@check("kernel-module", "Kernel module", limit=60)
def kernel_module(machine: Machine) -> Outcome:
    """NVIDIA's open kernel modules refuse cards without a GSP, that is, all before Turing."""
    found, log = smi.driver(machine), kernel_log(machine)
    old = _old_cards(machine)
    on_disk = "" if found.module else _installed(machine, "license")
    opened = found.module == "open" or on_disk == OPEN_LICENSE
    if _OPEN_REFUSES.search(log) or (opened and old):
        name = old[0] if old else "this card"
        return failure(
            f"the open kernel module is loaded, and {name} needs the proprietary one "
            "(the open one wants a GPU System Processor: Turing and later)",
            *INSTALL,
        )
    modules = machine.text("/proc/modules") or ""
    if re.search(r"^nouveau ", modules, re.MULTILINE) and smi.pci(machine):
        return failure(
            "nouveau holds the card: CUDA needs NVIDIA's module",
            "printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' | "
            "sudo tee /etc/modprobe.d/blacklist-nouveau.conf && sudo update-initramfs -u && "
            "sudo reboot",
        )
    if xid := re.findall(r"NVRM: Xid \(PCI:([^)]+)\): (\d+)", log):
        codes = ", ".join(sorted({f"{code} on {bus}" for bus, code in xid}))
        return warning(
            f"the driver reported errors since the boot: Xid {codes}",
            "sudo dmesg | grep Xid; the numbers: https://docs.nvidia.com/deploy/xid-errors",
        )
    if found.module == "open":
        return ok("the open module, which drives every card here")
    if found.module:
        return ok("the proprietary module, no errors in the kernel's log that we may read")
    return na("nothing says which module is loaded")


def _old_cards(machine: Machine) -> list[str]:
    listed = [(card.name, card.capability) for card in smi.cards(machine)]
    listed += [(c.name, smi.Card(0, c.name).capability) for c in smi.pci(machine)]
    return [name for name, capability in listed if capability and capability < smi.TURING]
