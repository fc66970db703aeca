"""``environment.json``: what exactly is inside an image, written while it is built.

``python -m verl_p40.stack.contents PREFIX --target train ...`` looks at the environment at
``PREFIX`` (it does not repeat what it was told to install) and writes the file into it, together
with the record that makes it a stack environment (:mod:`verl_p40.stack.record`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

from packaging.utils import canonicalize_name

from verl_p40 import __version__
from verl_p40.errors import TreeError, VerlP40Error
from verl_p40.patches.queue import load_queue
from verl_p40.patches.tree import tree_state
from verl_p40.stack import install, lockfile, pins
from verl_p40.stack.pins import FlavorName
from verl_p40.stack.record import EnvRecord

FILE = "environment.json"
SCHEMA_VERSION = 1
_ARCHITECTURES = "import torch; print(torch._C._cuda_getArchFlags() or '')"


def site_packages(prefix: Path) -> Path:
    """The environment's only ``site-packages``."""
    (folder,) = prefix.glob("lib/python3.*/site-packages")
    return folder


def packages(folder: Path) -> dict[str, str]:
    """Name and version of every distribution installed in ``folder``, by name."""
    found = importlib.metadata.distributions(path=[str(folder)])
    pairs = {canonicalize_name(item.metadata["Name"]): item.version for item in found}
    return dict(sorted(pairs.items()))


def architectures(python: Path) -> list[str]:
    """The GPU architectures that the installed torch has code for (``sm_60``, ...)."""
    done = subprocess.run(
        [python, "-c", _ARCHITECTURES], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def patch_queues(folder: Path) -> list[dict[str, Any]]:
    """The queue that the installed verl carries, every file compared.

    Raises:
        TreeError: verl is not the pinned release with the whole of this version's queue.
    """
    queue = load_queue()
    state = tree_state(folder, queue)
    if state.kind != "patched" or state.digest != queue.digest:
        raise TreeError(state.describe(), fix="verl-p40 patches apply")
    return [
        {
            "project": queue.project,
            "version": queue.version,
            "digest": state.digest,
            "patches": list(state.patches),
        }
    ]


def describe(
    prefix: Path, *, target: str, flavor: FlavorName, base_image: str, revision: str
) -> dict[str, Any]:
    """The document. ``target`` is ``train`` or ``monitor``, which has neither torch nor verl."""
    folder = site_packages(prefix)
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "verl_p40": __version__,
        "revision": revision or None,
        "target": target,
        "flavor": flavor,
        "base_image": base_image,
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "python": platform.python_version(),
    }
    if target == "train":
        lock = lockfile.lock_path(pins.load().flavor[flavor].lock)
        document["lock"] = {"file": lock.name, "sha256": lockfile.digest(lock)}
        document["torch_architectures"] = architectures(prefix / "bin" / "python")
        document["patches"] = patch_queues(folder)
    document["packages"] = packages(folder)
    return document


def write(prefix: Path, document: dict[str, Any]) -> None:
    """Write ``environment.json`` and, for a training image, the environment's record."""
    text = json.dumps(document, indent=2) + "\n"
    (prefix / FILE).write_text(text, encoding="utf-8")
    if document["target"] != "train":
        return
    record = EnvRecord(
        flavor=document["flavor"],
        python=f"{sys.version_info[0]}.{sys.version_info[1]}",
        lock_digest=document["lock"]["sha256"],
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        bytes_on_disk=install.disk_usage(prefix),
    )
    install.write_record(prefix, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix", type=Path)
    parser.add_argument("--target", choices=["train", "monitor"], required=True)
    parser.add_argument("--flavor", choices=get_args(FlavorName), required=True)
    parser.add_argument("--base-image", required=True)
    parser.add_argument("--revision", default="")
    parser.add_argument("--patches-digest", default="", help="what the image's label says")
    args = parser.parse_args()
    expected = load_queue().digest
    if args.patches_digest != expected:
        raise TreeError(
            f"the Dockerfile's PATCHES_DIGEST is {args.patches_digest or 'empty'}, and the queue "
            f"in this source is {expected}: the image's label would be wrong",
            fix="nox -s lock writes it",
        )
    document = describe(
        args.prefix,
        target=args.target,
        flavor=args.flavor,
        base_image=args.base_image,
        revision=args.revision,
    )
    write(args.prefix, document)
    print(f"{args.prefix / FILE}: {len(document['packages'])} packages")


if __name__ == "__main__":
    try:
        main()
    except VerlP40Error as error:
        sys.exit(f"error: {error.message}\n  fix: {error.fix}")
