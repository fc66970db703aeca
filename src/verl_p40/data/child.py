"""Work that needs the training stack, run there and reported here.

The light command starts ``python -m verl_p40.data.<module>`` in a stack environment. The child
says what it does in lines of JSON on standard output, marked so that nothing a library prints is
mistaken for one; the parent turns them into progress, a result, or the child's own error.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from verl_p40 import errors
from verl_p40.errors import DataError, ExitCode, MachineError, VerlP40Error

if TYPE_CHECKING:
    from verl_p40.stack.env import StackEnv

MARK: Final = "verl-p40-data "
_LAST_LINES: Final = 15

Progress = Callable[[str, float | None], None]
"""Told what is being done and the fraction of it that is, None where that is unknown."""


def silent(text: str, fraction: float | None) -> None:
    """A :data:`Progress` that says nothing."""


def say(text: str, fraction: float | None = None) -> None:
    """In the child: report progress."""
    _emit({"progress": text, "fraction": fraction})


def _emit(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)


def serve(work: Callable[[], dict[str, Any]]) -> int:
    """In the child: run ``work`` and report its result or error; returns the exit code."""
    try:
        result = work()
    except VerlP40Error as error:
        _emit({"error": type(error).__name__, "message": error.message, "fix": error.fix})
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except OSError as error:
        traceback.print_exc()
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            words = f"{where}{error.strerror}"
            _emit({"error": "DiskError", "message": words, "fix": "free some space on that disk"})
            return int(ExitCode.DISK)
        _emit({"error": "DataError", "message": f"{where}{error.strerror or error}", "fix": ""})
        return int(ExitCode.DATA)
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return 1
    _emit({"result": result})
    return 0


def call(
    stack_env: StackEnv, module: str, args: Sequence[str], progress: Progress | None = None
) -> dict[str, Any]:
    """In the parent: run ``module`` in ``stack_env`` and return what its ``work`` returned.

    Raises:
        VerlP40Error: the child's own error, of the same class.
        DataError: the child died without one; the message ends with its last line.
        MachineError: the environment's Python does not start.
    """
    progress = progress or silent
    last: deque[str] = deque(maxlen=_LAST_LINES)
    result: dict[str, Any] | None = None
    failure: VerlP40Error | None = None
    try:
        process = stack_env.popen_module(
            module, args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise MachineError(
            f"cannot start {stack_env.python}: {error.strerror or error}",
            fix="verl-p40 stack install",
        ) from error
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith(MARK):
                last.append(line.rstrip())
                continue
            message = json.loads(line[len(MARK) :])
            if "progress" in message:
                progress(message["progress"], message["fraction"])
            elif "result" in message:
                result = message["result"]
            else:
                kind = getattr(errors, message["error"])
                failure = kind(message["message"], fix=message["fix"])
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if failure is not None:
        raise failure
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if result is None:
        words = next((line for line in reversed(last) if line.strip()), "no output")
        raise DataError(
            f"{module} ended with exit code {code}: {words.strip()[:300]}",
            fix=f"see it all with: {' '.join(stack_env.command(module, args))}",
        )
    return result
