"""verl in the stack: the pinned release with today's patch queue, every file compared."""

from __future__ import annotations

from verl_p40.smoke.model import Context, Failed, Finding
from verl_p40.stack import env as stack_env
from verl_p40.train import source


def check(context: Context) -> Finding:
    """Raises TreeError with the files that differ."""
    stack = stack_env.adopted()
    if stack is None:
        raise Failed("no training stack: VERL_P40_ENV is not set")
    digest = source.check_tree(stack)
    return Finding(f"patch queue {digest[:12]}, every file as it should be", "", {"digest": digest})
