"""The cards: what they are, whether they are free, cool, powered and well connected."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from verl_p40.doctor import cards as smi
from verl_p40.doctor.cards import Card
from verl_p40.doctor.machine import Machine
from verl_p40.doctor.model import Outcome, check, failure, na, note, ok, warning
from verl_p40.hardware.p40 import P40
from verl_p40.hardware.sample import ALARMING
from verl_p40.kernels.capability import Capability

TARGET = Capability(*P40.compute_capability)

BUSY_MIB = 500
"""MiB that others may have on a card without a word: a display server takes up to a hundred or so."""
WARM_BELOW_SLOWDOWN_C = 7
"""Degrees below its slowdown at which a card is called hot."""
WARM_IDLE_C = 60
"""An idle card of passive cooling in moving air stays far below (18 to 41 in eleven captures of
P40s, tests/unit/hardware/captures/p40-tables.csv); at this it stands in its own heat."""
IDLE_PERCENT = 5

NO_CARDS = "no card that the driver shows"


def which(cards: Iterable[Card], every: Iterable[Card]) -> str:
    """``GPU 0, 2``; ``both GPUs`` or ``all 4 GPUs`` for all of several."""
    some, total = list(cards), len(list(every))
    if len(some) == total > 1:
        return "both GPUs" if total == 2 else f"all {total} GPUs"
    return "GPU " + ", ".join(str(card.index) for card in some)


def spread(cards: Iterable[Card], value: Callable[[Card], str]) -> str:
    """``GPU 0: a; GPU 1, 2: b``; the value alone where all have the same."""
    every = list(cards)
    groups: dict[str, list[Card]] = {}
    for card in every:
        groups.setdefault(value(card), []).append(card)
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{which(some, every)}: {text}" for text, some in groups.items())


def usable(cards: Iterable[Card]) -> list[Card]:
    """Those that the stack's code runs on: compute capability 6.1 and later, or unknown."""
    return [card for card in cards if card.capability is None or card.capability >= TARGET]


Cards = tuple[Card, ...]
CardRun = Callable[[Machine, Cards], Outcome]


def card_check(
    id: str, title: str, *, limit: float = 60.0, replayable: bool = True
) -> Callable[[CardRun], CardRun]:
    """Register a check of the cards, which does not apply where there is none."""

    def register(run: CardRun) -> CardRun:
        @functools.wraps(run)
        def with_cards(machine: Machine) -> Outcome:
            cards = smi.cards(machine)
            return run(machine, cards) if cards else na(NO_CARDS)

        check(id, title, limit=limit, replayable=replayable)(with_cards)
        return run

    return register


@check("gpus", "Graphics cards", limit=60)
def gpus(machine: Machine) -> Outcome:
    """Models, how many, and compute capability against what the stack is compiled for."""
    cards = smi.cards(machine)
    if not cards:
        return na(NO_CARDS, "verl-p40 train cpu-demo")
    names: dict[str, int] = {}
    for card in cards:
        cc = f" (compute capability {card.capability})" if card.capability else ""
        names[card.name + cc] = names.get(card.name + cc, 0) + 1
    text = ", ".join(f"{count} x {name}" for name, count in names.items())
    facts: dict[str, Any] = {
        "names": [c.name for c in cards],
        "memory_mib": [c.memory_mib for c in cards],
    }
    details = tuple(f"GPU {c.index}: {c.name}, {c.memory_mib} MiB, bus {c.bus}" for c in cards)
    fit = usable(cards)
    if not fit:
        return failure(
            f"{text}: the stack's code starts at 6.0 (torch) and {TARGET} (vLLM)",
            "verl-p40 train cpu-demo",
            details=details,
            **facts,
        )
    best = [card for card in fit if card.profile is P40] or fit
    if len(names) > 1:
        chosen = ",".join(str(card.index) for card in best)
        return warning(
            f"{text}: one run has to stay on cards of one kind",
            f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={chosen}   # without the "
            "first, CUDA numbers them by speed, not as nvidia-smi does",
            f"in Docker: docker run --gpus '\"device={chosen}\"'",
            details=details,
            **facts,
        )
    if best[0].profile is P40:
        return ok(text, details=details, **facts)
    sizes = [card.memory_mib for card in fit if card.memory_mib]
    return note(
        f"{text}: no P40; the presets are planned for {P40.memory_mib_ecc_on[0]:,} MiB a card",
        f"verl-p40 plan p40-ppo --gpu-memory {min(sizes) if sizes else 'MIB'}",
        details=details,
        **facts,
    )


@card_check("visible-devices", "CUDA_VISIBLE_DEVICES")
def visible_devices(machine: Machine, cards: Cards) -> Outcome:
    """What the variable leaves of the cards."""
    value = machine.variable("CUDA_VISIBLE_DEVICES")
    if value is None and not machine.told("CUDA_VISIBLE_DEVICES"):
        return na("not recorded")
    if value is None:
        return ok("not set: every card is used that a preset asks for")
    chosen = [part.strip() for part in value.split(",") if part.strip()]
    known = {str(card.index) for card in cards}
    wrong = [part for part in chosen if part.isdigit() and part not in known]
    if not chosen or chosen == ["-1"]:
        return failure(f"{value!r} hides every card", "unset CUDA_VISIBLE_DEVICES")
    if wrong:
        return failure(
            f"{value} names GPU {wrong[0]}, and there are GPU {', '.join(sorted(known))}: "
            "CUDA ignores it and what follows it",
            "unset CUDA_VISIBLE_DEVICES",
        )
    if len({c.name for c in cards}) > 1 and machine.variable("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return warning(
            f"{value} counts in CUDA's order (fastest first), not in nvidia-smi's",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    return ok(f"{value}: {len(chosen)} of {len(cards)}")


@card_check("ecc", "ECC")
def ecc(machine: Machine, cards: Cards) -> Outcome:
    """On is a P40's default and takes a sixteenth of its memory; errors mean a bad card."""
    having = [card for card in cards if card.ecc is not None]
    if not having:
        return na("no card here has ECC")
    if bad := [card for card in having if card.ecc_errors]:
        return failure(
            f"{which(bad, cards)}: {sum(c.ecc_errors or 0 for c in bad)} uncorrected memory "
            "error(s) since the boot: results cannot be trusted",
            "sudo reboot; if it comes back, the card is going: nvidia-smi -q -d ECC,PAGE_RETIREMENT",
        )
    if retiring := [card for card in having if card.retirement_pending]:
        return warning(
            f"{which(retiring, cards)}: a bad memory page is to be retired at the next boot",
            "sudo reboot",
        )
    if changing := [c for c in having if c.ecc_pending is not None and c.ecc_pending != c.ecc]:
        return note(f"{which(changing, cards)}: ECC changes at the next boot", "sudo reboot")
    text = spread(having, lambda c: f"{'on' if c.ecc else 'off'}, {_memory(c)}")
    on = [card for card in having if card.ecc]
    if on and any(card.profile is P40 for card in on):
        index = ",".join(str(card.index) for card in on)
        return note(
            f"{text} (a P40's default; off gives 1.5 GiB more, and errors pass unseen)",
            f"sudo nvidia-smi -i {index} -e 0 && sudo reboot   # if you want the memory",
        )
    return ok(text)


def _memory(card: Card) -> str:
    return "memory unknown" if card.memory_mib is None else f"{card.memory_mib:,} MiB usable"


@card_check("gpu-memory", "Memory of the cards")
def gpu_memory(machine: Machine, cards: Cards) -> Outcome:
    """As much as the model of the card has, and not taken by others."""
    small = [
        card
        for card in cards
        if card.profile
        and card.memory_mib
        and card.memory_mib < card.profile.memory_mib_ecc_on[0] - 64
    ]
    if small:
        return warning(
            f"{which(small, cards)} shows {_memory(small[0])}; a whole {small[0].name} has "
            f"{P40.memory_mib_ecc_on[0]:,} with ECC: a vGPU, or memory that others hold?",
            "nvidia-smi -q -d MEMORY",
        )
    taken = [card for card in cards if (card.used_mib or 0) > BUSY_MIB]
    if all(card.memory_mib is None for card in cards):
        return na("the driver does not say")
    text = spread(cards, lambda c: f"{c.used_mib or 0:,} of {c.memory_mib or 0:,} MiB taken")
    if not taken:
        return ok(text)
    return warning(f"{text}, which a run cannot have", "verl-p40 doctor --only gpu-processes -v")


@card_check("gpu-processes", "Other processes on the cards")
def gpu_processes(machine: Machine, cards: Cards) -> Outcome:
    """Who else computes there; display servers are no matter."""
    details = tuple(
        f"GPU {card.index}: process {p.pid} ({p.kind}) {p.name}, {p.memory_mib or 0} MiB"
        for card in cards
        for p in card.processes
    )
    computing = [(c, p) for c in cards for p in c.processes if p.kind != "G"]
    if computing:
        told = ", ".join(
            f"{p.name or 'process'} ({p.pid}) on GPU {card.index}: {p.memory_mib or 0:,} MiB"
            for card, p in computing[:4]
        )
        more = f" and {len(computing) - 4} more" if len(computing) > 4 else ""
        pids = " ".join(str(pid) for pid in sorted({p.pid for _, p in computing})[:8])
        return warning(
            f"{told}{more}",
            f"ps -o pid,user,lstart,args -p {pids.replace(' ', ',')}   # yours and not needed: "
            f"kill {pids}",
            details=details,
        )
    exclusive = [c for c in cards if c.compute_mode.lower() in {"prohibited"}]
    if exclusive:
        return failure(
            f"{which(exclusive, cards)}: compute mode is Prohibited", "sudo nvidia-smi -c DEFAULT"
        )
    hidden = [c for c in cards if not c.processes and (c.used_mib or 0) > BUSY_MIB]
    if hidden:
        return note(
            f"{which(hidden, cards)}: memory is taken by processes that cannot be seen from here "
            "(another container's, or another user's)",
            "on the host, as root: nvidia-smi",
        )
    drawing = sum(len(card.processes) for card in cards)
    return ok("none that compute" + (f" ({drawing} that draw)" if drawing else ""), details=details)


@card_check("persistence", "Persistence mode")
def persistence(machine: Machine, cards: Cards) -> Outcome:
    """Without it the driver lets go of an idle card, and every start waits for it."""
    told = [card for card in cards if card.persistence is not None]
    if not told:
        return na("the driver does not say")
    off = [card for card in told if not card.persistence]
    if not off:
        return ok("on")
    return note(
        f"off on {which(off, cards)}: each start waits seconds a card, settings are lost in between",
        "sudo nvidia-smi -pm 1   # until the next boot; for good: sudo systemctl enable --now "
        "nvidia-persistenced",
    )


@card_check("power", "Power limit")
def power(machine: Machine, cards: Cards) -> Outcome:
    """Lower than the card's own limit costs speed; often on purpose."""
    told = [card for card in cards if card.power_limit_w is not None]
    if not told:
        return na("the driver does not say")

    def default(card: Card) -> float | None:
        return card.power_default_w or (card.profile.power_limit_w if card.profile else None)

    low = [c for c in told if (full := default(c)) and (c.power_limit_w or 0) < full - 1]
    text = spread(told, lambda card: f"{card.power_limit_w:.0f} W")
    if not low:
        return ok(text)
    index = ",".join(str(card.index) for card in low)
    return note(
        f"{text}, and {which(low, cards)} may take {default(low[0]):.0f} W: slower under load, cooler",
        f"sudo nvidia-smi -i {index} -pl {default(low[0]):.0f}   # if the cooling allows it",
    )


@card_check("temperature", "Temperature")
def temperature(machine: Machine, cards: Cards) -> Outcome:
    """A P40 has no fan: the case has to blow through it."""
    told = [card for card in cards if card.temperature_c is not None]
    if not told:
        return na("the driver does not say")
    text = spread(told, lambda card: f"{card.temperature_c} C")
    lower = next(
        (f"sudo nvidia-smi -pl {c.profile.power_limit_min_w:.0f}" for c in told if c.profile), ""
    )
    fix = (
        "a passive card needs a fan that blows through it (a shroud with a 40 mm server fan, or "
        "the case's own at full speed)",
        f"watch it: verl-p40 monitor; until then: {lower or 'a lower power limit (nvidia-smi -pl)'}",
    )

    def slowdown(card: Card) -> int:
        return card.slowdown_c or (card.profile.slowdown_c if card.profile else 90)

    over = [c for c in told if (c.temperature_c or 0) >= slowdown(c)]
    if over:
        return failure(f"{text}: {which(over, cards)} slows down from {slowdown(over[0])} C", *fix)
    hot = [c for c in told if (c.temperature_c or 0) >= slowdown(c) - WARM_BELOW_SLOWDOWN_C]
    if hot:
        return warning(f"{text}: {which(hot, cards)} slows down at {slowdown(hot[0])} C", *fix)
    idle = [
        c
        for c in told
        if c.profile
        and not c.profile.has_fan
        and (c.temperature_c or 0) >= WARM_IDLE_C
        and (c.utilization_percent or 0) <= IDLE_PERCENT
    ]
    if idle:
        return warning(
            f"{text} while {which(idle, cards)} does nothing: under load it will reach "
            f"{slowdown(idle[0])} C and slow down",
            *fix,
        )
    return ok(text)


@card_check("throttle", "Throttle reasons")
def throttle(machine: Machine, cards: Cards) -> Outcome:
    """Why clocks are held back now; idling and the power cap under load are no matter."""
    told = [card for card in cards if card.throttle is not None]
    if not told:
        return na("not told by this output; nvidia-smi -q does")
    bad = [card for card in told if set(card.throttle or ()) & ALARMING]
    if bad:
        words = ", ".join(sorted({w for c in bad for w in c.throttle or () if w in ALARMING}))
        return warning(
            f"{which(bad, cards)}: {words.replace('_', ' ')}: heat or power supply",
            "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
            "both 8-pin inputs of a P40's EPS adapter belong on cables of their own",
        )
    text = spread(told, lambda c: ", ".join(c.throttle or ()).replace("_", " ") or "none")
    return ok(text)
