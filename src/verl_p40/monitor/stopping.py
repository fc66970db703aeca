"""A wait that a signal ends at once."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Stop:
    """Whether the monitor has been asked to end. Waiting on it ends at the signal."""

    def __init__(self) -> None:
        self.asked = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def ask(self) -> None:
        """Safe in a signal handler: no lock is taken."""
        if not self.asked:
            self.asked = True
            os.write(self._write, b".")

    def is_asked(self) -> bool:
        return self.asked

    def wait(self, seconds: float) -> bool:
        """Wait that long, or until it is asked. Returns whether it is."""
        if not self.asked and seconds > 0:
            select.select([self._read], [], [], seconds)
        return self.asked

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """SIGINT, SIGTERM and SIGHUP ask to stop, instead of ending the process where it is."""
    stop = Stop()

    def handle(number: int, frame: object) -> None:
        stop.ask()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop.close()
