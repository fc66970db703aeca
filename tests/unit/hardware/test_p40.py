"""The profile's numbers are those of the captures."""

from __future__ import annotations

from dataclasses import fields

import gpu_replay as replay

from verl_p40.hardware.p40 import P40, profile_of


def test_every_number_has_a_source() -> None:
    wanted = {field.name for field in fields(P40)} - {"sources"}
    assert {name for name, _ in P40.sources} == wanted
    assert all(source for _, source in P40.sources)


def test_what_a_real_p40_says_of_itself() -> None:
    q = replay.p40_q()
    assert q["Product Name"] == P40.name
    assert int(q["PCI/Device Id"][:6], 16) == P40.pci_device
    assert q["Temperature/GPU Slowdown Temp"] == f"{P40.slowdown_c} C"
    assert q["Temperature/GPU Shutdown Temp"] == f"{P40.shutdown_c} C"
    assert q["GPU Power Readings/Max Power Limit"] == f"{P40.power_limit_w:.2f} W"
    assert q["GPU Power Readings/Min Power Limit"] == f"{P40.power_limit_min_w:.2f} W"
    assert q["Default Applications Clocks/Graphics"] == f"{P40.sm_clock_base_mhz} MHz"
    assert q["Max Clocks/SM"] == f"{P40.sm_clock_max_mhz} MHz"
    assert q["Max Clocks/Memory"] == f"{P40.memory_clock_mhz} MHz"
    link = "PCI/GPU Link Info/"
    assert q[f"{link}PCIe Generation/Max"] == str(P40.pcie[0])
    assert q[f"{link}Link Width/Max"] == f"{P40.pcie[1]}x"
    assert (q["Fan Speed"] == "N/A") is not P40.has_fan


def test_memory_with_and_without_ecc_under_every_driver_seen() -> None:
    seen: dict[str, set[int]] = {"on": set(), "off": set()}
    for row in replay.table("p40-tables.csv"):
        seen[row["ecc"]].add(int(row["memory_total_mib"]))
        assert float(row["power_limit_w"]) == P40.power_limit_w
        assert row["fan"] == "N/A"
    assert (min(seen["on"]), max(seen["on"])) == P40.memory_mib_ecc_on
    assert (min(seen["off"]), max(seen["off"])) == P40.memory_mib_ecc_off


def test_rates_follow_from_cores_and_clocks() -> None:
    cores = P40.multiprocessors * 128
    assert round(2 * cores * P40.sm_clock_max_mhz / 1e6, 2) == P40.fp32_tflops


def test_by_name() -> None:
    assert profile_of("Tesla P40") is P40
    assert profile_of("NVIDIA H200") is None
    assert profile_of("Tesla P4") is None
