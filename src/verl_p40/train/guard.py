"""Between supervisor and trainer: ``python -m verl_p40.train.guard PARENT LOCK_FD GRACE COMMAND...``

Ray's workers notice a killed raylet only after a minute, unless their new parent is process 1,
which it is not under systemd's user sessions or in many containers. So a supervisor killed with
``kill -9`` would leave them computing. The guard is told of that death by the kernel, is the
parent that all orphans of the trainer come back to, and ends only when none is left. It holds the
run folder's lock until then: whoever gets the lock next meets no leftovers.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from verl_p40.train import process

_POLL = 0.1


def main(argv: Sequence[str]) -> int:
    """Run the command; returns its exit code, or dies of the signal that it died of."""
    parent, lock, grace = int(argv[0]), int(argv[1]), float(argv[2])
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, frame: asked.append(got))
    process.become_subreaper()
    process.send_me_when_parent_dies(signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    trainer = subprocess.Popen(
        argv[3:],
        pass_fds=(lock,),
        preexec_fn=process.die_with(os.getpid()),
        stdin=subprocess.DEVNULL,
    )
    while trainer.poll() is None and not asked and os.getppid() == parent:
        time.sleep(_POLL)
    orphaned = os.getppid() != parent
    process.stop(trainer, grace=0.0 if orphaned else grace)
    process.sweep(patience=0.0 if orphaned else 5.0)
    code = int(trainer.returncode)
    if code < 0:
        # Die of the same, without a core file of our own.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
