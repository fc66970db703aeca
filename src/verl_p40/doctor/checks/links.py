"""How the cards hang together: device files, CUDA itself, PCIe, peer access, NUMA."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from verl_p40.doctor import cards as smi
from verl_p40.doctor.cards import Card
from verl_p40.doctor.checks.gpu import Cards, card_check, spread, which
from verl_p40.doctor.machine import Machine
from verl_p40.doctor.model import Outcome, failure, na, note, ok, warning
from verl_p40.doctor.where import in_container
from verl_p40.train.checks import cuda_devices


@card_check("device-files", "Device files")
def device_files(machine: Machine, cards: Cards) -> Outcome:
    """nvidia-smi does without nvidia-uvm, CUDA does not: a common gap in LXC and rootless engines."""
    there = set(machine.names("/dev"))
    if not there:
        return na("/dev was not to be looked at")
    wanted = ["nvidiactl", "nvidia-uvm"]
    missing = [name for name in wanted if name not in there]
    numbered = [name for name in there if re.fullmatch(r"nvidia\d+", name)]
    inside = in_container(machine)
    if missing or not numbered:
        lacking = ", ".join(f"/dev/{name}" for name in missing or ["nvidia0"])
        return failure(
            f"{lacking} is missing, so CUDA cannot start (nvidia-smi works without)",
            "start the container with the NVIDIA runtime: docker run --gpus all ..."
            if inside
            else "sudo nvidia-modprobe -u -c=0",
        )
    closed = [
        name
        for name in [*wanted, *numbered]
        if machine.live and not os.access(f"/dev/{name}", os.R_OK | os.W_OK)
    ]
    if closed:
        return failure(
            f"/dev/{closed[0]} may not be opened by this user",
            "sudo usermod -aG video,render $USER   # and log in again; or: sudo nvidia-modprobe -c=0",
        )
    return ok(f"nvidiactl, nvidia-uvm and {len(numbered)} card(s)")


@card_check("cuda", "CUDA starts", limit=30, replayable=False)
def cuda(machine: Machine, cards: Cards) -> Outcome:
    """``cuInit`` and the number of devices that the driver's own library shows; no context is made."""
    found = cuda_devices()
    hidden = machine.variable("CUDA_VISIBLE_DEVICES") is not None
    if found == 0:
        return failure(
            f"nvidia-smi lists {len(cards)} card(s) and CUDA none",
            "verl-p40 doctor --only device-files,visible-devices,kernel-module",
            "sudo dmesg | grep -e NVRM -e nvidia | tail",
        )
    if found < len(cards) and not hidden:
        return warning(
            f"CUDA shows {found} of {len(cards)} cards",
            "sudo dmesg | grep -e NVRM -e nvidia | tail",
        )
    return ok(f"{found} device(s)")


@card_check("pcie", "PCIe link")
def pcie(machine: Machine, cards: Cards) -> Outcome:
    """Fewer lanes than the card has slow down every offload; idle cards lower the generation."""
    told = [card for card in cards if card.pcie is not None]
    if not told:
        return na("not told by this output; nvidia-smi -q does")

    def words(link: tuple[int, int] | None) -> str:
        return "?" if link is None else f"gen {link[0]} x{link[1]}"

    def best(card: Card) -> tuple[int, int] | None:
        return card.profile.pcie if card.profile else card.pcie_max

    text = spread(told, lambda card: words(card.pcie))
    narrow = [c for c in told if (b := best(c)) and c.pcie and c.pcie[1] < b[1]]
    if narrow:
        card = narrow[0]
        return warning(
            f"{text}: {which(narrow, cards)} could do {words(best(card))}; offloading takes "
            f"{(best(card) or (0, 1))[1] / (card.pcie or (0, 1))[1]:.0f} times as long",
            "another slot (one wired with 16 lanes), or reseat the card; sudo lspci -vv -s "
            f"{card.bus[-10:] or 'BUS'} | grep LnkSta",
        )
    slow = [
        c
        for c in told
        if (b := best(c)) and c.pcie and c.pcie[0] < b[0] and c.pstate in {"P0", "P2"}
    ]
    if slow:
        return note(
            f"{text}: {which(slow, cards)} could do {words(best(slow[0]))}",
            "the slot, or a BIOS setting, limits the generation",
        )
    return ok(text)


_LINKS = {"SYS": "across processors", "NODE": "across host bridges", "PHB": "across the processor"}
"""How far apart two cards are, as ``nvidia-smi topo -m`` explains in its legend."""


@card_check("topology", "P2P and NUMA")
def topology(machine: Machine, cards: Cards) -> Outcome:
    """How several cards reach one another: P40s have no NVLink."""
    if len(cards) < 2:
        return na("one card")
    said = machine.command("nvidia-smi", "topo", "-m", limit=smi.SMI_LIMIT)
    if said is None or said.code != 0:
        buses = ", ".join(card.bus for card in cards)
        return na(f"nvidia-smi topo -m was not to be had; the cards are at {buses}")
    links, nodes = links_of(said.text)
    if apart := _no_peers(machine):
        return note(
            f"no peer access between {apart}: NCCL goes through host memory",
            "nvidia-smi topo -p2p r; if a run of several cards hangs: NCCL_P2P_DISABLE=1",
        )
    if not links:
        return na("nvidia-smi topo -m shows no pair of cards")
    far = {pair: kind for pair, kind in links.items() if kind == "SYS"}
    text = ", ".join(f"{kind} x{count}" for kind, count in sorted(_count(links.values()).items()))
    numa = f"; NUMA nodes {', '.join(sorted(set(nodes.values())))}" if nodes else ""
    if far and len(cards) <= len({i for pair in links for i in pair}):
        first = "GPU {} and {}".format(*next(iter(far)))
        return note(
            f"{text}{numa}: {first} meet {_LINKS['SYS']}, so gradients go through host memory",
            "cards on one processor are faster together: CUDA_DEVICE_ORDER=PCI_BUS_ID "
            "CUDA_VISIBLE_DEVICES=..., see nvidia-smi topo -m",
        )
    told = ", ".join(sorted({_LINKS[k] for k in links.values() if k in _LINKS}))
    return ok(f"{text}{numa}" + (f" ({told})" if told else ""))


_PEERS = {
    "CNS": "the chipset does not do it",
    "GNS": "the cards do not do it",
    "TNS": "the topology does not allow it",
    "NS": "it is not supported",
    "DR": "a registry key forbids it",
}
"""The legend of ``nvidia-smi topo -p2p``."""


def _no_peers(machine: Machine) -> str:
    """``GPU 0 and 1 (the chipset does not do it)``: the first pair that cannot read one another."""
    said = machine.command("nvidia-smi", "topo", "-p2p", "r", limit=smi.SMI_LIMIT)
    if said is None or said.code != 0:
        return ""
    for (a, b), word in links_of(said.text)[0].items():
        if word in _PEERS:
            return f"GPU {a} and {b} ({_PEERS[word]})"
    return ""


def _count(values: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for value in values:
        found[value] = found.get(value, 0) + 1
    return found


def links_of(text: str) -> tuple[dict[tuple[int, int], str], dict[int, str]]:
    """Pairs of GPUs and how they are linked, and each GPU's NUMA node, of ``nvidia-smi topo -m``."""
    lines = [line.replace("\x1b[4m", "").replace("\x1b[0m", "") for line in text.splitlines()]
    head = next((line.split("\t") for line in lines if "GPU0" in line and "X" not in line), None)
    header = [cell.strip() for cell in head] if head else []
    if len(header) < 2:
        header = ["", *next((line.split() for line in lines if "GPU0" in line), [])]
    columns = [i for i, cell in enumerate(header) if cell.startswith("GPU") and cell[3:].isdigit()]
    numa = next((i for i, cell in enumerate(header) if cell == "NUMA Affinity"), None)
    links: dict[tuple[int, int], str] = {}
    nodes: dict[int, str] = {}
    for line in lines:
        cells = [c.strip() for c in (line.split("\t") if "\t" in line else line.split())]
        if not cells or not cells[0].startswith("GPU") or not cells[0][3:].isdigit():
            continue
        row = int(cells[0][3:])
        for i in columns:
            if i < len(cells) and cells[i] not in {"", "X"} and row < int(header[i][3:]):
                links[(row, int(header[i][3:]))] = cells[i]
        if numa is not None and numa < len(cells) and cells[numa] not in {"", "N/A"}:
            nodes[row] = cells[numa]
    return links, nodes
