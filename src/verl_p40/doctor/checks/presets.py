"""What this machine can run."""

from __future__ import annotations

from typing import Any

from verl_p40.doctor import cards as smi
from verl_p40.doctor import fits
from verl_p40.doctor.checks.gpu import usable
from verl_p40.doctor.checks.host import meminfo, memory_limit
from verl_p40.doctor.machine import Machine
from verl_p40.doctor.model import Outcome, check, failure, na, ok, warning
from verl_p40.hardware.p40 import P40
from verl_p40.plan import fit
from verl_p40.plan.host import PROCESSES

GIB = 2**30


@check("presets", "Presets that fit", limit=120, fast=False)
def presets(machine: Machine) -> Outcome:
    """Every preset planned on the smallest of the cards, and against the host's memory."""
    cards = usable(smi.cards(machine))
    best = [card for card in cards if card.profile is P40] or cards
    sizes = [card.memory_mib for card in best if card.memory_mib]
    card = min(sizes) * fit.MIB if sizes else fit.default_card()
    planned = fits.plans(card)
    if not planned:
        return na("the planner needs verl's config, which is not here", "verl-p40 stack install")
    info = meminfo(machine)
    host = info.get("MemTotal", 0) + info.get("SwapTotal", 0)
    limit = memory_limit(machine)
    host = min(host, limit) if limit and host else host
    fitting, details = [], []
    for each in planned:
        verdict = _verdict(each, len(sizes), host)
        details.append(f"{each.name}: {verdict or 'fits'}{_margin(each) if not verdict else ''}")
        if not verdict:
            fitting.append(each.name)
    facts: dict[str, Any] = {"fits": fitting, "card_mib": card // fit.MIB, "cards": len(sizes)}
    where = f"{len(sizes)} card(s) of {card // fit.MIB:,} MiB" if sizes else "without a card"
    if not fitting:
        return failure(f"{where}: none", "verl-p40 plan p40-ppo", details=tuple(details), **facts)
    if smi.cards(machine) and not any(name.startswith("p40") for name in fitting):
        return warning(
            f"{where}: only {', '.join(fitting)}",
            f"verl-p40 plan p40-ppo --gpu-memory {card // fit.MIB}   # with what makes it fit",
            details=tuple(details),
            **facts,
        )
    return ok(f"{where}: {', '.join(fitting)}", details=tuple(details), **facts)


def _verdict(each: fits.Planned, cards: int, host: int) -> str:
    """Why a preset does not run here; empty when it does."""
    plan = each.plan
    if plan is None and not each.cpu:
        return f"not planned ({each.problem})"
    need = sum(plan.host.values()) if plan else PROCESSES
    if plan and not each.cpu:
        setup = plan.setup
        if cards < setup.world:
            return f"wants {setup.world} card(s)"
        if not plan.fits:
            return f"{-plan.margin / GIB:.1f} GiB too large for the card"
    if host and need > host:
        return f"wants {need / GIB:.0f} GiB of host memory"
    return ""


def _margin(each: fits.Planned) -> str:
    plan = each.plan
    if plan is None or each.cpu:
        return ""
    return f", {plan.margin / GIB:.1f} GiB to spare ({plan.peak.name})"
