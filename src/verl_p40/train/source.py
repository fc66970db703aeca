"""The verl that a run is composed from and started with: the pinned release with our patches."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from verl_p40.errors import TreeError
from verl_p40.patches.queue import load_queue
from verl_p40.patches.release import unpack_wheel
from verl_p40.patches.tree import apply_queue, tree_state
from verl_p40.stack import fetch, paths, pins
from verl_p40.stack.env import StackEnv
from verl_p40.stack.hold import exclusive

_CONFIG = Path("verl") / "trainer" / "config"


def config_folder(stack: StackEnv | None, say: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of verl's ``ppo_trainer.yaml``, patched.

    From the installed stack where that is up to date, else from the pinned wheel alone (7 MB), which
    is fetched by hash, patched once, and kept: a dry run needs no training stack.

    Raises:
        NetworkError, TreeError: the release cannot be had, or the queue does not apply.
    """
    queue = load_queue()
    if stack is not None:
        state = tree_state(stack.site_packages, queue)
        if state.kind == "patched" and state.digest == queue.digest:
            return stack.site_packages / _CONFIG
        if state.kind == "foreign":
            check_tree(stack)
    release = pins.load().find_release("verl")
    trees = paths.cache_home() / "trees"
    target = trees / f"verl-{release.version}-{release.sha256[:8]}-{queue.digest[:12]}"
    if (target / _CONFIG).is_dir():
        return target / _CONFIG
    trees.mkdir(parents=True, exist_ok=True)
    with exclusive(trees / ".lock"):
        if not (target / _CONFIG).is_dir():
            say(f"fetching verl {release.version} for its config")
            wheel = fetch.fetch_pinned("verl")
            scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=trees))
            try:
                apply_queue(unpack_wheel(wheel, scratch, "verl"), queue)
                scratch.replace(target)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return target / _CONFIG


def check_tree(stack: StackEnv) -> str:
    """Make sure that the verl in the stack is the pinned release with this queue.

    Returns:
        The digest of the queue.

    Raises:
        TreeError: naming the files that differ, or the queue that was applied instead.
    """
    queue = load_queue()
    state = tree_state(stack.site_packages, queue)
    if state.kind == "patched" and state.digest == queue.digest:
        return queue.digest
    fix = "verl-p40 patches apply"
    if state.kind == "patched":
        raise TreeError(
            f"{state.tree}/verl carries another patch queue ({state.digest[:12]}, and this "
            f"version has {queue.digest[:12]})",
            fix=fix,
        )
    if state.kind == "foreign" and not state.repairable:
        flavor = f"--flavor {stack.flavor}"
        fix = f"verl-p40 stack remove {flavor} --yes && verl-p40 stack install {flavor}"
    raise TreeError(state.describe(), fix=fix)
