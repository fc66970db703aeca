"""The demo's problems and model: made on first use, about a minute of one core, then reused."""

from __future__ import annotations

import json

from verl_p40.data import prepare
from verl_p40.smoke.model import Context, Failed, Finding
from verl_p40.stack import env as stack_env

FILE = "demo.json"
"""In the scratch folder: where the demo's files are, for the checks after this one."""


def check(context: Context) -> Finding:
    stack = stack_env.adopted()
    if stack is None:
        raise Failed("no training stack: VERL_P40_ENV is not set")
    made = prepare.ensure("demo", stack_env=stack, progress=lambda text, _: print(text))
    (context.scratch / FILE).write_text(json.dumps(made.as_json()), encoding="utf-8")
    rows = made.facts["rows"]
    text = f"{rows['train']} problems, a model of {made.facts['parameters']:,} parameters"
    return Finding(text + (", reused" if made.reused else ", made"), "", {"reused": made.reused})


def model_folder(context: Context) -> str:
    """The demo model's folder, as the check above has left it."""
    document = json.loads((context.scratch / FILE).read_text(encoding="utf-8"))
    return str(document["model"])
