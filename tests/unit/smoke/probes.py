"""Checks that end in every way a check can end. Imported in processes of their own."""

from __future__ import annotations

import ctypes
import getpass
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from verl_p40.errors import TreeError
from verl_p40.smoke.model import Context, Failed, Finding, Skip

PRIVATE = "uuid GPU-8c1b7a52-6f0e-4f0e-9f5d-0a1b2c3d4e5f on 0000:3B:00.0, serial 0324617012345"


def good(context: Context) -> Finding:
    return Finding(f"computed on {context.device}", context.category, {"pid": os.getpid()})


def skipping(context: Context) -> Finding:
    raise Skip("there is nothing to see here")


def failing(context: Context) -> Finding:
    print("some output")
    raise Failed("two and two are five", {"sum": 5})


def raising(context: Context) -> Finding:
    raise ValueError("a line\nand another")


def our_error(context: Context) -> Finding:
    raise TreeError("verl is not patched", fix="verl-p40 patches apply")


def abort(context: Context) -> Finding:
    print("LLVM ERROR: Cannot select: shfl.sync.bfly", file=sys.stderr, flush=True)
    os.abort()


def segfault(context: Context) -> Finding:
    ctypes.string_at(0)
    return Finding("not reached")


def killed(context: Context) -> Finding:
    os.kill(os.getpid(), signal.SIGKILL)
    return Finding("not reached")


def quiet_exit(context: Context) -> Finding:
    print("last words", flush=True)
    os._exit(3)


def hang(context: Context) -> Finding:
    """Deaf to SIGTERM, with a child of its own that hangs too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (context.scratch / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    return Finding("not reached")


def leaving(context: Context) -> Finding:
    """Leaves a process behind."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (context.scratch / "pids").write_text(str(child.pid))
    return Finding("done")


def dying_late(context: Context) -> Finding:
    """Passes, and the process crashes on its way out, as a broken GPU library makes it."""
    import atexit

    atexit.register(os.abort)
    return Finding("done")


def personal(context: Context) -> Finding:
    """Fails with everything that must not be in a report."""
    here = Path.cwd()
    for line in (
        f"host {socket.gethostname()} user {getpass.getuser()} home {Path.home()}",
        f'File "{here}/thing.py", line 3, in main',
        "cannot open '/mnt/disk-of-jane/models/secret.bin' from 192.168.7.31 or fe80::1ff:fe23:4567:890a",
        "mirror https://jane:pw12345@mirror.example.test/simple, hf_abcdefghijklmnop",
        PRIVATE,
        f"key={os.environ.get('MY_API_KEY', '')} mail jane.doe@example.test",
    ):
        print(line)
    raise Failed(
        f"{here}/thing.py failed on {socket.gethostname()}: {PRIVATE}", {"home": str(Path.home())}
    )


def needs_the_scratch(context: Context) -> Finding:
    (context.scratch / "seen").write_text("x")
    return Finding("written")
