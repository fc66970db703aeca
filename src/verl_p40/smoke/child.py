"""One check in its process: ``python -m verl_p40.smoke.child PARENT ENTRY CONTEXT.json RESULT.json``.

The result file appears, whole, only when the check came to an end of its own: a process that was
aborted, killed or stuck leaves none, and the parent draws its conclusion from that.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verl_p40.errors import VerlP40Error
from verl_p40.smoke.model import Context, Failed, Finding, Skip
from verl_p40.train.folder import write_whole
from verl_p40.train.process import send_me_when_parent_dies


def main(argv: Sequence[str]) -> int:
    """Run the check; the exit code is 0 whenever there is a result, good or bad."""
    parent, entry, context_file, result_file = argv
    # Not before exec: the parent draws a live view from a thread, and forks.
    send_me_when_parent_dies(signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1
    context = Context.read(json.loads(Path(context_file).read_text(encoding="utf-8")))
    document = run(entry, context)
    write_whole(Path(result_file), json.dumps(document, default=str))
    return 0


def run(entry: str, context: Context) -> dict[str, Any]:
    """``{verdict, text, category, details}`` of one check. Every exception is a failed check."""
    try:
        module, _, name = entry.partition(":")
        function: Callable[[Context], Finding] = getattr(importlib.import_module(module), name)
        found = function(context)
    except Skip as skip:
        return _document("skipped", str(skip))
    except Failed as failure:
        return _document("failed", str(failure), details=failure.details)
    except VerlP40Error as error:
        print(f"error: {error.message}\n  fix: {error.fix}", file=sys.stderr)
        fix = f" - {error.fix}" if error.fix else ""
        return _document("failed", error.message.splitlines()[0] + fix)
    except Exception as error:
        traceback.print_exc()
        words = " ".join(str(error).split())
        return _document("failed", f"{type(error).__name__}: {words}" if words else repr(error))
    return _document("ok", found.text, found.category, dict(found.details))


def _document(
    verdict: str, text: str, category: str = "", details: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"verdict": verdict, "text": text, "category": category, "details": details or {}}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
