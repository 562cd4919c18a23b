"""Flags in a sequence of words: what is replaced, dropped or kept. Shared by shell commands, arrays and strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mok_megatron.convert import rules
from mok_megatron.convert.edits import Edit, Finding, FindingKind, NotUnderstoodError, line_of
from mok_megatron.convert.shell_lexer import literal

_INLINE = re.compile(r"""(?P<quote>["']?)(?P<name>--[\w-]+)(?P=quote)?=(?P<value>.*)""", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Word:
    """One shell word (or YAML item) of the text: its raw spelling, quotes included, and its span."""

    start: int
    end: int
    raw: str


@dataclass(frozen=True, kw_only=True)
class FlagUse:
    """A flag that reaches Megatron: ``values`` are the raw words up to the next flag."""

    name: str
    values: tuple[str, ...]
    line: int


@dataclass
class Converter:
    """Collects the edits and findings of one text.

    ``resolve`` finds where a dispatcher type that is not written out comes from, for formats that have variables.
    """

    text: str
    resolve: Callable[[Word], Edit] | None = None
    edits: list[Edit] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    accounted: list[tuple[int, int]] = field(default_factory=list)
    flags: list[FlagUse] = field(default_factory=list)
    expert_counts: list[Word] = field(default_factory=list)

    def note(self, kind: FindingKind, offset: int, what: str, why: str) -> None:
        """Add a line to the report."""
        self.findings.append(Finding(line=line_of(self.text, offset), kind=kind, what=what, why=why))

    def error(self, offset: int, what: str) -> NotUnderstoodError:
        """The error for a form at ``offset`` that is not understood."""
        return NotUnderstoodError(f"line {line_of(self.text, offset)}: {what}")

    def convert_words(self, words: Sequence[Word], open_end: int) -> None:
        """Convert the flags of one sequence; ``open_end`` is where the text before its first word ends."""
        for first, last in _merge(self.scan(words), words, self.text):
            self.edits.append(removal(self.text, words, first, last, open_end))

    def scan(self, words: Sequence[Word]) -> list[tuple[int, int]]:
        """Replace and record the flags of one sequence; returns the runs of words to drop, as (first, last)."""
        dropped: list[tuple[int, int]] = []
        index = 0
        while index < len(words):
            name, inline = split_flag(words[index])
            if name is None:
                index += 1
                continue
            taken = 0
            self.record(name, inline, words, index)
            if name == rules.TYPE_FLAG:
                taken = self.convert_type(words, index, inline)
            elif name in rules.DROPPED_FLAGS:
                taken = self.drop_flag(name, words, index, inline)
                dropped.append((index, index + taken))
            elif name == rules.EXPERTS_FLAG:
                taken = self.values_of(name, words, index, inline, 1)
                self.expert_counts.append(words[index + taken])
            elif name in rules.KEPT_FLAGS:
                self.note("kept", words[index].start, name, rules.KEPT_FLAGS[name])
            index += 1 + taken
        return dropped

    def record(self, name: str, inline: str | None, words: Sequence[Word], index: int) -> None:
        """Remember a flag with its values, for the refusals."""
        values = [] if inline is None else [inline]
        for word in words[index + 1 :]:
            if inline is not None or split_flag(word)[0] is not None:
                break
            values.append(word.raw)
        self.flags.append(FlagUse(name=name, values=tuple(values), line=line_of(self.text, words[index].start)))

    def values_of(self, name: str, words: Sequence[Word], index: int, inline: str | None, wanted: int) -> int:
        """How many words after the flag are its values. Raises NotUnderstoodError where they are missing."""
        if inline is not None:
            if wanted == 0:
                raise self.error(words[index].start, f"{name} takes no value, got {words[index].raw!r}")
            return 0
        if index + wanted >= len(words):
            raise self.error(words[index].start, f"{name} has no value beside it: write the value on the flag's line")
        return wanted

    def drop_flag(self, name: str, words: Sequence[Word], index: int, inline: str | None) -> int:
        """Account for a flag that goes; returns the number of its value words."""
        taken = self.values_of(name, words, index, inline, rules.DROPPED_FLAGS[name])
        shown = " ".join(word.raw for word in words[index : index + taken + 1])
        self.account(words[index])
        self.note("dropped", words[index].start, shown, rules.why_dropped(name))
        return taken

    def convert_type(self, words: Sequence[Word], index: int, inline: str | None) -> int:
        """Set the dispatcher type to mok; returns the number of the flag's value words."""
        taken = self.values_of(rules.TYPE_FLAG, words, index, inline, 1)
        word = words[index + taken]
        self.account(words[index])
        value_raw = word.raw if inline is None else inline
        value_word = Word(start=word.end - len(value_raw), end=word.end, raw=value_raw)
        value = literal(value_raw)
        if (
            value is None and inline is not None and value_raw[-1:] in ('"', "'")
        ):  # "--flag=value": the quote is outside
            value = literal(value_raw[:-1])
        if value == rules.NEW_TYPE:
            return taken
        if value in rules.OLD_TYPES:
            edit = replacement(value_word, value)
        elif (value is None or "$" in value) and self.resolve is not None:
            edit = self.resolve(value_word)
        else:
            raise self.error(
                word.start,
                f"{rules.TYPE_FLAG} {value!r} is not a dispatcher of Megatron ({', '.join(rules.OLD_TYPES)})",
            )
        self.replace_type(edit)
        return taken

    def replace_type(self, edit: Edit) -> None:
        """Apply an edit of the dispatcher type, and report it once."""
        old = self.text[edit.start : edit.end]
        if old != edit.new and edit not in self.edits:
            self.note("replaced", edit.start, f"{rules.TYPE_FLAG} {old}", f"now {edit.new}")
            self.edits.append(edit)

    def account(self, word: Word) -> None:
        """Mark a mention of a flag as dealt with."""
        self.accounted.append((word.start, word.end))

    def add_missing_type(self) -> None:
        """Where experts are configured but no dispatcher is named (Megatron's default is allgather), name mok."""
        if any(flag.name == rules.TYPE_FLAG for flag in self.flags):
            return
        for word in self.expert_counts:
            self.edits.append(Edit(start=word.end, end=word.end, new=f" {rules.TYPE_FLAG} {rules.NEW_TYPE}"))
            self.note(
                "added",
                word.start,
                f"{rules.TYPE_FLAG} {rules.NEW_TYPE}",
                "no dispatcher was named here; if another file names one after this, convert that file too",
            )


def split_flag(word: Word) -> tuple[str | None, str | None]:
    """``--name`` -> (name, None); ``--name=value`` -> (name, raw value); anything else -> (None, None)."""
    value = literal(word.raw)
    if value is not None and re.fullmatch(r"--[\w-]+", value):
        return "--" + value[2:].replace("_", "-"), None
    match = _INLINE.fullmatch(word.raw)
    if match is None:
        return None, None
    return "--" + match["name"][2:].replace("_", "-"), match["value"]


def replacement(word: Word, value: str, new: str = rules.NEW_TYPE) -> Edit:
    """Replace ``value`` inside the word's spelling, so that its quotes stay."""
    offset = word.raw.rindex(value)
    return Edit(start=word.start + offset, end=word.start + offset + len(value), new=new)


def removal(text: str, words: Sequence[Word], first: int, last: int, open_end: int) -> Edit:
    """Remove words ``first..last`` with the space that separates them, so that the rest keeps its layout.

    Comments before and behind them stay; a continuation backslash never dangles.
    """
    start, end = words[first].start, words[last].end
    previous_end = words[first - 1].end if first else open_end
    gap = text[previous_end:start]
    rest = text[end:].split("\n", 1)[0]
    space_behind = Edit(start=start, end=end + len(rest) - len(rest.lstrip(" \t")))
    first_on_line = not text[text.rfind("\n", 0, start) + 1 : start].strip()
    if first_on_line and rest.lstrip().startswith("#"):
        return space_behind
    if "\n" in gap and not gap.rstrip(" \t").endswith(("\\\n", "\\\r\n")):
        if rest.strip(" \t\r\\"):  # something else is on the line, and a comment above may need the line's end
            return space_behind
        newline = previous_end + gap.rindex("\n")
        return Edit(start=newline - (text[newline - 1] == "\r"), end=end)
    if first or "\n" in gap:
        return Edit(start=previous_end, end=end)
    return space_behind


def _merge(runs: Sequence[tuple[int, int]], words: Sequence[Word], text: str) -> list[tuple[int, int]]:
    """Join neighbouring runs of dropped words that no comment separates."""
    merged: list[tuple[int, int]] = []
    for first, last in runs:
        gap = text[words[merged[-1][1]].end : words[first].start] if merged else "#"
        if merged and merged[-1][1] + 1 == first and not gap.strip(" \t\r\n\\"):
            merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged
