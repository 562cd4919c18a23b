"""Dropping the environment variables of another dispatcher from a shell script."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mok_megatron.convert import rules
from mok_megatron.convert.edits import Edit
from mok_megatron.convert.shell_lexer import Token
from mok_megatron.convert.shell_syntax import ASSIGNMENT, Script, Statement
from mok_megatron.convert.words import Converter, Word, removal

_DECLARES = ("export", "declare", "typeset", "local", "readonly")
_BLOCK_OPENS = ("then", "else", "do", "{")
_BLOCK_CLOSES = ("fi", "else", "elif", "done", "}")


def convert_environment(converter: Converter, script: Script) -> None:
    """Drop assignments of the variables that only another dispatcher reads; tell about those that stay."""
    emptied: list[Statement] = []
    for statement in script.statements:
        if statement.is_array:
            continue
        found = _dropped_words(converter, script, statement)
        if not found:
            continue
        for word in found:
            name = _name(word)
            converter.note("dropped", word.start, word.raw, rules.DROPPED_ENVIRONMENT[name])
        if len(found) == len(_variable_words(statement)) and statement.head in (*_DECLARES, None):
            emptied.append(statement)
        else:
            _drop_words(converter, statement, found)
    _drop_statements(converter, script, emptied)
    _note_others(converter, script)


def _variable_words(statement: Statement) -> list[Word]:
    """Words that set variables: leading assignments, and the arguments of export, declare and env."""
    words, head = statement.words, statement.head_index
    leading = [word for word in words[:head] if ASSIGNMENT.fullmatch(word.raw)]
    if statement.head in _DECLARES:
        return leading + [word for word in words[head + 1 :] if not word.raw.startswith("-")]
    if statement.head == "env":
        for word in words[head + 1 :]:
            if not ASSIGNMENT.fullmatch(word.raw):
                break
            leading.append(word)
    return leading


def _name(word: Word) -> str:
    return re.split(r"\+?=", word.raw, maxsplit=1)[0]


def _dropped_words(converter: Converter, script: Script, statement: Statement) -> list[Word]:
    found = []
    for word in _variable_words(statement):
        name = _name(word)
        if name not in rules.DROPPED_ENVIRONMENT:
            continue
        if script.uses_of(name):
            converter.note("left", word.start, word.raw, "the script itself reads it; it has no effect with mok")
        else:
            found.append(word)
    return found


def _drop_words(converter: Converter, statement: Statement, found: Sequence[Word]) -> None:
    indexes = [statement.words.index(word) for word in found]
    runs: list[list[int]] = []
    for index in indexes:
        if runs and runs[-1][1] + 1 == index:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    for first, last in runs:
        converter.edits.append(removal(converter.text, statement.words, first, last, statement.open_end))


def _drop_statements(converter: Converter, script: Script, statements: Sequence[Statement]) -> None:
    """Delete whole statements; where a block would be left empty, or an operator without operand, ``:`` stays."""
    gone: set[int] = set()
    for statement in statements:
        gone.update(range(statement.first_token, statement.last_token + 1))
    for statement in statements:
        text = converter.text
        start, end = statement.words[0].start, statement.words[-1].end
        reserved = [word for word in statement.words if word.raw in (*_BLOCK_OPENS, "if", "!", "time")]
        if reserved:
            start = statement.words[len(reserved)].start
        line_start = text.rfind("\n", 0, start) + 1
        line_end = text.find("\n", end)
        line_end = len(text) if line_end < 0 else line_end
        rest = text[end:line_end]
        alone = not text[line_start:start].strip() and re.fullmatch(r"\s*;?\s*(#.*)?", rest) is not None
        first_of_block = _only_of_block(script.tokens, statement, gone)
        if not alone or first_of_block:
            converter.edits.append(Edit(start=start, end=end, new=":"))
        elif "#" in rest:
            converter.edits.append(Edit(start=start, end=end + rest.index("#")))
        else:
            converter.edits.append(Edit(start=line_start, end=min(line_end + 1, len(text))))


def _only_of_block(tokens: Sequence[Token], statement: Statement, gone: set[int]) -> bool:
    """Whether ``statement`` is the first of a block of which nothing is left."""

    def significant(indexes: range, skip: set[int]) -> Token | None:
        for index in indexes:
            token = tokens[index]
            blank = token.kind in ("newline", "comment") or (token.kind == "operator" and token.text == ";")
            if not blank and index not in skip:
                return token
        return None

    before = significant(range(statement.first_token - 1, -1, -1), set())
    after = significant(range(statement.last_token + 1, len(tokens)), gone)
    opens = before is not None and (
        (before.kind == "word" and before.text in _BLOCK_OPENS) or (before.kind == "operator" and before.text in "()")
    )
    closes = after is not None and (
        (after.kind == "word" and after.text in _BLOCK_CLOSES) or (after.kind == "operator" and after.text == ")")
    )
    return opens and closes


def _note_others(converter: Converter, script: Script) -> None:
    """Mention variables that stay: those worth measuring again, and dropped names in places that are harmless."""
    edited = [(edit.start, edit.end) for edit in converter.edits]
    quiet = [(token.start, token.end) for token in script.tokens if token.kind == "comment"]
    for name, why in rules.KEPT_ENVIRONMENT.items():
        for match in re.finditer(rf"(?<![\w$]){name}=", converter.text):
            if not any(start <= match.start() < end for start, end in quiet):
                converter.note("kept", match.start(), name, why)
    for name in rules.DROPPED_ENVIRONMENT:
        for match in re.finditer(rf"(?<![\w$]){name}=", converter.text):
            reported = any(
                finding.what.startswith(name) and finding.line == converter.text.count("\n", 0, match.start()) + 1
                for finding in converter.findings
            )
            if not reported and not any(start <= match.start() < end for start, end in (*edited, *quiet)):
                converter.note("left", match.start(), name, "harmless here: nothing reads it with mok")
