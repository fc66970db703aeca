#!/usr/bin/env python3
"""Image sizes and build times: python benchmarks/image.py --base-image IMAGE --flavor cpu

Builds both targets three times: cold (every step again; downloads too, with --cold-downloads), warm
after an edit of our own code, and warm with nothing changed; and weighs the images, unpacked and
compressed as a push sends them. The ratios are against the cold build, and against the same
environment without the `slim` step, weighed in the build itself.

Needs a Docker Engine with BuildKit. `--cold-downloads` empties the builder's cache mounts.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from pathlib import Path

import docker

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("train", "monitor")


def build(target: str, context: Path, args: argparse.Namespace, *extra: str) -> tuple[float, str]:
    """Seconds, and what the builder said."""
    command = [sys.executable, "-m", "verl_p40.cli.main", "image", "build", "--target", target]
    command += ["--tag", tag(target), "--flavor", args.flavor, "--context", str(context)]
    command += ["--build-arg", f"RUNTIME_PACKAGES={args.runtime_packages}", *extra]
    command += ["--base-image", args.base_image] if args.base_image else []
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-4000:]}")
    return time.monotonic() - began, done.stdout


def tag(target: str) -> str:
    return f"verl-p40-benchmark/{target}:latest"


def weigh(client: docker.DockerClient, name: str) -> dict[str, int]:
    """Bytes unpacked and compressed. gzip at its default level is what the engine pushes."""
    image = client.images.get(name)
    compressed = 0
    with tempfile.TemporaryFile() as spool:
        for chunk in image.save(chunk_size=1 << 20):
            spool.write(chunk)
        spool.seek(0)
        with tarfile.open(fileobj=spool) as archive:
            for member in archive:
                # layer.tar, or a blob of an OCI layout, where the other blobs are JSON.
                layer = member.name.endswith("layer.tar") or member.name.startswith("blobs/")
                source = archive.extractfile(member) if layer and member.isfile() else None
                chunk = source.read(1 << 20) if source else b""
                if chunk[:1] in (b"", b"{"):
                    continue
                packer = zlib.compressobj(6, zlib.DEFLATED, 31)
                while source and chunk:
                    compressed += len(packer.compress(chunk))
                    chunk = source.read(1 << 20)
                compressed += len(packer.flush())
    return {"unpacked": int(image.attrs["Size"]), "compressed": compressed}


def edited_copy(folder: Path) -> Path:
    """The clone with one line more in our own code."""
    copy = folder / "clone"
    ignore = shutil.ignore_patterns(
        ".git", ".venv*", ".nox", "__pycache__", "runs", "data", "models"
    )
    shutil.copytree(ROOT, copy, ignore=ignore)
    path = copy / "src" / "verl_p40" / "errors.py"
    path.write_text(path.read_text(encoding="utf-8") + "\n# edited\n", encoding="utf-8")
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-image", default="")
    parser.add_argument("--flavor", default="cu118", choices=["cu118", "cpu"])
    parser.add_argument("--runtime-packages", default="gcc libc6-dev python3-dev")
    parser.add_argument("--cold-downloads", action="store_true")
    parser.add_argument("--no-compressed", action="store_true", help="skip the slow weighing")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    client = docker.from_env(timeout=3600)
    if args.cold_downloads:
        subprocess.run(
            ["docker", "builder", "prune", "--force", "--filter", "type=exec.cachemount"],
            check=True,
            capture_output=True,
        )
    result: dict[str, dict[str, float]] = {name: {} for name in TARGETS}
    for target in TARGETS:
        # The monitor comes second: what it shares with train is in the cache by then.
        extra = ["--no-cache"] if target == "train" else []
        result[target]["cold_s"], said = build(target, ROOT, args, *extra)
        if slimmed := re.search(r"slim: (\d+) MB -> (\d+) MB", said):
            result[target]["before_slim_mb"] = int(slimmed[1])
            result[target]["after_slim_mb"] = int(slimmed[2])
    with tempfile.TemporaryDirectory() as folder:
        copy = edited_copy(Path(folder))
        for target in TARGETS:
            result[target]["edit_s"], _ = build(target, copy, args)
    for target in TARGETS:
        result[target]["unchanged_s"], _ = build(target, ROOT, args)
        if not args.no_compressed:
            result[target].update(weigh(client, tag(target)))
        client.images.remove(tag(target))
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for target, found in result.items():
        print(f"{target}:")
        print(f"  cold build              {found['cold_s']:7.1f} s")
        for name, text in (("edit_s", "after an edit of ours"), ("unchanged_s", "nothing changed")):
            print(
                f"  {text:<22}  {found[name]:7.1f} s   {found['cold_s'] / found[name]:.0f} x faster than cold"
            )
        if "unpacked" in found:
            print(f"  size                    {found['unpacked'] / 1e6:7.0f} MB unpacked")
            print(f"                          {found['compressed'] / 1e6:7.0f} MB compressed")
        if "before_slim_mb" in found:
            before, after = found["before_slim_mb"], found["after_slim_mb"]
            print(
                f"  slim                    {before:.0f} -> {after:.0f} MB, {after / before:.2f} of the same environment without it"
            )


if __name__ == "__main__":
    main()
