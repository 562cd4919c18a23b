"""Conversion of bash and Slurm scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mok_megatron.convert import rules
from mok_megatron.convert.edits import Edit
from mok_megatron.convert.shell_environment import convert_environment
from mok_megatron.convert.shell_lexer import literal
from mok_megatron.convert.shell_syntax import ASSIGNMENT, TESTS, Script, Statement, parse
from mok_megatron.convert.words import Converter, Word, replacement

_PRINTS = ("echo", "printf", "grep", ":", *TESTS)
_QUOTED = re.compile(r"(?P<quote>[\"'])(?P<body>.*)(?P=quote)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
_SIMPLE_VARIABLE = re.compile(r"[\"']?\$(?:\{(?P<braced>[A-Za-z_]\w*)\}|(?P<plain>[A-Za-z_]\w*))[\"']?")
_DEFAULTED = re.compile(r"[\"']?\$\{(?P<name>\w+):?[-=][\"']?(?P<default>[\w-]*)[\"']?\}[\"']?")
_TEXT_WORD = re.compile(r"(?:\\[^\r\n]|[^\s\\])+")
_TEXT_COMMENT = re.compile(r"(?<=\s)#[^\n]*")
_SHELL_MENTION = re.compile(
    r"(?<![\w-])--(?:"
    + "|".join(
        name[2:].replace("-", "[-_]") for name in sorted([rules.TYPE_FLAG, *rules.DROPPED_FLAGS], key=len, reverse=True)
    )
    + r")(?![\w-])|(?<=[.+])moe_(?:token_dispatcher_type|flex_dispatcher_backend|enable_deepep)(?==)"
)


def convert_shell(text: str) -> Converter:
    """Convert a script. Raises NotUnderstoodError, naming the line, for a form that cannot be converted safely."""
    converter = Converter(text=text)
    convert_shell_part(converter, 0, len(text))
    converter.add_missing_type()
    return converter


def convert_shell_part(converter: Converter, start: int, end: int) -> None:
    """Convert the script in ``text[start:end]``."""
    text = converter.text
    script = parse(text, start, end)
    converter.resolve = lambda word: _resolve(converter, script, word)
    argument_variables = _argument_variables(script)
    for statement in script.statements:
        if statement.is_array or statement.head not in _PRINTS:
            converter.convert_words(statement.arguments, statement.open_end)
        for word in statement.words:
            span = _argument_text(statement, word, argument_variables)
            if span is not None:
                converter.convert_words(text_words(text, *span), span[0])
    convert_environment(converter, script)
    _check_mentions(converter, script, argument_variables, (start, end))


def text_words(text: str, start: int, end: int) -> list[Word]:
    """Words of an argument string, split as the shell would split it: at white space and continuation lines.

    A comment inside (a multi-line ``bash -c``) is not part of the arguments.
    """
    comments = [match.span() for match in _TEXT_COMMENT.finditer(text, start, end)]
    return [
        Word(start=match.start(), end=match.end(), raw=match[0])
        for match in _TEXT_WORD.finditer(text, start, end)
        if not inside(match.start(), comments)
    ]


def _argument_text(statement: Statement, word: Word, argument_variables: set[str]) -> tuple[int, int] | None:
    """Span of the arguments inside a quoted word: an assigned string that is used as arguments, or a command line."""
    assignment = ASSIGNMENT.fullmatch(word.raw)
    if assignment is not None and not word.raw.startswith("-"):
        offset, value = assignment.start("value"), assignment["value"]
    elif statement.runs_string(word):
        offset, value = 0, word.raw
    else:
        return None
    quoted = _QUOTED.fullmatch(value)
    if quoted is None or (quoted["quote"] == "'" and "'" in quoted["body"]):
        return None
    body = quoted["body"]
    starts_with_flag = re.match(r"(?:\s|\\\n|\$\{?\w+\}?)*--\w", body) is not None
    if assignment is not None and not starts_with_flag and assignment["name"] not in argument_variables:
        return None
    start = word.start + offset + 1
    return start, start + len(body)


def _argument_variables(script: Script) -> set[str]:
    """Variables whose value is split into arguments: expanded without quotes, run as a command, or part of one."""
    found: set[str] = set()
    strings: dict[str, set[str]] = {}
    for statement in script.statements:
        for word in statement.words:
            assignment = ASSIGNMENT.fullmatch(word.raw)
            if assignment is not None:
                strings.setdefault(assignment["name"], set()).update(_VARIABLE.findall(assignment["value"]))
            elif statement.runs_string(word):
                found.update(_VARIABLE.findall(word.raw))
            elif statement.is_array or statement.head not in _PRINTS:
                found.update(_VARIABLE.findall(_without_quotes(word.raw)))
    while True:
        more = {part for name in found for part in strings.get(name, ())} - found
        if not more:
            return found
        found |= more


def _without_quotes(raw: str) -> str:
    """The word without its quoted parts, but with quoted command substitutions, whose inside is split again."""
    return re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"", lambda match: match[0] if "$(" in match[0] else "", raw)


def _assignments(script: Script, name: str) -> Iterator[Word]:
    """The raw values that are assigned to ``name``."""
    for statement in script.statements:
        for word in statement.words:
            match = ASSIGNMENT.fullmatch(word.raw)
            if match is not None and match["name"] == name:
                yield Word(start=word.start + match.start("value"), end=word.end, raw=match["value"])
            elif statement.head == ":" and (match := _DEFAULTED.fullmatch(word.raw)) and match["name"] == name:
                yield word


def _type_in(word: Word) -> Edit | None:
    """The edit that makes a literal (or the default of an expansion) mok; None for any other value."""
    value = literal(word.raw)
    match = _DEFAULTED.fullmatch(word.raw)
    if value is None and match is not None:
        value = match["default"]
    if value not in (*rules.OLD_TYPES, rules.NEW_TYPE):
        return None
    return replacement(word, value)


def _resolve(converter: Converter, script: Script, word: Word) -> Edit:
    """Where the dispatcher type behind a variable is set: at its one assignment, else the use is written out."""
    if (default := _type_in(word)) is not None:
        return default
    simple = _SIMPLE_VARIABLE.fullmatch(word.raw)
    if simple is None:
        raise converter.error(word.start, f"cannot tell what {word.raw!r} is: write the dispatcher type out")
    name = simple["braced"] or simple["plain"]
    values = [_type_in(value) for value in _assignments(script, name)]
    if not values or None in values:
        raise converter.error(
            word.start,
            f"the dispatcher type comes from {word.raw}, which this file does not set to a plain value: "
            f"write {rules.NEW_TYPE} here, or set it where {name} is set",
        )
    if len(values) == 1 and values[0] is not None and not script.is_tested(name):
        return values[0]
    expansion = word.raw.strip("\"'")
    return replacement(word, expansion)


def _check_mentions(converter: Converter, script: Script, argument_variables: set[str], part: tuple[int, int]) -> None:
    """Every mention of a flag that matters must be converted, a comment, or text that is only printed or compared."""
    quiet = [(token.start, token.end) for token in script.tokens if token.kind == "comment"]
    quiet += [(heredoc.start, heredoc.end) for heredoc in script.heredocs if heredoc.is_printed]
    for statement in script.statements:
        for word in statement.words:
            prints = not statement.is_array and statement.head in _PRINTS
            arguments = _argument_text(statement, word, argument_variables)
            if arguments is not None:
                quiet += [match.span() for match in _TEXT_COMMENT.finditer(converter.text, *arguments)]
            elif prints or _is_plain_string(word):
                quiet.append((word.start, word.end))
    for match in _SHELL_MENTION.finditer(converter.text, *part):
        if inside(match.start(), converter.accounted):
            continue
        if not inside(match.start(), quiet):
            raise converter.error(
                match.start(),
                f"{match[0]} appears in a form that this tool does not understand: put it into an array, a command or "
                "an argument string, or change it by hand",
            )
        converter.note("left", match.start(), match[0], "only mentioned here, not passed to Megatron by this file")


def _is_plain_string(word: Word) -> bool:
    """Whether the word assigns one quoted string: text, unless something splits it into arguments."""
    assignment = ASSIGNMENT.fullmatch(word.raw)
    return assignment is not None and _QUOTED.fullmatch(assignment["value"]) is not None


def inside(offset: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether ``offset`` lies in one of the spans."""
    return any(start <= offset < end for start, end in spans)
