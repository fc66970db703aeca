"""Reading nvidia-smi's outputs, lspci and the topology: all from real captures."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from verl_p40.doctor import cards, recording
from verl_p40.doctor.checks.links import links_of
from verl_p40.doctor.recording import Recorded, Recording
from verl_p40.hardware.p40 import P40

CAPTURES = Path(__file__).parent / "captures"
HARDWARE = Path(__file__).parents[1] / "hardware" / "captures"


def test_the_whole_of_nvidia_smi_q() -> None:
    (card,) = cards.parse_q((HARDWARE / "p40-q-535.129.03.txt").read_text())
    assert (card.name, card.bus, card.profile) == ("Tesla P40", "00000000:83:00.0", P40)
    assert (card.ecc, card.ecc_pending, card.ecc_errors) == (False, False, None)
    assert (card.memory_mib, card.used_mib) == (24576, 54)
    assert (card.temperature_c, card.slowdown_c) == (69, 92)
    assert (card.power_w, card.power_limit_w, card.power_default_w) == (52.5, 250.0, 250.0)
    assert (card.pcie, card.pcie_max) == ((3, 16), (3, 16))
    assert (card.pstate, card.utilization_percent) == ("P0", 1)
    assert card.throttle == ("sw_power_cap",)
    assert card.persistence is False
    assert card.processes == ()


def test_processes_of_q_and_the_spelling_of_older_drivers() -> None:
    text = """GPU 00000000:00:08.0
    Product Name                    : Tesla T4
    Persistence Mode                : Enabled
    Clocks Throttle Reasons
        Idle                        : Not Active
        HW Slowdown                 : Active
            HW Thermal Slowdown     : Active
    ECC Mode
        Current                     : Enabled
        Pending                     : Disabled
    ECC Errors
        Volatile
            SRAM Correctable        : 0
            SRAM Uncorrectable      : 0
            DRAM Correctable        : 3
            DRAM Uncorrectable      : 2
    Power Readings
        Power Draw                  : 10.29 W
        Default Power Limit         : 70.00 W
        Enforced Power Limit        : 60.00 W
    Processes
        Process ID                  : 1340
            Type                    : G
            Name                    : /usr/lib/xorg/Xorg
            Used GPU Memory         : 38 MiB
        Process ID                  : 1332000
            Type                    : C
            Name                    : python3
            Used GPU Memory         : 17904 MiB
"""
    (card,) = cards.parse_q(text)
    assert card.throttle == ("hw_slowdown", "hw_thermal_slowdown")
    assert (card.ecc, card.ecc_pending, card.ecc_errors) == (True, False, 2)
    assert (card.power_limit_w, card.power_default_w) == (60.0, 70.0)
    assert [(p.pid, p.kind, p.memory_mib) for p in card.processes] == [
        (1340, "G", 38),
        (1332000, "C", 17904),
    ]


@pytest.mark.parametrize(
    ("host", "count"), [("p40x3-545-ecc-mixed", 3), ("p40x2-440-too-old", 2), ("mixed-535", 2)]
)
def test_tables_of_old_and_new_drivers(host: str, count: int) -> None:
    found = cards.cards(recording.load(CAPTURES / f"{host}.yaml"))
    assert [card.index for card in found] == list(range(count))
    assert all(card.bus and card.temperature_c and card.power_limit_w for card in found)


def test_the_table_tells_what_p40_tables_csv_has_of_the_same_capture() -> None:
    """One row of it is of a host that is replayed here: two ways to read the same output."""
    with (HARDWARE / "p40-tables.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    table = """| NVIDIA-SMI 440.118.02   Driver Version: 440.118.02   CUDA Version: 10.2     |
|===============================+======================+======================|
|   0  Tesla P40           Off  | 00000000:88:00.0 Off |                    0 |
| N/A   26C    P8    10W / 250W |     10MiB / 22919MiB |      0%      Default |
"""
    (card,) = cards.parse_table(table)
    (row,) = [row for row in rows if row["driver"] == "440.118.02"]
    assert card.memory_mib == int(row["memory_total_mib"])
    assert card.used_mib == int(row["memory_used_mib"])
    assert card.temperature_c == int(row["temperature_c"])
    assert (card.ecc, card.pstate) == (row["ecc"] == "on", row["pstate"])


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("Tesla P40", "6.1"),
        ("Tesla P4", "6.1"),
        ("NVIDIA GeForce GTX 1070", "6.1"),
        ("Tesla P100-PCIE-16GB", "6.0"),
        ("Tesla M60", "5.2"),
        ("Tesla K80", "3.7"),
        ("Tesla V100-SXM2-32GB", "7.0"),
        ("Tesla T4", "7.5"),
        ("NVIDIA GeForce RTX 2080 SUPER", "7.5"),
        ("NVIDIA A100-SXM4-80GB", "8.0"),
        ("NVIDIA RTX A5000", "8.6"),
        ("NVIDIA L40S", "8.9"),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA H200", "9.0"),
        ("NVIDIA GeForce RTX 5090", "12.0"),
        ("A card of tomorrow", "None"),
    ],
)
def test_compute_capability_by_name(name: str, capability: str) -> None:
    assert str(cards.Card(0, name).capability) == capability


def test_lspci_and_sys_show_the_same_card() -> None:
    listed = Recorded(
        Recording.model_validate(
            {
                "commands": {
                    "lspci -nn": {
                        "text": "02:00.0 3D controller [0302]: NVIDIA Corporation GP102GL [Tesla "
                        "P40] [10de:1b38] (rev a1)\n08:01.0 VGA compatible controller [0300]: "
                        "Matrox Electronics Systems Ltd. MGA G200eW WPCM450 [102b:0532] (rev 0a)\n"
                        "83:00.1 Audio device [0403]: NVIDIA Corporation GP106 High Definition "
                        "Audio Controller [10de:10f1] (rev a1)\n"
                    }
                }
            }
        )
    )
    assert cards.pci(listed) == (cards.PciCard("02:00.0", "Tesla P40"),)
    bus = "/sys/bus/pci/devices"
    without = Recorded(
        Recording.model_validate(
            {
                "folders": {bus: ["0000:02:00.0", "0000:03:00.0"]},
                "files": {
                    f"{bus}/0000:02:00.0/vendor": "0x10de\n",
                    f"{bus}/0000:02:00.0/class": "0x030200\n",
                    f"{bus}/0000:02:00.0/device": "0x1b38\n",
                    f"{bus}/0000:03:00.0/vendor": "0x8086\n",
                },
            }
        )
    )
    assert cards.pci(without) == (cards.PciCard("0000:02:00.0", "Tesla P40"),)


def test_topology_of_eight_cards_on_two_processors() -> None:
    links, nodes = links_of((CAPTURES / "topo-8-gpus.txt").read_text())
    assert len(links) == 28
    assert (links[(0, 1)], links[(0, 2)], links[(0, 4)]) == ("PIX", "PXB", "SYS")
    assert nodes == {}


def test_topology_printed_with_spaces() -> None:
    links, _ = links_of((CAPTURES / "topo-5-gpus.txt").read_text())
    assert len(links) == 10
    assert (links[(1, 2)], links[(1, 3)], links[(0, 4)]) == ("PHB", "NODE", "SYS")
