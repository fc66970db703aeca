"""Checks of the host and of Docker on recorded answers, each from what Linux or Docker writes."""

from __future__ import annotations

from typing import Any

import pytest

from verl_p40.doctor import State, fits, select
from verl_p40.doctor.model import Outcome
from verl_p40.doctor.recording import Recorded, Recording

GB = 1_000_000_000
P40 = """| NVIDIA-SMI 535.309.01             Driver Version: 535.309.01   CUDA Version: 12.2     |
|   0  Tesla P40                      On  | 00000000:84:00.0 Off |                    0 |
| N/A   21C    P8              10W / 250W |      0MiB / 23040MiB |      0%      Default |
"""
DOCKER = """Client: Docker Engine - Community
 Version:    28.0.0-rc.1

Server:
 Server Version: 28.0.0-rc.1
 Storage Driver: overlay2
 Cgroup Version: 2
 Runtimes: io.containerd.runc.v2 nvidia runc
 Default Runtime: runc
 Operating System: Ubuntu 24.04.2 LTS
"""
"""Of a public `docker info` (ssst0n3/docker_archive, toolkit 1.17.6), shortened."""


def ask(check: str, **answers: Any) -> Outcome:
    machine = Recorded(Recording.model_validate(answers))
    (found,) = select([check])
    return found.run(machine)


def meminfo(total: float, available: float, swap: float = 0) -> dict[str, str]:
    return {
        "/proc/meminfo": f"MemTotal: {int(total * GB / 1024)} kB\nMemAvailable: "
        f"{int(available * GB / 1024)} kB\nSwapTotal: {int(swap * GB / 1024)} kB\nSwapFree: "
        f"{int(swap * GB / 1024)} kB\n"
    }


@pytest.mark.parametrize(
    ("files", "state", "words"),
    [
        (meminfo(32, 20), State.OK, "20.0 of 32.0 GB available"),
        (meminfo(8, 3, 8), State.WARNING, "will swap"),
        (meminfo(4, 2), State.FAILURE, "needs about 4.0 GB"),
        (
            meminfo(64, 60) | {"/sys/fs/cgroup/memory.max": "2000000000\n"},
            State.FAILURE,
            "this cgroup may take 2.0 GB",
        ),
        (
            meminfo(64, 60)
            | {"/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            State.OK,
            "60.0 of 64.0 GB",
        ),
        (meminfo(64, 60) | {"/sys/fs/cgroup/memory.max": "max\n"}, State.OK, "60.0 of 64.0 GB"),
        ({}, State.NA, "/proc/meminfo"),
    ],
)
def test_memory(files: dict[str, str], state: State, words: str) -> None:
    outcome = ask("memory", files=files)
    assert (outcome.state, words in outcome.text) == (state, True), outcome.text


@pytest.mark.parametrize(
    ("files", "state", "words"),
    [
        (
            {"/sys/fs/cgroup/cgroup.controllers": "cpu", "/sys/fs/cgroup/cpu.max": "max 100000\n"},
            State.OK,
            "v2, no limits",
        ),
        (
            {
                "/sys/fs/cgroup/cgroup.controllers": "cpu",
                "/sys/fs/cgroup/cpu.max": "100000 100000\n",
            },
            State.WARNING,
            "1.0 processors",
        ),
        (
            {"/sys/fs/cgroup/cgroup.controllers": "cpu", "/sys/fs/cgroup/pids.max": "100\n"},
            State.WARNING,
            "100 processes",
        ),
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            State.OK,
            "v1, 4.0 processors",
        ),
    ],
)
def test_cgroup(files: dict[str, str], state: State, words: str) -> None:
    outcome = ask("cgroup", files=files, folders={"/sys/fs/cgroup": ["cpu"]})
    assert (outcome.state, words in outcome.text) == (state, True), outcome.text


def test_shm_of_docker_s_default_size() -> None:
    small = {"/dev/shm": {"total": 67108864, "free": 67108864}}
    inside = ask("shm", space=small, files={"/.dockerenv": ""})
    assert inside.state is State.WARNING
    assert inside.fix[0].startswith("docker run --shm-size")
    assert ask("shm", space=small).fix == ("sudo mount -o remount,size=8G /dev/shm",)
    assert ask("shm", space={"/dev/shm": {"total": 8 * GB, "free": 7 * GB}}).state is State.OK
    assert ask("shm").state is State.NA


@pytest.mark.parametrize(
    ("free", "state"), [(500 * GB, State.OK), (25 * GB, State.WARNING), (5 * GB, State.FAILURE)]
)
def test_disk_for_a_card_s_checkpoints(
    free: int, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fits, "main_plan", lambda: None)  # without verl's config: 25 GB
    outcome = ask(
        "disk",
        space={"runs": {"total": 1000 * GB, "free": free}},
        commands={"nvidia-smi": {"text": P40}},
    )
    assert outcome.state is state, outcome.text


def limits(files: str, processes: str = "unlimited") -> dict[str, str]:
    return {
        "/proc/self/limits": "Limit                     Soft Limit           Hard Limit\n"
        f"Max open files            {files:<20} 1048576              files\n"
        f"Max processes             {processes:<20} 96364                processes\n"
    }


@pytest.mark.parametrize(
    ("files", "state"),
    [
        (limits("1048576"), State.OK),
        (limits("20000"), State.NOTE),
        (limits("1024"), State.WARNING),
        (limits("1048576", "512"), State.WARNING),
    ],
)
def test_ulimits(files: dict[str, str], state: State) -> None:
    assert ask("ulimits", files=files).state is state


TCP = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:18EB 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1
   1: 0100007F:2049 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 1
"""


def test_ray_s_ports() -> None:
    taken = ask("ports", files={"/proc/net/tcp": TCP})
    assert (taken.state, "6379 (Ray's GCS (or Redis))" in taken.text) == (State.NOTE, True)
    assert "8265" not in taken.text, "a connection is no listener"
    current = {"/proc/net/tcp": TCP, "/tmp/ray/ray_current_cluster": "10.0.0.1:6379\n"}
    assert ask("ports", files=current).state is State.WARNING
    assert ask("ports", files={"/proc/net/tcp": TCP.splitlines()[0]}).state is State.OK
    joined = ask("ports", variables={"RAY_ADDRESS": "auto"})
    assert joined.fix == ("unset RAY_ADDRESS",)


TWO = P40 + P40.replace("|   0 ", "|   1 ")


@pytest.mark.parametrize(
    ("names", "files", "state", "words"),
    [
        (["nvidia0", "nvidiactl", "nvidia-uvm", "null"], {}, State.OK, "1 card(s)"),
        (["nvidia0", "nvidiactl"], {}, State.FAILURE, "/dev/nvidia-uvm is missing"),
        (["nvidiactl", "nvidia-uvm"], {"/.dockerenv": ""}, State.FAILURE, "/dev/nvidia0"),
        ([], {}, State.NA, "/dev"),
    ],
)
def test_device_files(names: list[str], files: dict[str, str], state: State, words: str) -> None:
    smi = {"nvidia-smi": {"text": P40}}
    outcome = ask("device-files", commands=smi, folders={"/dev": names}, files=files)
    assert (outcome.state, words in outcome.text) == (state, True), outcome.text
    if files:
        assert "--gpus all" in outcome.fix[0]


PEERS = """ \tGPU0\tGPU1\t
 GPU0\tX\tGNS\t
 GPU1\tGNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  GNS  = GPU not supported
"""
"""`nvidia-smi topo -p2p r` of noonghunna/club-3090#1140."""
PAIR = """\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPHB\t0-63\t0\t\tN/A
GPU1\tPHB\t X \t0-63\t0\t\tN/A
"""
"""`nvidia-smi topo -m` of the same machine."""


def test_topology() -> None:
    smi = {"nvidia-smi": {"text": TWO}, "nvidia-smi topo -m": {"text": PAIR}}
    fine = ask("topology", commands=smi)
    assert fine.text == "PHB x1; NUMA nodes 0 (across the processor)"
    marked = PAIR.replace("GPU0\tGPU1\tCPU", "\x1b[4mGPU0\tGPU1\tCPU").replace(
        "ID\n", "ID\x1b[0m\n"
    )
    underlined = {**smi, "nvidia-smi topo -m": {"text": marked}}
    assert ask("topology", commands=underlined).text == fine.text, (
        "as drivers from R550 on print it"
    )
    apart = ask("topology", commands={**smi, "nvidia-smi topo -p2p r": {"text": PEERS}})
    assert (apart.state, apart.text[:30]) == (State.NOTE, "no peer access between GPU 0 a")
    assert "the cards do not do it" in apart.text
    far = ask(
        "topology", commands={**smi, "nvidia-smi topo -m": {"text": PAIR.replace("PHB", "SYS")}}
    )
    assert (far.state, "through host memory" in far.text) == (State.NOTE, True)
    assert ask("topology", commands={"nvidia-smi": {"text": P40}}).text == "one card"


def test_docker_with_the_runtime() -> None:
    answers: dict[str, Any] = {
        "commands": {
            "docker info": {"text": DOCKER},
            "nvidia-smi": {"text": P40},
            "nvidia-ctk --version": {"text": "NVIDIA Container Toolkit CLI version 1.17.6\n"},
            "docker compose version": {"text": "Docker Compose version v2.32.4\n"},
        }
    }
    assert ask("docker", **answers).text == "28.0.0-rc.1, cgroup v2, overlay2"
    assert ask("nvidia-runtime", **answers).text == "registered, toolkit 1.17.6"
    assert ask("compose", **answers).text == "2.32.4"


def test_docker_without_the_toolkit() -> None:
    text = DOCKER.replace(" nvidia", "")
    outcome = ask(
        "nvidia-runtime", commands={"docker info": {"text": text}, "nvidia-smi": {"text": P40}}
    )
    assert outcome.state is State.FAILURE
    assert 'could not select device driver "nvidia"' in outcome.text
    assert "apt-get install -y nvidia-container-toolkit" in outcome.fix[0]
    assert "nvidia-ctk runtime configure" in outcome.fix[1]


@pytest.mark.parametrize(
    ("text", "code", "state", "fix"),
    [
        (
            "permission denied while trying to connect to the Docker daemon socket",
            1,
            State.WARNING,
            "usermod -aG docker",
        ),
        (
            "Server:\nERROR: Cannot connect to the Docker daemon at unix:///var/run/docker.sock.",
            1,
            State.WARNING,
            "systemctl enable --now docker",
        ),
        (DOCKER.replace("28.0.0-rc.1", "18.09.0"), 0, State.FAILURE, "docs.docker.com"),
    ],
)
def test_engines_that_do_not_serve(text: str, code: int, state: State, fix: str) -> None:
    outcome = ask("docker", commands={"docker info": {"code": code, "text": text}})
    assert outcome.state is state
    assert fix in outcome.fix[0]


def test_an_old_compose() -> None:
    answers = {"docker compose version": {"text": "Docker Compose version v2.17.2\n"}}
    assert ask("compose", commands=answers).state is State.WARNING
    missing = {"docker compose version": {"code": 1, "text": "docker: 'compose' is not a command"}}
    assert "docker-compose-plugin" in ask("compose", commands=missing).fix[0]


def test_a_container_that_was_started_without_the_runtime() -> None:
    answers: dict[str, Any] = {
        "files": {"/.dockerenv": ""},
        "variables": {"NVIDIA_VISIBLE_DEVICES": "all"},
    }
    for check in ("driver", "nvidia-runtime"):
        outcome = ask(check, **answers)
        assert outcome.state is State.FAILURE
        assert any("--gpus all" in line for line in outcome.fix)
    answers["variables"] = {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert ask("driver", **answers).state is State.NA


def test_an_open_module_below_a_working_newer_card_is_fine() -> None:
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    table = P40.replace("Tesla P40 ", "NVIDIA L4 ").replace("535.309.01", "580.95.05 ")
    files = {"/proc/driver/nvidia/version": version}
    fine = ask("kernel-module", files=files, commands={"nvidia-smi": {"text": table}})
    assert fine.state is State.OK
    pascal = ask("kernel-module", files=files, commands={"nvidia-smi": {"text": P40}})
    assert pascal.state is State.FAILURE


def test_what_the_module_on_the_disk_tells_where_dmesg_is_closed() -> None:
    """As on Ubuntu, where only root may read the kernel's log."""
    silent = {
        "nvidia-smi": {
            "code": 9,
            "text": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        },
        "dmesg": {"code": 1, "text": "dmesg: read kernel buffer failed: Operation not permitted"},
        "lspci -nn": {
            "text": "02:00.0 3D controller [0302]: NVIDIA Corporation GP102GL [Tesla P40] "
            "[10de:1b38] (rev a1)\n"
        },
        "modinfo -F version nvidia": {"text": "590.48.01\n"},
        "modinfo -F license nvidia": {"text": "NVIDIA\n"},
    }
    new = ask("driver", commands=silent)
    assert new.text.startswith("590.48.01 does not drive Tesla P40")
    silent["modinfo -F version nvidia"] = {"text": "580.95.05\n"}
    assert "nvidia-smi has no answer" in ask("driver", commands=silent).text
    assert ask("kernel-module", commands=silent).state is State.NA
    silent["modinfo -F license nvidia"] = {"text": "Dual MIT/GPL\n"}
    assert ask("kernel-module", commands=silent).state is State.FAILURE


@pytest.mark.parametrize(
    ("version", "name", "state"),
    [
        ("580.95.05 ", "Tesla P40", State.OK),
        ("590.48.01 ", "Tesla P40", State.FAILURE),
        ("590.48.01 ", "NVIDIA L4", State.OK),
        ("450.80.02 ", "Tesla P40", State.WARNING),
        ("450.80.01 ", "Tesla P40", State.FAILURE),
        ("520.61.05 ", "Tesla P40", State.OK),
    ],
)
def test_driver_branches(version: str, name: str, state: State) -> None:
    table = P40.replace("535.309.01", version).replace("Tesla P40", name)
    assert ask("driver", commands={"nvidia-smi": {"text": table}}).state is state


def test_ecc_errors_are_a_failure() -> None:
    table = P40.replace("                    0 |", "                    7 |")
    outcome = ask("ecc", commands={"nvidia-smi": {"text": table}})
    assert (outcome.state, "7 uncorrected" in outcome.text) == (State.FAILURE, True)


@pytest.mark.parametrize(
    ("value", "state"),
    [("0", State.OK), ("1", State.FAILURE), ("", State.FAILURE), ("-1", State.FAILURE)],
)
def test_visible_devices(value: str, state: State) -> None:
    outcome = ask(
        "visible-devices",
        commands={"nvidia-smi": {"text": P40}},
        variables={"CUDA_VISIBLE_DEVICES": value},
    )
    assert outcome.state is state


def test_the_hub() -> None:
    assert ask("hub", reach={"huggingface.co:443": ""}).text == "huggingface.co answers"
    gone = ask("hub", reach={"huggingface.co:443": "its name does not resolve"})
    assert (gone.state, "HF_ENDPOINT" in gone.fix[0]) == (State.WARNING, True)
    mirror = ask(
        "hub",
        variables={"HF_ENDPOINT": "http://mirror.lan:8080"},
        reach={"mirror.lan:8080": ""},
    )
    assert mirror.text == "mirror.lan answers"
    proxied = ask(
        "hub", variables={"HTTPS_PROXY": "http://u:p@proxy.lan:3128"}, reach={"proxy.lan:3128": ""}
    )
    assert proxied.text == "huggingface.co answers through the proxy proxy.lan"
    assert ask("hub", variables={"HF_HUB_OFFLINE": "1"}).state is State.NOTE
    assert ask("hub").state is State.NA
