"""What a script means to verl: environment, hydra overrides, programs, pip requirements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from verl_p40.audit.settings import shell

_OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
_MODULES = {
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.trainer.main_generation": "generation",
    "verl.trainer.fsdp_sft_trainer": "sft_trainer",
}
_NESTED_SHELLS = frozenset({"bash", "sh", "dash", "zsh"})
_SHELL_FILE = re.compile(r"\.(?:sh|bash)$")
_MAX_NESTING = 5


@dataclass(frozen=True)
class Env:
    name: str
    value: str
    line: int


@dataclass(frozen=True)
class Override:
    """``prefix`` is ``""``, ``+``, ``++`` or ``~``; ``value`` may hold :data:`shell.OPAQUE`."""

    prefix: str
    key: str
    value: str
    line: int

    @property
    def known(self) -> bool:
        return shell.OPAQUE not in self.value

    @property
    def text(self) -> str:
        tail = "" if self.prefix == "~" and not self.value else f"={shown(self.value)}"
        return f"{self.prefix}{self.key}{tail}"


@dataclass
class Run:
    """One start of a verl program."""

    program: str
    module: str
    line: int
    overrides: list[Override] = field(default_factory=list)
    config_name: str = ""
    custom_config: bool = False
    preset: str = ""
    """Started by ``verl-p40 train PRESET``: the defaults are the preset's, not verl's."""


@dataclass
class Meaning:
    env: list[Env] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    commands: list[shell.Command] = field(default_factory=list)
    modules: list[tuple[str, int]] = field(default_factory=list)
    """Modules given to ``python -m``."""
    problems: list[str] = field(default_factory=list)


def shown(text: str) -> str:
    """Text for people: what only a run would know is shown as ``$…``."""
    return text.replace(shell.OPAQUE, "$…")


def understand(text: str, first_line: int = 1, depth: int = 0) -> Meaning:
    """Read a script or a command line."""
    script = shell.parse(text, first_line)
    meaning = Meaning(problems=list(script.problems))
    meaning.env += [Env(a.name, a.value, a.line) for a in script.assignments]
    for command in script.commands:
        meaning.commands.append(command)
        _environment(command, meaning)
        _program(command, meaning)
        if depth < _MAX_NESTING:
            for inner in _nested(command):
                _merge(meaning, understand(inner.text, inner.line, depth + 1))
    return meaning


def _merge(into: Meaning, other: Meaning) -> None:
    into.env += other.env
    into.runs += other.runs
    into.commands += other.commands
    into.modules += other.modules
    into.problems += other.problems


def _nested(command: shell.Command) -> Iterator[shell.Word]:
    """Scripts inside: ``bash -c '...'``, ``bash <<EOF``, ``cat > run.sh <<EOF``."""
    name = command.argv[0].rpartition("/")[2]
    if name in _NESTED_SHELLS:
        for flag, following in zip(command.words, command.words[1:], strict=False):
            if re.fullmatch(r"-\w*c", flag.text):
                yield following
        yield from command.heredocs
    elif any(_SHELL_FILE.search(target) for target in command.targets):
        yield from command.heredocs


def _environment(command: shell.Command, meaning: Meaning) -> None:
    """``env A=b cmd``, ``docker run -e A=b``, ``--env A=b``."""
    name = command.argv[0].rpartition("/")[2]
    for index, word in enumerate(command.words[1:], 1):
        before = command.words[index - 1].text
        flagged = before in {"-e", "--env"} and name in {"docker", "podman", "nerdctl", "srun"}
        if flagged or (name == "env" and all("=" in w for w in command.argv[1 : index + 1])):
            key, equals, value = word.text.partition("=")
            if equals and key.isidentifier():
                meaning.env.append(Env(key, value, word.line))


def _program(command: shell.Command, meaning: Meaning) -> None:
    argv = command.argv
    if len(argv) > 1 and argv[0].rpartition("/")[2] == "verl-p40" and argv[1] == "train":
        rest = command.words[2:]
        preset = next(
            (w.text for w in rest if "=" not in w.text and not w.text.startswith("-")), "?"
        )
        run = _run("verl.trainer.main_ppo", rest)
        run.preset, run.module, run.line = preset, "verl-p40 train", command.line
        meaning.runs.append(run)
        return
    for index, word in enumerate(command.words):
        module = ""
        if word.text == "-m" and index and index + 1 < len(command.words):
            module = command.words[index + 1].text
            launcher = command.words[0].text.rpartition("/")[2]
            if (
                launcher.startswith(("python", "torchrun", "env", "nohup", "time"))
                or "verl" in module
            ):
                meaning.modules.append((module, word.line))
        elif word.text.endswith(".py"):
            path = word.text.removesuffix(".py").replace("/", ".")
            module = next((known for known in _MODULES if path.endswith(known)), "")
        if module in _MODULES:
            meaning.runs.append(_run(module, command.words[index + 1 :]))
            return


def _run(module: str, words: list[shell.Word]) -> Run:
    run = Run(_MODULES[module], module, words[0].line if words else 1)
    skip = False
    for index, word in enumerate(words):
        following = words[index + 1].text if index + 1 < len(words) else ""
        if skip:
            skip = False
            continue
        name, equals, value = word.text.partition("=")
        if name in {"--config-name", "-cn"}:
            run.config_name, skip = (value, False) if equals else (following, True)
            continue
        if name in {"--config-path", "--config-dir", "-cp", "-cd"}:
            run.custom_config, skip = True, not equals
            continue
        match = _OVERRIDE.fullmatch(word.text)
        if match and (match.group(3) is not None or match.group(1) == "~"):
            prefix, key, given = match.groups()
            run.overrides.append(Override(prefix or "", key, given or "", word.line))
    return run


def pip_requirements(command: shell.Command) -> Iterator[tuple[shell.Word, str, str]]:
    """Words of a ``pip install`` that are requirements: the word, the name, the specifier."""
    argv = command.argv
    if "install" not in argv or not re.search(r"(?:^|/)(?:pip3?|uv|python[\d.]*)$", argv[0]):
        return
    if not any(re.fullmatch(r"(?:.*/)?(?:pip3?|uv)", word) for word in argv):
        return
    takes_value = {"-r", "-c", "-i", "-f", "-t", "--index-url", "--extra-index-url", "--find-links",
                   "--requirement", "--constraint", "--target", "--index", "--python", "-p"}  # fmt: skip
    start = argv.index("install") + 1
    for index, word in enumerate(command.words[start:], start):
        if word.text.startswith("-") or argv[index - 1] in takes_value:
            continue
        match = re.fullmatch(r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*((?:[<>=!~].*)?)", word.text)
        if match and not word.text.startswith("."):
            name = re.sub(r"[-_.]+", "-", match.group(1)).lower()
            yield word, name, match.group(2)
