"""The host: memory, disk, shared memory, limits, ports, clock."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

from verl_p40.doctor import cards as smi
from verl_p40.doctor import fits
from verl_p40.doctor.machine import RUNS, Machine
from verl_p40.doctor.model import Outcome, check, failure, na, note, ok, warning
from verl_p40.doctor.where import in_container
from verl_p40.plan.host import PROCESSES
from verl_p40.services.start import SMALL_SHM
from verl_p40.stack import pins

GB = 1_000_000_000

_UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2**63 for no limit."""

WANT_FILES = 65_536
"""Open files: what Ray's documentation asks for (``ulimit -n 65536``)."""
FEW_FILES = 4_096

PORTS = {6379: "Ray's GCS (or Redis)", 8265: "Ray's dashboard", 10001: "Ray's client server"}
"""Ray's default ports: https://docs.ray.io/en/latest/ray-core/configure.html#ports-configurations"""


def meminfo(machine: Machine) -> dict[str, int]:
    """Bytes by the names of ``/proc/meminfo``."""
    text = machine.text("/proc/meminfo") or ""
    found = re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)
    return {name: int(value) * 1024 for name, value in found}


def memory_limit(machine: Machine) -> int | None:
    """What the cgroup that we are in may take, v2 then v1; None without a limit."""
    for path in (
        "/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    ):
        text = (machine.text(path) or "").strip()
        if text.isdigit() and int(text) < _UNLIMITED:
            return int(text)
    return None


@check("system", "Operating system")
def system(machine: Machine) -> Outcome:
    """The stack's wheels are for Linux on x86-64 with glibc."""
    release = machine.text("/etc/os-release") or ""
    name = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
    kernel = (machine.text("/proc/sys/kernel/osrelease") or "").strip()
    said = machine.command("uname", "-m")
    if said is None and not kernel:
        return na("not told")
    arch = said.text.strip() if said else "?"
    text = f"{name.group(1) if name else 'Linux'}, kernel {kernel or '?'}, {arch}"
    if arch not in {"x86_64", "?"}:
        return failure(f"{text}: the stack is built for x86_64 only")
    if re.search(r"^ID=\"?alpine", release, re.MULTILINE):
        return failure(
            f"{text}: PyTorch's wheels want glibc, Alpine has musl", "use the image: docs/docker.md"
        )
    if "microsoft" in kernel.lower():
        return note(
            f"{text}: WSL 2, where a P40 needs a driver mode (WDDM) that it does not have by default",
            "Linux on the machine itself, or a virtual machine with the card passed through",
        )
    return ok(text + (", in a container" if in_container(machine) else ""))


@check("memory", "RAM and swap", limit=60, fast=False)
def memory(machine: Machine) -> Outcome:
    """Against the plan of the main preset: offloaded states, a checkpoint on its way, processes."""
    info = meminfo(machine)
    total, available = info.get("MemTotal"), info.get("MemAvailable")
    if total is None or available is None:
        return na("/proc/meminfo was not to be had")
    limit = memory_limit(machine)
    have = min(available, limit) if limit else available
    swap = info.get("SwapFree", 0)
    text = f"{available / GB:.1f} of {total / GB:.1f} GB available, swap {swap / GB:.1f} GB"
    if limit and limit < total:
        text += f", this cgroup may take {limit / GB:.1f} GB"
    on_card = bool(smi.cards(machine))
    plan = fits.main_plan() if on_card else None
    need = sum(plan.host.values()) if plan else PROCESSES
    what = fits.MAIN if plan else "the CPU demo" if not on_card else "Ray with verl"
    facts: dict[str, Any] = {"available": have, "need": need, "swap": swap}
    fix = (
        "docker run --memory=32g ...   # or no limit"
        if limit and limit < total
        else "end other programs, or more swap: sudo fallocate -l 16G /swapfile && sudo chmod 600 "
        "/swapfile && sudo mkswap /swapfile && sudo swapon /swapfile",
        f"verl-p40 plan {fits.MAIN}   # where it goes",
    )
    if have + swap < need:
        return failure(f"{text}; {what} needs about {need / GB:.1f} GB", *fix, **facts)
    if have < need:
        return warning(
            f"{text}; {what} needs about {need / GB:.1f} GB, so it will swap", *fix, **facts
        )
    return ok(f"{text}; {what} needs about {need / GB:.1f} GB", **facts)


@check("cgroup", "cgroup limits")
def cgroup(machine: Machine) -> Outcome:
    """Limits of memory, processors and processes on what runs here."""
    version = 2 if machine.text("/sys/fs/cgroup/cgroup.controllers") is not None else 1
    if version == 1 and not machine.names("/sys/fs/cgroup"):
        return na("no cgroups to be seen")
    told = []
    if limit := memory_limit(machine):
        told.append(f"memory {limit / GB:.1f} GB")
    cpu = (machine.text("/sys/fs/cgroup/cpu.max") or "").split()
    processors = None
    if len(cpu) == 2 and cpu[0].isdigit():
        processors = int(cpu[0]) / int(cpu[1])
    else:
        quota = (machine.text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") or "").strip()
        period = (machine.text("/sys/fs/cgroup/cpu/cpu.cfs_period_us") or "").strip()
        if quota.isdigit() and period.isdigit():
            processors = int(quota) / int(period)
    if processors is not None:
        told.append(f"{processors:.1f} processors")
    pids = ""
    for path in ("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"):
        pids = (machine.text(path) or "").strip()
        if pids.isdigit():
            told.append(f"{pids} processes")
            break
    text = f"v{version}, " + (", ".join(told) if told else "no limits")
    if processors is not None and processors < 1.5:
        return warning(
            f"{text}: Ray's helpers and verl want two", "docker run --cpus=4 ...   # or none"
        )
    if pids.isdigit() and int(pids) < 1000:
        return warning(
            f"{text}: Ray and PyTorch start some hundreds of threads",
            "docker run --pids-limit=-1 ...",
        )
    return ok(text)


@check("shm", "/dev/shm")
def shm(machine: Machine) -> Outcome:
    """Ray's object store and NCCL's buffers. Docker's default is 64 MB."""
    space = machine.space("/dev/shm")
    if space is None:
        return na("/dev/shm was not to be looked at")
    text = f"{space.free / GB:.2f} of {space.total / GB:.2f} GB free"
    fix = (
        "docker run --shm-size=8gb ...   # in .env: VERL_P40_SHM_SIZE=8gb"
        if in_container(machine)
        else "sudo mount -o remount,size=8G /dev/shm"
    )
    if space.total < SMALL_SHM:
        return warning(f"{text}: Ray keeps what does not fit on the disk, slowly", fix)
    if space.free < SMALL_SHM:
        return warning(f"{text}: someone fills it", "ls -lhS /dev/shm | head", fix)
    return ok(text)


@check("disk", "Disk for checkpoints", limit=60, fast=False)
def disk(machine: Machine) -> Outcome:
    """Against what the main preset keeps of checkpoints; without it, a checkpoint of 12 GB."""
    space = machine.space(RUNS)
    if space is None:
        return na("the disk of the runs was not to be looked at")
    on_card = bool(smi.cards(machine))
    plan = fits.main_plan() if on_card else None
    need = 1 * GB if not on_card else 25 * GB
    if plan is not None and plan.disk.total:
        need = plan.disk.total
    what = f"{fits.MAIN} keeps" if on_card else "the CPU demo keeps"
    text = f"{space.free / GB:.0f} GB free for runs; {what} up to {need / GB:.0f} GB"
    facts: dict[str, Any] = {"free": space.free, "need": need}
    fix = (
        "verl-p40 train ... --runs-dir /larger/disk   # or VERL_P40_RUNS=/larger/disk",
        "keep one: trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=1",
    )
    if space.free < need / 2:
        return failure(text, *fix, **facts)
    if space.free < need + GB:
        return warning(text, *fix, **facts)
    return ok(text, **facts)


@check("ulimits", "ulimits")
def ulimits(machine: Machine) -> Outcome:
    """Open files, processes, locked memory of this shell (``/proc/self/limits``)."""
    text = machine.text("/proc/self/limits") or ""
    found = {
        name.strip(): soft
        for name, soft in re.findall(r"^(Max [\w ]+?)\s{2,}(\d+|unlimited)", text, re.MULTILINE)
    }
    if not found:
        return na("/proc/self/limits was not to be had")

    def value(name: str) -> float:
        soft = found.get(name, "unlimited")
        return float("inf") if soft == "unlimited" else float(soft)

    files, processes = value("Max open files"), value("Max processes")
    told = f"{found.get('Max open files', '?')} open files, {found.get('Max processes', '?')} processes"
    fix = f"ulimit -n {WANT_FILES}"
    if in_container(machine):
        fix = f"docker run --ulimit nofile={WANT_FILES} ...   # or, if root allows it: {fix}"
    if files < FEW_FILES:
        return warning(
            f"{told}: Ray opens a socket and files for every worker and wants {WANT_FILES}", fix
        )
    if processes < 4096:
        return warning(f"{told}: threads count, and there will be hundreds", "ulimit -u unlimited")
    if files < WANT_FILES:
        return note(f"{told}: Ray's documentation asks for {WANT_FILES}", fix)
    return ok(told)


def listening(machine: Machine) -> set[int]:
    """TCP ports that something listens on here (proc_net_tcp: state 0A)."""
    found = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (machine.text(path) or "").splitlines()[1:]:
            cells = line.split()
            if len(cells) > 3 and cells[3] == "0A":
                found.add(int(cells[1].rpartition(":")[2], 16))
    return found


@check("ports", "Ray's ports and clusters")
def ports(machine: Machine) -> Outcome:
    """A Ray that runs already: `verl-p40 train` keeps apart from it, a bare verl command joins it."""
    address = machine.variable("RAY_ADDRESS")
    if address:
        return warning(
            f"RAY_ADDRESS={address}: a bare verl command joins that cluster (verl-p40 train does "
            "not)",
            "unset RAY_ADDRESS",
        )
    if machine.text("/proc/net/tcp") is None:
        return na("/proc/net/tcp was not to be had")
    taken = sorted(listening(machine) & set(PORTS))
    current = (machine.text("/tmp/ray/ray_current_cluster") or "").strip()
    if taken and current:
        return warning(
            f"a Ray cluster runs here ({current}): a bare verl command joins it (verl-p40 train "
            "does not)",
            "ray stop   # if nobody needs it",
        )
    if taken:
        told = ", ".join(f"{port} ({PORTS[port]})" for port in taken)
        return note(f"taken: {told}; verl-p40 train chooses other ones", "ss -ltnp")
    return ok(f"{', '.join(map(str, PORTS))} are free, no other cluster")


@check("clock", "Clock")
def clock(machine: Machine) -> Outcome:
    """A wrong clock makes every certificate invalid."""
    if machine.live:
        earliest = datetime.fromisoformat(pins.load().train.exclude_newer.replace("Z", "+00:00"))
        if time.time() < earliest.timestamp():
            return failure(
                f"it is {datetime.now():%Y-%m-%d} here, before the stack was made: certificates "
                "will be refused",
                "sudo timedatectl set-ntp true",
            )
    said = machine.command("timedatectl", "show")
    if said is None or said.code != 0:
        if not machine.live:
            return na("not told")
        return ok(
            f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}; nothing here says if it is set by NTP"
        )
    if "NTPSynchronized=no" in said.text:
        return note("not synchronised by NTP", "sudo timedatectl set-ntp true")
    return ok("synchronised")
