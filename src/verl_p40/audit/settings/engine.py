"""Applies the settings rules to a command, a script or an environment."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from verl_p40.audit import reviewed
from verl_p40.audit.settings import keys as verl_keys
from verl_p40.audit.settings import paths_check
from verl_p40.audit.settings.commands import (
    Env,
    Meaning,
    Override,
    Run,
    pip_requirements,
    shown,
    understand,
)
from verl_p40.audit.settings.model import KINDS, RuleBook, SettingFinding, SettingRule, rule_book

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_EXPAND = re.compile(r"\{(\w+)\}")


def check_command(text: str, book: RuleBook | None = None) -> list[SettingFinding]:
    """Findings of a script or a command line, worst first within each line order.

    Args:
        text: the script. It is read, never run.
        book: the rules; the shipped ones by default.
    """
    book = book or rule_book()
    meaning = understand(text)
    found = list(_env_findings(meaning.env, book, _vllm(meaning)))
    for run in meaning.runs:
        found += _run_findings(run, book, meaning.env)
    found += _command_findings(meaning, book)
    found += paths_check.findings(meaning)
    return _sorted(found)


def check_environment(
    environment: Mapping[str, str], book: RuleBook | None = None
) -> list[SettingFinding]:
    """Findings of an environment such as ``os.environ``; the line of each is 0."""
    env = [Env(name, value, 0) for name, value in environment.items()]
    return _sorted(_env_findings(env, book or rule_book(), vllm=None))


def problems(text: str) -> list[str]:
    """What of the script could not be read, one sentence each."""
    return understand(text).problems


def _sorted(found: Any) -> list[SettingFinding]:
    unique = list(dict.fromkeys(found))
    return sorted(unique, key=lambda f: (f.line, KINDS.index(f.kind), f.setting))


def _vllm(meaning: Meaning) -> bool | None:
    """Whether the runs use the vLLM rollout; None when no run says."""
    names = {
        value
        for run in meaning.runs
        if (value := Effective(run).text("actor_rollout_ref.rollout.name"))
    }
    return "vllm" in names if names else None


def unquoted(override: Override) -> str:
    return override.value.strip().strip("'\"")


class Effective:
    """The values a run ends up with: what the command gives, else verl's default."""

    def __init__(self, run: Run) -> None:
        self.keys = verl_keys.load(run.program)
        self.given = {o.key: o for o in run.overrides if o.prefix != "~"}
        self._defaults = {} if run.preset or run.custom_config else self.keys.defaults

    def text(self, key: str) -> str | None:
        """The value as text, None when nobody can know (or there is none)."""
        for _ in range(10):  # a value may refer to another key, given or not
            override = self.given.get(key)
            if override is not None and not override.known:
                return None
            value = unquoted(override) if override else self._defaults.get(key)
            reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
            if reference is None:
                return None if value is None or "${" in str(value) else str(value)
            key = reference.group(1)
        return None

    def number(self, key: str) -> float | None:
        text = self.text(key)
        try:
            return None if text is None else float(text)
        except ValueError:
            return None


# -- environment ----------------------------------------------------------------------------


def _env_findings(env: list[Env], book: RuleBook, vllm: bool | None) -> Iterator[SettingFinding]:
    for variable in env:
        named = [rule for rule in book.rules if rule.env and re.fullmatch(rule.env, variable.name)]
        for rule in named:
            if shown(variable.value) != variable.value and (rule.value or rule.not_value):
                continue
            if rule.value_matches(variable.value) and _env_applies(rule, vllm):
                yield _finding(rule, f"{variable.name}={shown(variable.value)}", variable.line)
        if not named:
            yield from _unread(variable, book)


def _env_applies(rule: SettingRule, vllm: bool | None) -> bool:
    """A rule that needs the vLLM rollout is silent when the script is known not to use it."""
    return vllm is not False or not any(
        c.key == "actor_rollout_ref.rollout.name" for c in rule.when
    )


def _unread(variable: Env, book: RuleBook) -> Iterator[SettingFinding]:
    for family in book.environments:
        if not variable.name.startswith(family.prefix) or variable.name in family.names:
            continue
        if family.except_ and variable.name.startswith(family.except_):
            continue
        near = difflib.get_close_matches(variable.name, family.names, n=1, cutoff=0.8)
        yield SettingFinding(
            kind="no-op",
            rule="env-unread",
            setting=f"{variable.name}={shown(variable.value)}",
            line=variable.line,
            message=f"{family.reader} reads no variable of this name",
            replacement=f"{near[0]}, if that is what is meant" if near else "",
            source=f"searched: {family.reader}",
        )
        return


# -- overrides ------------------------------------------------------------------------------


def _run_findings(run: Run, book: RuleBook, env: list[Env]) -> Iterator[SettingFinding]:
    effective = Effective(run)
    covered: set[str] = set()
    for rule in book.rules:
        if rule.key and run.program == "ppo_trainer":
            for found, key in _key_findings(rule, run, effective):
                covered.add(key)
                yield found
        elif rule.compare and run.program == "ppo_trainer":
            yield from _comparison(rule, run, effective)
    if run.config_name not in {"", "ppo_trainer"}:
        yield from _config_name(run)
        return
    for override in run.overrides:
        if override.key in covered:
            continue
        if not any(_selects(rule, override.key) for rule in book.rules):
            yield from _guard(override)
        if not run.custom_config:
            yield from _unknown(override, effective.keys)


def _key_findings(
    rule: SettingRule, run: Run, effective: Effective
) -> Iterator[tuple[SettingFinding, str]]:
    if not _holds(rule, effective):
        return
    seen = False
    for override in run.overrides:
        if _selects(rule, override.key):
            seen = True
            value = unquoted(override)
            if (override.known or not (rule.value or rule.not_value)) and rule.value_matches(value):
                yield _finding(rule, override.text, override.line, override.key), override.key
    if rule.default_counts and not seen:
        for key in rule.key:
            value_text = effective.text(key)
            if value_text is not None and rule.value_matches(value_text):
                yield _finding(rule, f"{key}={value_text} (the default)", run.line, key), key


def _selects(rule: SettingRule, key: str) -> bool:
    return any(reviewed.glob_regex(glob).fullmatch(key) for glob in rule.key)


def _holds(rule: SettingRule, effective: Effective) -> bool:
    for condition in rule.when:
        if condition.unset:
            if condition.key in effective.given:
                return False
            continue
        value = effective.text(condition.key)
        if value is None or not re.fullmatch(condition.value, value, re.IGNORECASE):
            return False
    return True


def _comparison(rule: SettingRule, run: Run, effective: Effective) -> Iterator[SettingFinding]:
    compare = rule.compare
    if compare is None or not _holds(rule, effective):
        return
    involved = (*compare.left, *compare.right, *compare.product)
    if not any(key in effective.given for key in involved):
        return
    numbers = {key: effective.number(key) for key in involved}
    if any(value is None for value in numbers.values()):
        return
    values = {key: value for key, value in numbers.items() if value is not None}
    left, right = sum(values[k] for k in compare.left), sum(values[k] for k in compare.right)
    for key in compare.product:
        left *= values[key]
    bad = {
        "<": left < right,
        ">": left > right,
        "not-multiple": right > 0 and left % right != 0,
    }[compare.op]
    if bad:
        given = [effective.given[key] for key in involved if key in effective.given]
        shown_values = " ".join(f"{key}={values[key]:g}" for key in dict.fromkeys(involved))
        message = f"{' '.join(rule.message.split())} Here: {shown_values}."
        yield SettingFinding(
            rule.kind, rule.id, given[0].text, given[0].line, message, rule.replacement, rule.source
        )


def _unknown(override: Override, known: verl_keys.Keys) -> Iterator[SettingFinding]:
    """Keys that nobody reads, and prefixes that hydra refuses."""
    key, prefix = override.key, override.prefix
    if "@" in key or "/" in key or prefix == "~" or key.startswith("hydra."):
        return  # config groups, removals, hydra's own settings
    source = "hydra 1.3 override grammar; verl 0.4.1 " + known.program + ".yaml and code"
    if known.in_yaml(key):
        if (
            prefix == "+"
            and not isinstance(known.defaults.get(key), dict)
            and key in known.defaults
        ):
            yield SettingFinding(
                "wrong", "key-exists", override.text, override.line,
                "the key exists in verl's config, so hydra refuses `+`: "
                "Could not append to config. An item is already at this path",
                f"{key}={shown(override.value)}", source,
            )  # fmt: skip
        return
    if known.read(key):
        if not prefix:
            yield SettingFinding(
                "wrong", "key-needs-plus", override.text, override.line,
                "verl reads the key but its config does not list it, so hydra refuses it without "
                "`+`: Key is not in struct",
                f"+{key}={shown(override.value)}", source,
            )  # fmt: skip
        return
    near = known.nearest(key)
    replacement = f"{near}={shown(override.value)}, if that is what is meant" if near else ""
    if prefix:
        yield SettingFinding(
            "no-op", "key-unread", override.text, override.line,
            f"nobody in verl 0.4.1 reads this key; hydra takes it because of `{prefix}`",
            replacement, source,
        )  # fmt: skip
    else:
        yield SettingFinding(
            "wrong", "key-unknown", override.text, override.line,
            "verl's config has no such key and hydra refuses it: Key is not in struct",
            replacement, source,
        )  # fmt: skip


def _guard(override: Override) -> Iterator[SettingFinding]:
    """Settings that lead to sites which the tree audit only accepts because they are off."""
    review = reviewed.load("verl", "0.4.1")
    value = unquoted(override).lower()
    for entry in review.entries if review else ():
        if entry.status != "unreachable":
            continue
        for reach in entry.reached_by:
            if reach.setting == override.key and value in {v.lower() for v in reach.values}:
                yield SettingFinding(
                    "wrong", f"reaches:{entry.id}", override.text, override.line,
                    f"leads to {entry.sites} sites that a P40 cannot run: "
                    + " ".join(entry.reason.split()),
                    "", f"verl-p40 audit, entry {entry.id}",
                )  # fmt: skip


def _config_name(run: Run) -> Iterator[SettingFinding]:
    if run.config_name.startswith("ppo_megatron"):
        yield SettingFinding(
            "wrong", "megatron-config", f"--config-name {run.config_name}", run.line,
            "Megatron and Transformer Engine need sm_70 or sm_80; the P40 path is FSDP",
            "--config-name ppo_trainer", "verl/trainer/main_ppo.py:108",
        )  # fmt: skip


# -- commands -------------------------------------------------------------------------------


def _command_findings(meaning: Meaning, book: RuleBook) -> Iterator[SettingFinding]:
    for command in meaning.commands:
        line = shown(" ".join(command.argv))
        line = line if len(line) < 160 else line[:157] + "..."
        for program, arguments in _started(command.argv):
            for rule in book.rules:
                if (
                    rule.program
                    and re.fullmatch(rule.program, program)
                    and re.search(rule.value, shown(arguments), re.DOTALL)
                ):
                    yield _finding(rule, line, command.line)
        for word, name, specifier in pip_requirements(command):
            for rule in book.rules:
                if name in rule.pip and not _supported(rule, specifier):
                    yield _finding(rule, word.text, word.line)


def _started(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Programs that a command starts, each with its arguments as one text."""
    for index, word in enumerate(argv):
        before = argv[index - 1].rpartition("/")[2] if index else ""
        handed_on = before in {"-exec", "-execdir", "xargs", "sudo", "time", "nohup", "exec", "env"}
        if not index or handed_on or (argv[0] == "xargs" and argv[index - 1].startswith("-")):
            yield word.rpartition("/")[2], " ".join(argv[index + 1 :])


def _supported(rule: SettingRule, specifier: str) -> bool:
    """Whether a requirement can only give versions the rule supports: ``==X`` with X supported."""
    if not rule.supported:
        return False
    exact = re.fullmatch(r"===?\s*([\w.+!-]+)", specifier)
    if not exact:
        return False
    try:
        version = Version(exact.group(1))
        return SpecifierSet(rule.supported).contains(version.public, prereleases=True)
    except (InvalidVersion, InvalidSpecifier):
        return False


def _finding(rule: SettingRule, setting: str, line: int, key: str = "") -> SettingFinding:
    replacement = _EXPAND.sub(lambda m: {"key": key}.get(m.group(1), m.group(0)), rule.replacement)
    return SettingFinding(
        rule.kind, rule.id, setting, line, " ".join(rule.message.split()), replacement, rule.source
    )
