"""A run without a trainer: ``python pretend_run.py FOLDER [CHILDREN] [STEPS_A_SECOND]``.

Holds the folder with the supervisor's own lock, writes steps and events as it does, and has child
processes, until SIGTERM. Prints its process id once it holds the folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from verl_p40.train.folder import RunFolder, write_whole


def main(folder: str, children: int = 2, rate: float = 5.0) -> None:
    run = RunFolder(Path(folder))
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    with run.hold() as lock:
        write_whole(run.env, json.dumps({"total_steps": 60}))
        run.add_event("start", step=0, total=60, pid=os.getpid())
        idle = "import time; junk = bytearray(20_000_000); time.sleep(600)"
        family = [
            subprocess.Popen([sys.executable, "-c", idle], pass_fds=(lock,))
            for _ in range(children)
        ]
        print(os.getpid(), flush=True)
        step = 0
        while not stopped:
            step += 1
            data = {"critic/score/mean": 0.25, "timing_s/step": 1 / rate}
            with run.metrics.open("a") as file:
                file.write(json.dumps({"step": step, "data": data}) + "\n")
            time.sleep(1 / rate)
        for one in family:
            one.kill()
            one.wait()
        run.add_event("failure", step=step, status="interrupted", exit="SIGTERM")


if __name__ == "__main__":
    main(sys.argv[1], *(int(word) for word in sys.argv[2:3]), *(float(w) for w in sys.argv[3:4]))
