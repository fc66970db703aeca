"""An error that no rule knows is told in the program's own words, and never with certainty."""

from __future__ import annotations

from verl_p40.diagnose import diagnose_lines

UNKNOWN = """\
Traceback (most recent call last):
  File "/env/lib/python3.10/site-packages/flux/core.py", line 20, in start
    raise FluxError("out of plutonium")
flux.errors.FluxError: out of plutonium
""".splitlines()
CHAIN = [
    *UNKNOWN,
    "",
    "The above exception was the direct cause of the following exception:",
    "",
    "Traceback (most recent call last):",
    '  File "/app/run.py", line 3, in <module>',
    "    start()",
    "RuntimeError: the flux capacitor could not be started",
]
STEP = "step:{} - actor/pg_loss:0.1 - critic/score/mean:0.5"


def test_the_first_exception_of_a_chain_is_told_with_its_frame() -> None:
    (cause,) = diagnose_lines(CHAIN).causes
    assert cause.confidence == "low"
    assert "out of plutonium" in cause.text
    assert "flux/core.py, line 20 (start)" in cause.text
    assert [line.number for line in cause.evidence] == [2, 4]


def test_a_known_cause_speaks_instead() -> None:
    known = "RuntimeError: FlashAttention only supports Ampere GPUs or newer."
    causes = diagnose_lines([*UNKNOWN, known]).causes
    assert [cause.kind for cause in causes] == ["flash-attn-arch-unsupported"]


def test_what_training_survived_is_no_cause() -> None:
    assert diagnose_lines([*UNKNOWN, STEP.format(1), STEP.format(2)]).causes == ()


def test_a_run_that_died_after_it_was_told_why_before() -> None:
    died = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
    (cause,) = diagnose_lines([*UNKNOWN, STEP.format(1), died]).causes
    assert "out of plutonium" in cause.text


def test_a_warning_is_not_taken_for_the_end() -> None:
    log = ["WARNING 06-06 14:09:57 [x.py:1] ValueError: no flux found, going on"]
    assert diagnose_lines(log).causes == ()


def test_a_kill_after_an_unknown_error_is_not_the_cause() -> None:
    causes = diagnose_lines([*UNKNOWN, "Killed"]).causes
    assert [cause.kind for cause in causes] == ["error-raised"]


def test_the_frame_in_which_native_code_crashed_is_told() -> None:
    log = [
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread 0x00007f (most recent call first):",
        '  File "/env/lib/python3.10/site-packages/flux/core.py", line 7 in charge',
        '  File "/app/run.py", line 3 in <module>',
    ]
    (cause,) = diagnose_lines(log).causes
    assert cause.kind == "segfault"
    assert "It crashed in flux/core.py, line 7 (charge)." in cause.text


def test_an_error_line_that_lost_its_indentation_is_no_source_line() -> None:
    log = [
        'File "/work/merge.py", line 9, in load',
        "      torch.cat(x)",
        "  ValueError: flux is off",
    ]
    (cause,) = diagnose_lines(log).causes
    assert "flux is off" in cause.text
