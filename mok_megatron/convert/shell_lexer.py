"""A lossless lexer for the part of bash that launch scripts use: every token knows its span in the text.

It splits words, operators, comments, array brackets and heredoc bodies, and follows quotes, expansions and
continuation lines, but it does not expand or execute anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from mok_megatron.convert.edits import NotUnderstoodError, line_of

TokenKind = Literal["word", "operator", "newline", "comment", "array_open", "array_close", "heredoc"]

_ARRAY_PREFIX = re.compile(r"[A-Za-z_]\w*(?:\[[^\]\s]*\])?\+?=$")
_OPERATORS = ("<<<", "<<-", "&>>", ";;&", "<<", ">>", "&&", "||", ";;", ";&", "|&", "<&", ">&", "<>", ">|", "&>")
_SEPARATES = set(" \t\r\n;&|<>()")


@dataclass(frozen=True, kw_only=True)
class Token:
    """``text`` is the source between ``start`` and ``end``; for an array_open it includes the bracket."""

    kind: TokenKind
    start: int
    end: int
    text: str


@dataclass
class _Lexer:
    source: str
    position: int
    end: int
    tokens: list[Token] = field(default_factory=list)
    brackets: list[str] = field(default_factory=list)
    heredocs: list[tuple[str, bool]] = field(default_factory=list)

    def fail(self, what: str, offset: int) -> NotUnderstoodError:
        return NotUnderstoodError(f"line {line_of(self.source, offset)}: {what}")

    def emit(self, kind: TokenKind, start: int) -> None:
        text = self.source[start : self.position]
        self.tokens.append(Token(kind=kind, start=start, end=self.position, text=text))

    def run(self, stop_at_paren: bool = False) -> list[Token]:
        """Lex up to the end, or up to the ``)`` that closes a substitution."""
        while self.position < self.end:
            start = self.position
            char = self.source[start]
            if self.source.startswith("\\\n", start) or self.source.startswith("\\\r\n", start):
                self.position = self.source.index("\n", start) + 1
            elif char in " \t\r":
                self.position += 1
            elif char == "\n":
                self.position += 1
                self.emit("newline", start)
                self.read_heredocs()
            elif char == "#":
                line_end = self.source.find("\n", start)
                self.position = min(line_end if line_end >= 0 else self.end, self.end)
                self.emit("comment", start)
            elif char == ")" and stop_at_paren and not self.brackets:
                return self.tokens
            elif char in _SEPARATES and not self.source.startswith(("<(", ">("), start):
                self.read_operator(start)
            else:
                self.read_word(start)
        if self.brackets or stop_at_paren:
            raise self.fail("a '(' is never closed", self.end)
        if self.heredocs:
            raise self.fail(f"the here-document {self.heredocs[0][0]!r} never ends", self.end)
        return self.tokens

    def read_operator(self, start: int) -> None:
        operator = next((op for op in _OPERATORS if self.source.startswith(op, start)), self.source[start])
        self.position = start + len(operator)
        if operator == "(":
            self.brackets.append("(")
        elif operator == ")":
            opened = self.brackets.pop() if self.brackets else ""
            if opened == "case":
                self.brackets.append(opened)
            if opened == "array":
                self.emit("array_close", start)
                return
        self.emit("operator", start)

    def read_word(self, start: int) -> None:
        while self.position < self.end:
            char = self.source[self.position]
            if char == "(" and _ARRAY_PREFIX.fullmatch(self.source[start : self.position]):
                self.position += 1
                self.brackets.append("array")
                self.emit("array_open", start)
                return
            if self.source.startswith(("<(", ">("), self.position) and self.position == start:
                self.position += 2
                self.skip_substitution()
            elif char in _SEPARATES:
                break
            else:
                self.skip_piece()
        self.finish_word(start)

    def finish_word(self, start: int) -> None:
        previous = next((token for token in reversed(self.tokens) if token.kind != "comment"), None)
        text = self.source[start : self.position]
        self.emit("word", start)
        if previous is not None and previous.kind == "operator" and previous.text in ("<<", "<<-"):
            self.heredocs.append((re.sub(r"[\"'\\]", "", text), previous.text == "<<-"))
        at_command = previous is None or previous.kind in ("newline", "operator") or previous.text in ("then", "do")
        if at_command and text == "case":
            self.brackets.append("case")
        elif at_command and text == "esac" and self.brackets and self.brackets[-1] == "case":
            self.brackets.pop()

    def skip_piece(self) -> None:
        """Skip one character, quoted string or expansion of a word."""
        start, char = self.position, self.source[self.position]
        if char == "\\":
            self.position += 2
        elif char == "'" or self.source.startswith("$'", start):
            self.skip_single_quotes(escapes=char == "$")
        elif char == '"' or self.source.startswith('$"', start):
            self.position += 2 if char == "$" else 1
            self.skip_until('"')
        elif self.source.startswith("$((", start):
            self.position += 3
            self.skip_arithmetic(start)
        elif self.source.startswith("$(", start):
            self.position += 2
            self.skip_substitution()
        elif self.source.startswith("${", start):
            self.position += 2
            self.skip_until("}")
        elif char == "`":
            self.position += 1
            self.skip_until("`")
        else:
            self.position += 1

    def skip_single_quotes(self, escapes: bool) -> None:
        start = self.position
        self.position += 2 if escapes else 1
        while self.position < self.end and self.source[self.position] != "'":
            self.position += 2 if escapes and self.source[self.position] == "\\" else 1
        if self.position >= self.end:
            raise self.fail("a ' is never closed", start)
        self.position += 1

    def skip_until(self, close: str) -> None:
        """Skip to the end of a double-quoted string, a parameter expansion or a backquoted command."""
        start = self.position
        while self.position < self.end:
            char = self.source[self.position]
            if char == close:
                self.position += 1
                return
            if close == '"' and (char == "'" or self.source.startswith(("$'", '$"'), self.position)):
                self.position += 1
            else:
                self.skip_piece()
        raise self.fail(f"a {close} is missing", start)

    def skip_arithmetic(self, start: int) -> None:
        depth = 2
        while self.position < self.end and depth:
            depth += {"(": 1, ")": -1}.get(self.source[self.position], 0)
            self.position += 1
        if depth:
            raise self.fail("a $(( is never closed", start)

    def skip_substitution(self) -> None:
        inner = _Lexer(self.source, self.position, self.end)
        inner.run(stop_at_paren=True)
        self.position = inner.position + 1

    def read_heredocs(self) -> None:
        for delimiter, strip_tabs in self.heredocs:
            start = self.position
            while True:
                line_end = self.source.find("\n", self.position, self.end)
                stop = line_end if line_end >= 0 else self.end
                line = self.source[self.position : stop].removesuffix("\r")
                if (line.lstrip("\t") if strip_tabs else line) == delimiter:
                    break
                if line_end < 0:
                    raise self.fail(f"the here-document {delimiter!r} never ends", start)
                self.position = line_end + 1
            body_end, self.position = self.position, stop
            text = self.source[start:body_end]
            self.tokens.append(Token(kind="heredoc", start=start, end=body_end, text=text))
        self.heredocs.clear()


def tokenize(source: str, start: int = 0, end: int | None = None) -> list[Token]:
    """Tokens of ``source[start:end]``. Raises NotUnderstoodError for quotes, brackets or here-documents left open."""
    return _Lexer(source, start, len(source) if end is None else end).run()


def literal(word: str) -> str | None:
    """The value of a word after quote removal, or None for an expansion in it or a quote left open."""
    value, position, quote = [], 0, ""
    while position < len(word):
        char = word[position]
        position += 1
        if quote == "'" and char != "'":
            value.append(char)
        elif char in "$`":
            return None
        elif char == "\\":
            value.append(word[position : position + 1])
            position += 1
        elif char == quote:
            quote = ""
        elif char in "'\"" and not quote:
            quote = char
        else:
            value.append(char)
    return None if quote else "".join(value)
