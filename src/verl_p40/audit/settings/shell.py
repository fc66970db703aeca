"""A reader of shell scripts: commands, their words, assignments, here-documents. Runs nothing.

It covers what training scripts use: quotes, continuations, comments, ``export``, prefixes,
arrays, ``${NAME:-default}``. What only a shell could know (``$(...)``, ``$1``) stays opaque.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

OPAQUE = "\x00"
"""Stands in a word for a part whose value only running the script would give."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=", re.DOTALL)
_OPERATORS = ("&&", "||", ";;", "|&", ";", "|", "&", "(", ")", "\n")
_KEYWORDS = frozenset(
    {"if", "then", "else", "elif", "fi", "do", "done", "while", "until", "{", "}", "!", "esac"}
)


@dataclass(frozen=True)
class Word:
    """One word after quote removal. ``text`` has :data:`OPAQUE` where the value is unknown."""

    text: str
    line: int

    @property
    def known(self) -> bool:
        return OPAQUE not in self.text


@dataclass(frozen=True)
class Assignment:
    """``name=value`` before or without a command, or in ``export``."""

    name: str
    value: str
    line: int
    exported: bool


@dataclass
class Command:
    """A simple command: its prefix assignments, its words, the here-documents it reads."""

    words: list[Word] = field(default_factory=list)
    prefix: list[Assignment] = field(default_factory=list)
    heredocs: list[Word] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    """Files that it redirects to."""

    @property
    def line(self) -> int:
        return self.words[0].line if self.words else self.prefix[0].line if self.prefix else 1

    @property
    def argv(self) -> list[str]:
        return [word.text for word in self.words]


@dataclass
class Script:
    """What a script does, in order: assignments as they were met, then commands."""

    commands: list[Command] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What could not be read, e.g. a quote that is never closed."""


def parse(text: str, first_line: int = 1) -> Script:
    """Read a script; never raises, what it cannot follow is in ``problems``."""
    reader = _Reader(text.replace("\r\n", "\n"), first_line)
    reader.run()
    return reader.script


class _Reader:
    def __init__(self, text: str, first_line: int) -> None:
        self._text = text
        self._at = 0
        self._line = first_line
        self._values: dict[str, str] = {}
        self._arrays: dict[str, list[Word]] = {}
        self._pending: list[tuple[str, bool, Command]] = []
        self._command = Command()
        self.script = Script()

    # -- characters ---------------------------------------------------------------------

    def _peek(self, count: int = 1) -> str:
        return self._text[self._at : self._at + count]

    def _take(self, count: int = 1) -> str:
        taken = self._text[self._at : self._at + count]
        self._at += count
        self._line += taken.count("\n")
        return taken

    def _until(self, closing: str, *, escapes: bool) -> str:
        """Text up to ``closing``, which is taken as well."""
        start_line = self._line
        parts: list[str] = []
        while self._at < len(self._text):
            if escapes and self._peek() == "\\":
                parts.append(self._take(2))
            elif self._peek(len(closing)) == closing:
                self._take(len(closing))
                return "".join(parts)
            else:
                parts.append(self._take())
        self.script.problems.append(f"line {start_line}: no closing {closing} for what starts here")
        return "".join(parts)

    def _nested(self, opening: str, closing: str) -> str:
        """The inside of a balanced pair; quotes inside hide brackets."""
        start_line, depth, start = self._line, 1, self._at
        while self._at < len(self._text):
            char = self._peek()
            if char == "\\":
                self._take(2)
                continue
            if char in "'\"":
                self._take()
                self._until(char, escapes=char == '"')
                continue
            self._take()
            if char == opening:
                depth += 1
            elif char == closing:
                depth -= 1
                if not depth:
                    return self._text[start : self._at - 1]
        self.script.problems.append(f"line {start_line}: no closing {closing} for what starts here")
        return self._text[start:]

    # -- commands -----------------------------------------------------------------------

    def run(self) -> None:
        while self._at < len(self._text):
            char = self._peek()
            if char in " \t":
                self._take()
            elif self._peek(2) == "\\\n":
                self._take(2)
            elif char == "#":
                while self._at < len(self._text) and self._peek() != "\n":
                    self._take()
            elif (operator := self._operator()) is not None:
                self._take(len(operator))
                self._end()
                if operator == "\n":
                    self._heredoc_bodies()
            elif not self._redirection():
                self._word_or_assignment()
        self._end()
        self._heredoc_bodies()

    def _operator(self) -> str | None:
        return next((op for op in _OPERATORS if self._peek(len(op)) == op), None)

    def _end(self) -> None:
        command, self._command = self._command, Command()
        while command.words and command.words[0].text in _KEYWORDS:
            command.words.pop(0)
        if command.words:
            self._declare(command)
            self.script.commands.append(command)
        self.script.assignments += command.prefix
        if not command.words:  # only then does an assignment outlive its line
            for assignment in command.prefix:
                self._set(assignment)

    def _declare(self, command: Command) -> None:
        """``export A=b``, ``declare -x A=b``: words that are assignments."""
        if command.words[0].text not in {"export", "declare", "typeset", "local", "readonly"}:
            return
        exported = command.words[0].text == "export" or "-x" in command.argv
        for word in command.words[1:]:
            match = _ASSIGNMENT.match(word.text)
            if match:
                value = word.text[match.end() :]
                assignment = Assignment(match.group(1), value, word.line, exported)
                self.script.assignments.append(assignment)
                self._set(assignment)

    def _set(self, assignment: Assignment) -> None:
        self._values[assignment.name] = assignment.value

    def _word_or_assignment(self) -> None:
        match = _ASSIGNMENT.match(self._text, self._at)
        if match and not self._command.words and self._text[match.end() :][:1] == "(":
            self._take(match.end() - self._at + 1)
            first = self._line
            inside = _Reader(self._nested("(", ")"), first)
            inside._values, inside._arrays = self._values, self._arrays
            words = inside.words_only()
            old = self._arrays.get(match.group(1), []) if match.group(2) else []
            self._arrays[match.group(1)] = old + words
            return
        line = self._line
        words = self._word()
        match = _ASSIGNMENT.match(words[0].text) if len(words) == 1 else None
        if match and not self._command.words:
            value = words[0].text[match.end() :]
            self._command.prefix.append(Assignment(match.group(1), value, line, False))
        else:
            self._command.words += words

    def words_only(self) -> list[Word]:
        """All words of the text as one list: the inside of an array."""
        words: list[Word] = []
        while self._at < len(self._text):
            if self._peek() in " \t\n" or self._peek(2) == "\\\n":
                self._take(2 if self._peek() == "\\" else 1)
            elif self._peek() == "#":
                while self._at < len(self._text) and self._peek() != "\n":
                    self._take()
            elif self._operator() is not None:
                self._take()
            else:
                words += self._word()
        return words

    # -- redirections -------------------------------------------------------------------

    def _redirection(self) -> bool:
        match = re.compile(r"\d*(<<<|<<-?|>>|>&|<&|&>>?|[<>])").match(self._text, self._at)
        if not match or (self._peek() == "&" and not match.group(1).startswith("&>")):
            return False
        self._take(match.end() - self._at)
        while self._peek() in " \t" and self._peek():
            self._take()
        operator = match.group(1)
        if operator.startswith("<<") and operator != "<<<":
            quoted = self._peek() in "'\"\\"
            words = self._word()
            if words:
                self._pending.append((words[0].text, quoted, self._command))
        elif self._at < len(self._text) and self._peek() != "\n":
            words = self._word()
            if words and operator in {">", ">>", "&>", "&>>"}:
                self._command.targets.append(words[0].text)
        return True

    def _heredoc_bodies(self) -> None:
        for delimiter, _quoted, command in self._pending:
            start, first = self._at, self._line
            while self._at < len(self._text):
                line_end = self._text.find("\n", self._at)
                stop = len(self._text) if line_end < 0 else line_end
                line = self._text[self._at : stop]
                begin = self._at
                self._take(stop - self._at + (line_end >= 0))
                if line.strip("\t") == delimiter:
                    command.heredocs.append(Word(self._text[start:begin], first))
                    break
            else:
                command.heredocs.append(Word(self._text[start:], first))
                self.script.problems.append(f"line {first}: no {delimiter} ends the here-document")
        self._pending = []

    # -- words --------------------------------------------------------------------------

    def _word(self) -> list[Word]:
        """The next word; an array expansion gives as many as it has, each with its own line."""
        line, start = self._line, self._at
        parts: list[str] = []
        several: list[Word] = []
        while self._at < len(self._text):
            char = self._peek()
            if self._peek(2) == "\\\n":
                self._take(2)
            elif char in " \t\n;|&()<>" and not (char == "(" and parts and parts[-1].endswith("=")):
                break
            elif char == "\\":
                self._take()
                parts.append(self._take())
            elif char == "'":
                self._take()
                parts.append(self._until("'", escapes=False))
            elif char == '"':
                self._take()
                several += self._double(parts)
            elif char == "`":
                self._take()
                self._until("`", escapes=True)
                parts.append(OPAQUE)
            elif char == "$":
                several += self._dollar(parts)
            else:
                parts.append(self._take())
        if several:
            return several
        if self._at == start:  # never stand still on odd input
            self._take()
        return [Word("".join(parts), line)]

    def _double(self, parts: list[str]) -> list[Word]:
        start_line = self._line
        several: list[Word] = []
        while self._at < len(self._text):
            char = self._peek()
            if char == '"':
                self._take()
                parts.append("")
                return several
            if char == "\\":
                self._take()
                following = self._take()
                parts.append(
                    ""
                    if following == "\n"
                    else following
                    if following in '$`"\\'
                    else "\\" + following
                )
            elif char == "`":
                self._take()
                self._until("`", escapes=True)
                parts.append(OPAQUE)
            elif char == "$":
                several += self._dollar(parts)
            else:
                parts.append(self._take())
        self.script.problems.append(f'line {start_line}: no closing " for what starts here')
        return several

    def _dollar(self, parts: list[str]) -> list[Word]:
        self._take()
        following = self._peek()
        if following == "(":
            self._take()
            self._nested("(", ")")
            parts.append(OPAQUE)
        elif following == "{":
            self._take()
            return self._braced(self._nested("{", "}"), parts)
        elif following == "'":
            self._take()
            parts.append(self._until("'", escapes=True))
        elif match := _NAME.match(self._text, self._at):
            self._take(len(match.group()))
            parts.append(self._values.get(match.group(), OPAQUE))
        elif following and following in "@*#?$!0123456789-":
            self._take()
            parts.append(OPAQUE)
        else:
            parts.append("$")
        return []

    def _braced(self, inside: str, parts: list[str]) -> list[Word]:
        array = re.fullmatch(r"([A-Za-z_]\w*)\[[@*]\]", inside)
        if array and array.group(1) in self._arrays:
            return list(self._arrays[array.group(1)])
        match = re.fullmatch(r"([A-Za-z_]\w*)(?:(:?[-=])(.*))?", inside, re.DOTALL)
        if not match:
            parts.append(OPAQUE)
            return []
        name, operator, default = match.groups()
        if name in self._values:
            parts.append(self._values[name])
        elif operator and "$" not in default and "`" not in default:
            parts.append(default.strip("'\""))
        else:
            parts.append(OPAQUE)
        return []
