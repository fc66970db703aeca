"""The shell reader, on what training scripts are made of."""

from __future__ import annotations

import time

import pytest

from verl_p40.audit.settings.shell import OPAQUE, parse

SCRIPT = """#!/usr/bin/env bash
set -euxo pipefail   # stop early
export A=1 B="two words" C='$A'
D=$A${B}x
N=${N:-4}
ARGS=(
    data.train_batch_size=$N  # a comment
    "trainer.logger=['console']"
)
ARGS+=(x.y=z)
if [ -f "$HOME/x" ]; then
    CUDA_VISIBLE_DEVICES=0,1 python3 -m verl.trainer.main_ppo \\
        data.path=$UNKNOWN/x \\
        a.b=`date` c.d="$(date +%s)" \\
        "${ARGS[@]}" "$@" > out.log 2>&1 &
fi
cat <<-EOF > run.sh
\texport X=1
\tEOF
for i in 1 2; do echo "$i"; done
sed -i 's/"a"/"b"/' f.py && echo done | tee -a log
"""


def test_script() -> None:
    script = parse(SCRIPT)
    assert script.problems == []
    assigned = {a.name: a.value for a in script.assignments}
    assert assigned["B"] == "two words"
    assert assigned["C"] == "$A"
    assert assigned["D"] == "1two wordsx"
    assert assigned["N"] == "4"
    assert {a.name for a in script.assignments if a.exported} == {"A", "B", "C"}
    run = next(c for c in script.commands if c.argv[0] == "python3")
    assert run.line == 12
    assert [(p.name, p.value) for p in run.prefix] == [("CUDA_VISIBLE_DEVICES", "0,1")]
    assert run.argv == [
        "python3", "-m", "verl.trainer.main_ppo", f"data.path={OPAQUE}/x", f"a.b={OPAQUE}",
        f"c.d={OPAQUE}", "data.train_batch_size=4", "trainer.logger=['console']", "x.y=z", OPAQUE,
    ]  # fmt: skip
    assert [w.line for w in run.words if w.text == "data.train_batch_size=4"] == [7]
    assert run.targets == ["out.log"]
    here = next(c for c in script.commands if c.argv[0] == "cat")
    assert (here.targets, here.heredocs[0].text, here.heredocs[0].line) == (
        ["run.sh"], "\texport X=1\n", 18,
    )  # fmt: skip
    assert ["sed", "-i", 's/"a"/"b"/', "f.py"] in [c.argv for c in script.commands]
    assert ["tee", "-a", "log"] in [c.argv for c in script.commands]


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("a b\\ c", ["a", "b c"]),
        ("a 'b'\"c\"d", ["a", "bcd"]),
        ('a "b \\" c"', ["a", 'b " c']),
        ('a ""', ["a", ""]),
        ("a x=$'t\\n'", ["a", "x=t\\n"]),
        ("a b#c # d", ["a", "b#c"]),
        ("a \\\n  b", ["a", "b"]),
        ("a trainer.logger=[console,wandb]", ["a", "trainer.logger=[console,wandb]"]),
        ("a '+x={a: 1}'", ["a", "+x={a: 1}"]),
        ("a $((1+2)) ${X:+y}", ["a", OPAQUE, OPAQUE]),
        ("a ${X:=v} ${X-$Y}", ["a", "v", OPAQUE]),
        ("a 2>/dev/null b", ["a", "b"]),
        ("a <<< word b", ["a", "b"]),
        ("a\r\n", ["a"]),
    ],
)
def test_words(text: str, argv: list[str]) -> None:
    assert parse(text).commands[0].argv == argv


def test_an_assignment_for_one_command_does_not_outlive_it() -> None:
    script = parse("X=1 a $X\nX=2\nb $X")
    assert [c.argv for c in script.commands] == [["a", OPAQUE], ["b", "2"]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a 'b", "no closing '"),
        ('a "b', 'no closing "'),
        ("a $(b", "no closing )"),
        ("a <<EOF\nb\n", "no EOF"),
        ("x=(a b", "no closing )"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, problem: str) -> None:
    assert any(problem in line for line in parse(text).problems)


def test_every_prefix_and_every_hole_of_a_script_ends_quickly() -> None:
    started = time.process_time()
    for cut in range(len(SCRIPT)):
        parse(SCRIPT[:cut])
        if cut % 3 == 0:
            parse(SCRIPT[:cut] + SCRIPT[cut + 1 :])
    for odd in (
        "(" * 500,
        "${" * 500,
        "$(" * 500,
        "`" * 501,
        "<" * 500,
        ")" * 500,
        "\\",
        "$",
        "&&&|;;",
    ):
        parse(odd)
    assert time.process_time() - started < 60
