"""The training stack: Python, packages, torch, patches, and what would be imported instead."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_p40.doctor import cards as smi
from verl_p40.doctor import fits
from verl_p40.doctor.checks.nvidia import numbers
from verl_p40.doctor.machine import Machine
from verl_p40.doctor.model import Outcome, check, failure, na, note, ok, warning
from verl_p40.errors import VerlP40Error
from verl_p40.hardware.p40 import P40
from verl_p40.kernels.capability import Capability
from verl_p40.stack import contents, env, lockfile, paths, pins
from verl_p40.stack.env import StackEnv

INSTALL = "verl-p40 stack install"
_TORCH = (
    "import json, torch; print(json.dumps({'version': torch.__version__, "
    "'cuda': torch.version.cuda, 'arches': (torch._C._cuda_getArchFlags() or '').split()}))"
)
_CUDA12_DRIVER = "525.60.13"
"""The oldest driver that runs any CUDA 12 (CUDA 12 release notes, minor-version compatibility)."""


def ready() -> StackEnv | None:
    """The environment, or None; what is wrong with VERL_P40_ENV is told by the check ``stack-env``."""
    try:
        return fits.stack_env()
    except VerlP40Error:
        return None


def again(found: StackEnv, flavor: str = "") -> str:
    """The command that puts the pinned packages back."""
    if found.prefix == Path(sys.prefix):
        return "docker compose build --no-cache train   # this environment is an image's"
    name = flavor or found.flavor
    if found.prefix.parent != paths.env_home():
        return f"unset VERL_P40_ENV && {INSTALL} --flavor {name}"
    return f"verl-p40 stack remove --flavor {name} --yes && {INSTALL} --flavor {name}"


def absent() -> Outcome:
    return na("no training stack is installed", INSTALL)


@check("python", "Python", replayable=False)
def python(machine: Machine) -> Outcome:
    supported = pins.load().python.supported
    running = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = ready()
    text = f"{running} runs verl-p40" + (f", {found.record.python} the stack" if found else "")
    if found is not None and found.record.python not in supported:
        return failure(f"{text}: the stack is tested on {', '.join(supported)}", INSTALL)
    if found is None and running not in supported:
        return note(f"{text}; the stack gets one of {', '.join(supported)} of its own", INSTALL)
    return ok(text)


@check("stack-env", "Training stack", limit=20, replayable=False)
def stack(machine: Machine) -> Outcome:
    """An environment of today's lock, of the flavor that this machine needs."""
    try:
        found = fits.stack_env()
    except VerlP40Error as error:
        return failure(error.message, error.fix)
    if found is None:
        return note("not installed: the first run installs it (GB, minutes)", INSTALL)
    text = f"{found.flavor}, Python {found.record.python}, made {found.record.created[:10]}"
    facts: dict[str, Any] = {"flavor": found.flavor, "python": found.record.python}
    if not env.is_current(found):
        return warning(f"{text}, from another lock than this version's", INSTALL, **facts)
    if found.flavor == "cpu" and any(c.profile is P40 for c in smi.cards(machine)):
        return warning(
            f"{text}: the flavor for the CPU, on a machine with a P40",
            f"{INSTALL} --flavor cu118",
            **facts,
        )
    if found.flavor != "cpu" and not smi.cards(machine):
        return note(f"{text}: the flavor for the card, and none is here", **facts)
    return ok(text, **facts)


@check("packages", "Packages against the pins", limit=30, replayable=False)
def packages(machine: Machine) -> Outcome:
    """Every package of the lock, by the metadata that is installed."""
    found = ready()
    if found is None:
        return absent()
    lock = lockfile.parse(lockfile.lock_path(pins.load().flavor[found.flavor].lock))
    major, minor = found.record.python.split(".")
    markers = {
        "python_version": f"{major}.{minor}",
        "python_full_version": f"{major}.{minor}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "extra": "",
    }
    wanted = {item.name: item.version for item in lock if item.applies(markers)}
    installed = contents.packages(found.site_packages)
    missing = sorted(set(wanted) - set(installed))
    other = {
        name: (installed[name], version)
        for name, version in sorted(wanted.items())
        if name in installed and not _same(installed[name], version)
    }
    details = tuple(f"{n}: {have}, pinned {want}" for n, (have, want) in other.items())
    details += tuple(f"{name}: missing, pinned {wanted[name]}" for name in missing)
    if not details:
        return ok(f"{len(wanted)} packages, every one as pinned")
    direct = set(pins.load().packages(found.flavor))
    shown = "; ".join(details[:3]) + (f"; {len(details) - 3} more" if len(details) > 3 else "")
    build = failure if missing or direct & set(other) else warning
    return build(shown, again(found), details=details)


def _same(installed: str, pinned: str) -> bool:
    """``2.6.0+cu124`` is the pinned ``2.6.0`` where the pin has no local part."""
    return installed == pinned or ("+" not in pinned and installed.partition("+")[0] == pinned)


@check("torch", "PyTorch's architectures", limit=90, fast=False, replayable=False)
def torch(machine: Machine) -> Outcome:
    """Whether the installed torch has code for the card, asked in the stack's own Python."""
    found = ready()
    if found is None:
        return absent()
    facts = _torch_facts(found)
    version, cuda, arches = str(facts["version"]), facts.get("cuda"), list(facts["arches"])
    text = f"{version}, CUDA {cuda or 'none'}, {' '.join(arches) or 'no GPU code'}"
    cards = smi.cards(machine)
    if not cuda:
        if cards:
            return failure(f"{text}: built for the CPU", f"{INSTALL} --flavor cu118", **facts)
        return ok(text, **facts)
    wanted = {c.capability for c in cards if c.capability} or {Capability(*P40.compute_capability)}
    codes = [int(arch.split("_")[1]) for arch in arches if re.fullmatch(r"sm_\d+", arch)]
    ptx = [int(arch.split("_")[1]) for arch in arches if re.fullmatch(r"compute_\d+", arch)]
    lacking = [
        cc
        for cc in wanted
        if not any(cc.runs_cubin(sm) for sm in codes) and not any(cc.runs_ptx(sm) for sm in ptx)
    ]
    if lacking:
        return failure(
            f"{text}: nothing for {lacking[0]}, so `no kernel image is available`",
            again(found, "cu118"),
            **facts,
        )
    driver = smi.driver(machine).version
    if driver and cuda.startswith("12.") and numbers(driver) < numbers(_CUDA12_DRIVER):
        return failure(
            f"{text}: CUDA 12 wants driver {_CUDA12_DRIVER}, here is {driver}",
            f"{INSTALL} --flavor cu118",
            **facts,
        )
    return ok(text, **facts)


def _torch_facts(found: StackEnv) -> dict[str, Any]:
    done = subprocess.run(
        [str(found.python), "-c", _TORCH],
        env=found.environ(),
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()
        raise VerlP40Error(
            f"torch cannot be imported: {last[-1] if last else 'no word why'}",
            fix=again(found),
        )
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


@check("patches", "Patch queue", limit=30, replayable=False)
def patches(machine: Machine) -> Outcome:
    """Every file of verl compared with the pinned release and this version's queue."""
    from verl_p40.patches.queue import load_queue
    from verl_p40.patches.tree import tree_state

    found = ready()
    if found is None:
        return absent()
    queue = load_queue()
    state = tree_state(found.site_packages, queue)
    if state.kind == "patched" and state.digest == queue.digest:
        return ok(f"verl {queue.version}, {len(state.patches)} patches, queue {state.digest[:12]}")
    what = {
        "patched": "another version's queue is applied",
        "pristine": "no patch is applied",
        "missing": "verl is not installed",
        "foreign": "files differ: " + ", ".join(str(each) for each in state.files[:3]),
    }[state.kind]
    details = tuple(str(each) for each in state.files)
    if state.kind == "missing" or (state.kind == "foreign" and not state.repairable):
        return failure(f"verl: {what}", again(found), details=details)
    return warning(
        f"verl: {what} (verl-p40 train does it by itself)",
        "verl-p40 patches apply",
        details=details,
    )


@check("audit", "Audit of the installed verl", limit=120, fast=False, replayable=False)
def audit_tree(machine: Machine) -> Outcome:
    """What in it still asks for BF16, FlashAttention or a compiler on the P40's path."""
    found = ready()
    if found is None:
        return absent()
    # A process of its own: seconds of pure computing, which would hold up the other checks.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "verl_p40.cli.main",
            "audit",
            "--json",
            str(found.site_packages / "verl"),
        ],
        env=env_with_us(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    if done.returncode not in (0, 1):
        last = done.stderr.strip().splitlines()
        return warning(f"could not be done: {last[0] if last else 'no word why'}", "verl-p40 audit")
    (report,) = json.loads(done.stdout)["trees"]
    sites = [site for site in report["findings"] if site["status"] == "FAILURE"]
    if sites:
        return failure(
            f"{len(sites)} places still want an Ampere card, first {sites[0]['path']}:"
            f"{sites[0]['line']} ({sites[0]['rule']})",
            "verl-p40 audit",
        )
    return ok(f"{report['files']} files, {len(report['findings'])} places known, none open")


def env_with_us() -> dict[str, str]:
    """Our environment, in which a new Python finds this package too."""
    own = str(paths.package_dir().parent)
    kept = [own, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(kept)}


@check("vllm", "vLLM's GPU code", limit=120, fast=False, replayable=False)
def vllm(machine: Machine) -> Outcome:
    """Whether the installed vLLM was compiled for a P40; the presets do not need vLLM."""
    from verl_p40.kernels.inspect import inspect
    from verl_p40.kernels.verdict import Verdict

    found = ready()
    if found is None:
        return absent()
    if not (found.site_packages / "vllm" / "__init__.py").is_file():
        return na("not installed: the presets roll out with HF transformers", "docs/vllm.md")
    report = inspect("vllm", Capability(*P40.compute_capability), found)
    version = contents.packages(found.site_packages).get("vllm", "?")
    if report.verdict in {Verdict.CANNOT, Verdict.PARTLY, Verdict.UNREADABLE}:
        build = warning if report.verdict is Verdict.PARTLY else failure
        return build(
            f"{version} {report.verdict.value} on a P40 (PyPI's wheel starts at 7.0)",
            "verl-p40 wheel   # compiles it for sm_61",
        )
    return ok(f"{version} {report.verdict.value} on a P40")


@check("shadows", "What shadows the stack's verl", limit=30, replayable=False)
def shadows(machine: Machine) -> Outcome:
    """Folders, editable installs and bytecode that Python would import instead of the patched verl."""
    found = ready()
    if found is None:
        return absent()
    problems = list(_before(found)) + list(_inside(found))
    if problems:
        text, fix = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return failure(text + more, fix, details=tuple(each for each, _ in problems))
    stale = list(_orphans(found.site_packages / "verl"))
    if stale:
        return note(
            f"{len(stale)} bytecode files of sources that are gone (never imported)",
            f"find {found.site_packages / 'verl'} -name __pycache__ -prune -exec rm -r {{}} +",
        )
    return ok("nothing does")


def _before(found: StackEnv) -> Iterator[tuple[str, str]]:
    """What comes before site-packages: the working directory (``python -m``), PYTHONPATH, user site."""
    if (Path.cwd() / "verl" / "__init__.py").is_file():
        yield (
            "the working directory has a verl/ of its own, which `python -m` imports first",
            "cd somewhere else",
        )
    for entry in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if (Path(entry) / "verl" / "__init__.py").is_file():
            yield f"PYTHONPATH has {entry}, with another verl in it", "unset PYTHONPATH"
    user = Path.home() / ".local" / "lib" / f"python{found.record.python}" / "site-packages"
    config = found.prefix / "pyvenv.cfg"
    if (user / "verl").is_dir() and not config.is_file():
        yield f"{user} has another verl", "pip uninstall verl   # of the user's site-packages"


def _inside(found: StackEnv) -> Iterator[tuple[str, str]]:
    site, reinstall = found.site_packages, again(found)
    for folder in site.glob("verl-*.dist-info"):
        try:
            origin = json.loads((folder / "direct_url.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if origin.get("dir_info", {}).get("editable"):
            yield f"verl is an editable install of {origin.get('url')}", reinstall
    for pattern in ("__editable__*verl*", "verl.egg-link"):
        for file in site.glob(pattern):
            if "verl_p40" not in file.name and "verl-p40" not in file.name:
                yield f"{file.name} puts another verl in front", reinstall
    for file in site.glob("*.pth"):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            path = Path(line.strip())
            if path.is_absolute() and (path / "verl" / "__init__.py").is_file():
                yield f"{file.name} adds {path}, with another verl in it", f"rm {file}"
    for file in (site / "verl").rglob("*.pyc"):
        if file.parent.name != "__pycache__" and not file.with_suffix(".py").is_file():
            yield f"{file.name} without its source would be imported", f"rm {file}"


def _orphans(package: Path) -> Iterator[Path]:
    for file in package.rglob("__pycache__/*.pyc"):
        if not (file.parent.parent / f"{file.name.split('.')[0]}.py").is_file():
            yield file
