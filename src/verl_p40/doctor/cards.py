"""The graphics cards and their driver, from what nvidia-smi prints, the kernel and the PCI bus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verl_p40.doctor.machine import Machine
from verl_p40.hardware.names import capability_of
from verl_p40.hardware.p40 import GpuProfile, profile_of
from verl_p40.kernels.capability import Capability

SMI_LIMIT = 20.0
"""Seconds for nvidia-smi: without persistence it wakes every card first, about a second each."""

TURING = Capability(7, 5)
"""The first that NVIDIA's open kernel modules drive: cards before have no GSP (the modules'
README, "Compatible GPUs"). Drivers after R580 are for these only."""

_REASONS = {
    "Idle": "gpu_idle",
    "Applications Clocks Setting": "applications_clocks_setting",
    "SW Power Cap": "sw_power_cap",
    "HW Slowdown": "hw_slowdown",
    "HW Thermal Slowdown": "hw_thermal_slowdown",
    "HW Power Brake Slowdown": "hw_power_brake_slowdown",
    "Sync Boost": "sync_boost",
    "SW Thermal Slowdown": "sw_thermal_slowdown",
    "Display Clock Setting": "display_clock_setting",
}
"""How ``nvidia-smi -q`` spells the words of ``hardware.sample``."""


@dataclass(frozen=True)
class Process:
    """Something that has memory on a card: ``kind`` is C (computes), G (draws) or C+G."""

    pid: int
    kind: str
    name: str
    memory_mib: int | None


@dataclass(frozen=True)
class Card:
    """One GPU; None for what its capture does not tell. MiB, W, Celsius.

    ``ecc`` is None for a card without ECC; ``ecc_errors`` are uncorrected, since the last boot.
    """

    index: int
    name: str
    bus: str = ""
    ecc: bool | None = None
    ecc_pending: bool | None = None
    ecc_errors: int | None = None
    retirement_pending: bool = False
    memory_mib: int | None = None
    used_mib: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    pstate: str = ""
    utilization_percent: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    throttle: tuple[str, ...] | None = None
    pcie: tuple[int, int] | None = None
    """Generation and lanes now; the largest that card and slot can do is ``pcie_max``."""
    pcie_max: tuple[int, int] | None = None
    persistence: bool | None = None
    compute_mode: str = ""
    host_vgpu: bool = False
    processes: tuple[Process, ...] = ()

    @property
    def profile(self) -> GpuProfile | None:
        return profile_of(self.name)

    @property
    def capability(self) -> Capability | None:
        """By its name; None for a card that we do not know."""
        found = capability_of(self.name)
        return Capability(*found) if found else None


@dataclass(frozen=True)
class Driver:
    """``version`` and ``cuda`` (the newest CUDA it serves) are empty where nothing tells them.

    ``module`` is ``open``, ``proprietary`` or empty; ``complaint`` what nvidia-smi says instead of
    an answer.
    """

    version: str = ""
    cuda: str = ""
    module: str = ""
    complaint: str = ""


@dataclass(frozen=True)
class PciCard:
    """An NVIDIA display or compute device on the bus, driver or not."""

    bus: str
    name: str


def cards(machine: Machine) -> tuple[Card, ...]:
    """Every card that nvidia-smi lists: from ``-q``, or from its table."""
    full = machine.command("nvidia-smi", "-q", limit=SMI_LIMIT)
    if full is not None and full.code == 0 and (found := tuple(parse_q(full.text))):
        return found
    table = machine.command("nvidia-smi", limit=SMI_LIMIT)
    return tuple(parse_table(table.text)) if table is not None else ()


def driver(machine: Machine) -> Driver:
    """What is known of the driver, from every place that tells."""
    kernel = machine.text("/proc/driver/nvidia/version") or ""
    loaded = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.[\d.]+)", kernel)
    module = ""
    if kernel:
        module = "open" if "Open Kernel Module" in kernel else "proprietary"
    texts = []
    complaint = ""
    for words in (("nvidia-smi", "-q"), ("nvidia-smi",)):
        said = machine.command(*words, limit=SMI_LIMIT)
        if said is not None:
            texts.append(said.text)
            answered = said.code == 0 and re.search(r"Driver Version", said.text)
            complaint = "" if answered else _complaint(said.text)
            if answered:
                break
    text = "\n".join(texts)
    version = re.search(r"Driver Version\s*: ([\d.]+)", text)
    cuda = re.search(r"CUDA Version\s*: (\d+\.\d+|Not Found)", text)
    return Driver(
        version.group(1) if version else loaded.group(1) if loaded else "",
        cuda.group(1) if cuda else "",
        module,
        complaint,
    )


def _complaint(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)[:200] or "nothing"


def pci(machine: Machine) -> tuple[PciCard, ...]:
    """NVIDIA's devices on the bus: by lspci, else by /sys (without their names but the P40's)."""
    for words in (("lspci", "-nn"), ("lspci",)):
        listed = machine.command(*words)
        if listed is not None and listed.code == 0:
            found = (_pci_line(line) for line in listed.text.splitlines())
            return tuple(card for card in found if card)
    return tuple(_sys_devices(machine))


_LSPCI = re.compile(
    r"^([0-9a-f:.]+) (?:VGA compatible|3D|Display) controller(?: \[\w+\])?: NVIDIA[^\n]*?"
    r"(?:\[([^\]]+)\](?: \[10de:\w+\])?)? \(rev"
)


def _pci_line(line: str) -> PciCard | None:
    found = _LSPCI.match(line.strip())
    return PciCard(found.group(1), found.group(2) or "NVIDIA card") if found else None


def _sys_devices(machine: Machine) -> Iterator[PciCard]:
    root = "/sys/bus/pci/devices"
    for bus in machine.names(root):
        if (machine.text(f"{root}/{bus}/vendor") or "").strip() != "0x10de":
            continue
        if not (machine.text(f"{root}/{bus}/class") or "").startswith("0x03"):
            continue
        device = (machine.text(f"{root}/{bus}/device") or "").strip()
        yield PciCard(bus, "Tesla P40" if device == "0x1b38" else f"NVIDIA card {device}")


# -- nvidia-smi -q --------------------------------------------------------------------------


def parse_q(text: str) -> Iterator[Card]:
    """The cards in the output of ``nvidia-smi -q``, any driver from R375 on."""
    blocks = re.split(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+)\s*$", text, flags=re.MULTILINE)
    for index, (bus, block) in enumerate(zip(blocks[1::2], blocks[2::2], strict=True)):
        yield _card(index, bus, _flat(block), tuple(_q_processes(block)))


def _flat(block: str) -> dict[str, str]:
    """``Temperature/GPU Slowdown Temp`` → ``92 C``. Of a name that comes twice, the first."""
    values: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    for line in block.splitlines():
        if not line.startswith(" ") or not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        name, colon, value = (part.strip() for part in line.partition(" : "))
        path = [part for part in path if part[0] < depth]
        if colon:
            values.setdefault("/".join([*(part[1] for part in path), name]), value)
        else:
            path.append((depth, name))
    return values


def _q_processes(block: str) -> Iterator[Process]:
    for part in re.split(r"^ +Process ID +: ", block, flags=re.MULTILINE)[1:]:
        pid = re.match(r"\d+", part)
        if pid is None:
            continue
        kind = re.search(r"^ +Type +: (\S+)", part, re.MULTILINE)
        name = re.search(r"^ +Name +: *(.*)$", part, re.MULTILINE)
        used = re.search(r"^ +Used GPU Memory +: (\d+) MiB", part, re.MULTILINE)
        yield Process(
            int(pid.group()),
            kind.group(1) if kind else "?",
            name.group(1).strip() if name else "",
            int(used.group(1)) if used else None,
        )


def _card(index: int, bus: str, q: Mapping[str, str], processes: tuple[Process, ...]) -> Card:
    def first(*paths: str) -> str:
        return next((q[path] for path in paths if path in q), "")

    def number(*paths: str) -> float | None:
        found = re.match(r"-?\d+(\.\d+)?", first(*paths))
        return float(found.group()) if found else None

    def whole(*paths: str) -> int | None:
        value = number(*paths)
        return None if value is None else int(value)

    def enabled(path: str) -> bool | None:
        return {"Enabled": True, "Disabled": False}.get(q.get(path, ""))

    ecc = enabled("ECC Mode/Current")
    errors = [
        whole(f"ECC Errors/Volatile/{name}")
        for name in ("Double Bit/Total", "DRAM Uncorrectable", "SRAM Uncorrectable")
    ]
    counted = [value for value in errors if value is not None]
    power = ("GPU Power Readings", "Power Readings")
    return Card(
        index=index,
        name=q.get("Product Name", "NVIDIA card"),
        bus=bus,
        ecc=ecc,
        ecc_pending=enabled("ECC Mode/Pending"),
        ecc_errors=sum(counted) if counted and ecc else None,
        retirement_pending=first("Retired Pages/Pending Page Blacklist", "Retired Pages/Pending")
        == "Yes",
        memory_mib=whole("FB Memory Usage/Total"),
        used_mib=whole("FB Memory Usage/Used"),
        temperature_c=whole("Temperature/GPU Current Temp"),
        slowdown_c=whole("Temperature/GPU Slowdown Temp"),
        pstate=q.get("Performance State", ""),
        utilization_percent=whole("Utilization/Gpu"),
        power_w=number(*(f"{p}/Power Draw" for p in power)),
        power_limit_w=number(
            f"{power[0]}/Current Power Limit", *(f"{p}/Enforced Power Limit" for p in power)
        ),
        power_default_w=number(*(f"{p}/Default Power Limit" for p in power)),
        throttle=_throttle(q),
        pcie=_pcie(whole, "Current"),
        pcie_max=_pcie(whole, "Max"),
        persistence=enabled("Persistence Mode"),
        compute_mode=q.get("Compute Mode", ""),
        host_vgpu=first(
            "GPU Virtualization Mode/Virtualization Mode",
            "GPU Virtualization Mode/Virtualization mode",
        )
        == "Host VGPU",
        processes=processes,
    )


def _pcie(whole: object, which: str) -> tuple[int, int] | None:
    assert callable(whole)
    link = "PCI/GPU Link Info"
    generation = whole(f"{link}/PCIe Generation/{which}")
    lanes = whole(f"{link}/Link Width/{which}")
    return None if generation is None or lanes is None else (generation, lanes)


def _throttle(q: Mapping[str, str]) -> tuple[str, ...] | None:
    for section in ("Clocks Event Reasons/", "Clocks Throttle Reasons/"):
        told = {k.rpartition("/")[2]: v for k, v in q.items() if k.startswith(section)}
        if told:
            return tuple(word for name, word in _REASONS.items() if told.get(name) == "Active")
    return None


# -- the table of nvidia-smi ----------------------------------------------------------------

_ROW1 = re.compile(
    r"^\|\s+(?P<index>\d+)\s+(?P<name>\S.*?)\s+(?P<persistence>On|Off)\s*\|"
    r"\s*(?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+)\s+\S+\s*\|\s*(?P<ecc>\S+)\s*\|"
)
_ROW2 = re.compile(
    r"^\|\s*(?:N/A|ERR!|\d+%)\s+(?P<temperature>\d+)C\s+(?P<pstate>P\d+)\s+"
    r"(?P<power>\d+W|N/A)\s*/\s*(?P<limit>\d+W|N/A)\s*\|"
    r"\s*(?P<used>\d+)MiB\s*/\s*(?P<total>\d+)MiB\s*\|\s*(?P<load>\d+%|N/A)\s+(?P<mode>\S.*?)\s*\|"
)
_PROCESS = re.compile(
    r"^\|\s+(?P<gpu>\d+)\s+(?:\S+\s+\S+\s+)?(?P<pid>\d+)\s+(?P<kind>C\+G|C|G|M\+C)\s+"
    r"(?P<name>\S.*?)\s+(?P<used>\d+MiB|N/A)\s*\|"
)


def parse_table(text: str) -> Iterator[Card]:
    """The cards in the default output of nvidia-smi: less than ``-q`` tells, but often all there is."""
    rows: dict[int, dict[str, str]] = {}
    processes: dict[int, list[Process]] = {}
    current = -1
    for line in text.splitlines():
        if process := _PROCESS.match(line):
            used = process["used"].removesuffix("MiB")
            processes.setdefault(int(process["gpu"]), []).append(
                Process(
                    int(process["pid"]),
                    process["kind"],
                    process["name"],
                    int(used) if used.isdigit() else None,
                )
            )
        elif one := _ROW1.match(line):
            current = int(one["index"])
            rows[current] = one.groupdict()
        elif current in rows and (two := _ROW2.match(line)):
            rows[current] |= two.groupdict()
    for index, row in rows.items():
        yield _table_card(index, row, tuple(processes.get(index, ())))


def _table_card(index: int, row: Mapping[str, str], processes: tuple[Process, ...]) -> Card:
    def number(key: str) -> int | None:
        found = re.match(r"\d+", row.get(key, ""))
        return int(found.group()) if found else None

    ecc = row["ecc"]
    return Card(
        index=index,
        name=row["name"],
        bus=row["bus"],
        ecc=None if ecc == "N/A" else ecc != "Off",
        ecc_errors=int(ecc) if ecc.isdigit() else None,
        memory_mib=number("total"),
        used_mib=number("used"),
        temperature_c=number("temperature"),
        pstate=row.get("pstate", ""),
        utilization_percent=number("load"),
        power_w=number("power"),
        power_limit_w=number("limit"),
        persistence=row["persistence"] == "On",
        compute_mode=row.get("mode", ""),
        processes=processes,
    )
