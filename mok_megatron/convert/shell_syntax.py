"""Statements of a bash script: simple commands and arrays, as far as the conversion needs them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mok_megatron.convert.shell_lexer import Token, tokenize
from mok_megatron.convert.words import Word

RESERVED = frozenset(("if", "then", "elif", "else", "fi", "for", "while", "until", "do", "done", "case", "esac", "in"))
RESERVED |= frozenset(("function", "time", "{", "}", "!"))
ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:\[[^\]]*\])?\+?=(?P<value>.*)", re.DOTALL)
TESTS = ("[", "[[", "test", "case")
_SHELL = re.compile(r"(?:.*/)?(?:ba|da|z|k)?sh")
_RUNS_SCRIPT = re.compile(r"(?:.*/)?(?:(?:ba|da|z|k)?sh|sbatch|qsub|ssh)")
_SCRIPT_FILE = re.compile(r".*\.(?:sh|bash|slurm|sbatch|job)[\"']?", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_REDIRECTS = ("<", ">", ">>", "<<", "<<-", "<<<", "<&", ">&", "<>", ">|", "&>")


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A simple command, or the elements of an array.

    Attributes:
        words: all words, in order, without redirections.
        open_end: where the text before the first word ends (the bracket of an array, else the command's own start).
        first_token, last_token: indexes into the script's tokens.
    """

    words: tuple[Word, ...]
    is_array: bool
    open_end: int
    first_token: int
    last_token: int

    @property
    def head_index(self) -> int:
        """Index of the command's name: behind reserved words and leading assignments; ``len(words)`` if none."""
        for index, word in enumerate(self.words):
            if word.raw not in RESERVED and ASSIGNMENT.fullmatch(word.raw) is None:
                return index
            if word.raw == "case":
                return index
        return len(self.words)

    @property
    def head(self) -> str | None:
        """The command's name, or None for an array or a bare assignment."""
        if self.is_array or self.head_index == len(self.words):
            return None
        return self.words[self.head_index].raw

    @property
    def arguments(self) -> Sequence[Word]:
        """The words that may be flags."""
        return self.words if self.is_array else self.words[self.head_index :]

    def runs_string(self, word: Word) -> bool:
        """Whether the quoted ``word`` is run as a command line (``bash -c``, ``eval``, ``sbatch --wrap``)."""
        if self.is_array or word.raw[:1] not in "\"'":
            return self.head == "eval" and "$" in word.raw
        index = self.words.index(word)
        before = self.words[index - 1].raw if index else ""
        shell = any(_SHELL.fullmatch(other.raw) for other in self.words[:index])
        return self.head == "eval" or before == "--wrap" or (shell and re.fullmatch(r"-\w*c", before) is not None)


@dataclass(frozen=True, kw_only=True)
class Heredoc:
    """A here-document that is not a script: ``is_printed`` where it only goes to the terminal or nowhere."""

    start: int
    end: int
    is_printed: bool


@dataclass
class Script:
    """All tokens and statements of a text, those of here-documents that are scripts included."""

    text: str
    tokens: list[Token] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    heredocs: list[Heredoc] = field(default_factory=list)

    def is_tested(self, name: str) -> bool:
        """Whether a condition looks at the variable ``name``."""
        return any(
            name in _VARIABLE.findall(word.raw)
            for statement in self.statements
            if statement.head in TESTS
            for word in statement.words
        )

    def uses_of(self, name: str) -> int:
        """How often the variable ``name`` is expanded."""
        return len(re.findall(rf"\$\{{?{name}\b", self.text))


def parse(text: str, start: int = 0, end: int | None = None) -> Script:
    """Tokens and statements of ``text[start:end]``. Raises NotUnderstoodError for text that is not closed."""
    return _Parser(Script(text=text, tokens=tokenize(text, start, end))).run()


@dataclass
class _Parser:
    """``words`` and ``array`` collect token indexes; ``line`` and ``targets`` say whom a here-document is for."""

    script: Script
    words: list[int] = field(default_factory=list)
    array: list[int] | None = None
    array_start: int = 0
    line: list[Statement] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    redirect: str | None = None
    nested: list[Script] = field(default_factory=list)

    def run(self) -> Script:
        tokens = self.script.tokens
        for index, token in enumerate(tokens):
            if token.kind == "word":
                self.take_word(index, token)
            elif token.kind == "array_open":
                self.array, self.array_start = [], token.end
            elif token.kind == "array_close":
                self.end_array()
            elif token.kind == "heredoc":
                self.take_heredoc(token)
            elif token.kind == "operator" and token.text in _REDIRECTS:
                self.redirect = token.text
                if self.words and tokens[self.words[-1]].text.isdigit() and tokens[self.words[-1]].end == token.start:
                    self.words.pop()
            elif token.kind in ("operator", "newline") and self.array is None:
                self.end_command()
                if token.kind == "newline" and not (index + 1 < len(tokens) and tokens[index + 1].kind == "heredoc"):
                    self.line, self.targets = [], []
        self.end_command()
        for inner in self.nested:
            _merge(self.script, inner)
        return self.script

    def take_word(self, index: int, token: Token) -> None:
        if self.array is not None:
            self.array.append(index)
        elif self.redirect is not None:
            self.targets.append(self.redirect + token.text)
            self.redirect = None
        else:
            self.words.append(index)

    def take_heredoc(self, token: Token) -> None:
        if _is_script(self.line, self.targets):
            self.nested.append(parse(self.script.text, token.start, token.end))
        else:
            self.script.heredocs.append(_heredoc(token, self.line, self.targets))

    def end_array(self) -> None:
        if self.array:
            self.script.statements.append(
                _statement(self.script.tokens, self.array, is_array=True, open_end=self.array_start)
            )
        self.array = None

    def end_command(self) -> None:
        if self.words:
            start = self.script.tokens[self.words[0]].start
            self.line.append(_statement(self.script.tokens, self.words, is_array=False, open_end=start))
            self.script.statements.append(self.line[-1])
        self.words = []


def _statement(tokens: Sequence[Token], indexes: Sequence[int], *, is_array: bool, open_end: int) -> Statement:
    words = tuple(Word(start=tokens[i].start, end=tokens[i].end, raw=tokens[i].text) for i in indexes)
    return Statement(words=words, is_array=is_array, open_end=open_end, first_token=indexes[0], last_token=indexes[-1])


def _is_script(line: Sequence[Statement], targets: Sequence[str]) -> bool:
    runs = any(_RUNS_SCRIPT.fullmatch(word.raw) for statement in line for word in statement.words)
    return runs or any(target.startswith(">") and _SCRIPT_FILE.fullmatch(target) for target in targets)


def _heredoc(token: Token, line: Sequence[Statement], targets: Sequence[str]) -> Heredoc:
    """``cat <<EOF`` without a target prints; ``: <<EOF`` is a comment; all else is data for something."""
    files = [target for target in targets if target.startswith((">", "&>")) and not re.fullmatch(r">&\d", target)]
    heads = {statement.head for statement in line}
    return Heredoc(start=token.start, end=token.end, is_printed=not files and heads <= {"cat", ":"})


def _merge(script: Script, inner: Script) -> None:
    """Add the tokens and statements of a script inside a here-document."""
    offset = len(script.tokens)
    script.tokens += inner.tokens
    script.heredocs += inner.heredocs
    for statement in inner.statements:
        first, last = statement.first_token + offset, statement.last_token + offset
        script.statements.append(replace(statement, first_token=first, last_token=last))
