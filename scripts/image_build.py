"""Steps of the Dockerfile that are more than a line: python3 scripts/image_build.py STEP ...

    uv DESTINATION              get the pinned uv, by hash
    install PREFIX LOCK [--only NAME ... | --without NAME ...]
                                make an environment at PREFIX and install a hashed lock into it
                                (--only takes patterns: 'nvidia-*')
    triton PREFIX VERSION       install another Triton than the lock's, by hash; empty: the lock's
    slim SITE_PACKAGES          remove what no run needs
    run COMMAND ...             run a command that uses the network

Standard library only. A certificate authority for the network comes as the build secret `ca`,
indexes as PYPI_INDEX and TORCH_INDEX; nothing of them stays in a layer.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import bootstrap

SECRET_CA = Path("/run/secrets/ca")
UV = {
    "UV_CACHE_DIR": "/var/cache/uv",
    # Compiled here once, not in every container that starts.
    "UV_COMPILE_BYTECODE": "1",
    "UV_HTTP_TIMEOUT": "300",
    "UV_LINK_MODE": "copy",
    "UV_PYTHON_DOWNLOADS": "never",
}

# What torch, ray, numpy and others carry for building or testing against them. Not: the headers
# that Triton compiles its launchers with (triton/backends/nvidia/include).
UNNEEDED = (
    "numpy/**/tests",
    "nvidia/*/include",
    "pandas/tests",
    "pyarrow/include",
    "pyarrow/tests",
    "ray/jars",
    "tests",
    "torch/include",
    "torch/share",
    "triton/_C/libproton.so",
    "triton/instrumentation",
)


def environment() -> dict[str, str]:
    env = {**os.environ, **UV}
    if SECRET_CA.is_file() and SECRET_CA.stat().st_size:
        for variable in bootstrap.CA_VARIABLES:
            env[variable] = str(SECRET_CA)
    if env.get("PYPI_INDEX"):
        env["UV_DEFAULT_INDEX"] = env["PYPI_INDEX"]
    return env


def uv(*arguments: str) -> None:
    subprocess.run([bootstrap.get_uv(), *arguments], check=True)


def install(prefix: Path, lock: str, only: list[str], without: list[str]) -> None:
    """Every file by hash; which index serves it therefore does not matter."""
    if not prefix.exists():
        uv("venv", "--quiet", "--relocatable", str(prefix))
    common = ["pip", "install", "--python", str(prefix / "bin" / "python"), "--require-hashes"]
    common += ["--no-deps", "--no-build-isolation"]
    names = bootstrap.lock_names(lock)
    matching = {pattern: fnmatch.filter(names, pattern) for pattern in {*only, *without}}
    unknown = [pattern for pattern, found in matching.items() if not found]
    if unknown:
        raise bootstrap.BootstrapError(
            f"{lock} has no {', '.join(sorted(unknown))}", "correct --only or --without"
        )
    chosen_names = {name for found in matching.values() for name in found}
    wanted = chosen_names if only else names - chosen_names
    # Local versions (2.6.0+cu118) are on the PyTorch index alone, which is asked for nothing else.
    local = {n for n, lines in bootstrap.lock_blocks(lock) if "+" in lines.split(";")[0]}
    groups = [
        (wanted & local, ["--default-index", os.environ.get("TORCH_INDEX", "")]),
        # The packages without a wheel are built with this one.
        (wanted & {"setuptools"}, []),
        (wanted - local - {"setuptools"}, []),
    ]
    for chosen, options in groups:
        if chosen:
            with tempfile.TemporaryDirectory() as scratch:
                part = Path(scratch, lock)
                part.write_text(bootstrap.lock_lines(lock, tuple(chosen)), encoding="utf-8")
                uv(*common, *options, "-r", str(part))
    # uv's, and anybody could write to it.
    (prefix / ".lock").unlink(missing_ok=True)


def triton(prefix: Path, version: str) -> None:
    """torch's own Triton is in the CPU lock; the cu118 lock overrides it."""
    lock = "train-cpu.txt"
    if not version:
        return
    (there,) = (text for name, text in bootstrap.lock_blocks(lock) if name == "triton")
    locked = there.split("==")[1].split()[0].rstrip(";")
    if version != locked:
        raise bootstrap.BootstrapError(
            f"TRITON={version}: the locks have the pinned one and {locked}",
            f"--build-arg TRITON={locked}, or leave it out",
        )
    install(prefix, lock, ["triton"], [])


def slim(site_packages: Path) -> None:
    before = size(site_packages)
    for pattern in UNNEEDED:
        for path in list(site_packages.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    # 380 MB of libtriton.so (3.2.0) is debug information. The code stays as it is.
    for path in site_packages.glob("triton/_C/*.so"):
        subprocess.run([*strip(), "--strip-debug", str(path)], check=True)
    print(f"slim: {before / 1e6:.0f} MB -> {size(site_packages) / 1e6:.0f} MB")


def strip() -> list[str]:
    """``strip`` of the builder, which is mounted: its libraries are found only if named."""
    mounted = bootstrap.ROOT.parent
    if mounted == Path("/"):
        return ["strip"]
    libraries = f"{mounted}/usr/lib/x86_64-linux-gnu"
    return ["env", f"LD_LIBRARY_PATH={libraries}", f"{mounted}/usr/bin/strip"]


def size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("uv").add_argument("destination", type=Path)
    into = steps.add_parser("install")
    into.add_argument("prefix", type=Path)
    into.add_argument("lock", help="name of a file in locks/")
    into.add_argument("--only", nargs="*", default=[])
    into.add_argument("--without", nargs="*", default=[])
    other = steps.add_parser("triton")
    other.add_argument("prefix", type=Path)
    other.add_argument("version", help="empty leaves the lock's")
    steps.add_parser("run").add_argument("command", nargs=argparse.REMAINDER)
    steps.add_parser("slim").add_argument("site_packages", type=Path)
    args = parser.parse_args()
    os.environ.update(environment())
    bootstrap.WORK.mkdir(exist_ok=True)
    if args.step == "uv":
        shutil.copy2(bootstrap.get_uv(), args.destination)
    elif args.step == "install":
        install(args.prefix, args.lock, args.only, args.without)
    elif args.step == "triton":
        triton(args.prefix, args.version)
    elif args.step == "run":
        subprocess.run(args.command, check=True)
    else:
        slim(args.site_packages)


if __name__ == "__main__":
    try:
        main()
    except bootstrap.BootstrapError as error:
        sys.exit(f"error: {error}\n  fix: {error.fix}")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
