"""What a conversion is made of: span edits on the original text, and findings that tell the user what and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FindingKind = Literal["replaced", "added", "dropped", "kept", "left", "refused"]


class NotUnderstoodError(ValueError):
    """The file has a form that this tool does not understand; nothing was changed. The message names the line."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Replace ``text[start:end]`` by ``new``."""

    start: int
    end: int
    new: str = ""


@dataclass(frozen=True, kw_only=True, order=True)
class Finding:
    """One line of the report: ``line`` is 1-based in the original file.

    ``replaced``, ``added`` and ``dropped`` change the file; ``kept`` and ``left`` tell why something stays; a
    ``refused`` one blocks the conversion, since the run would fail with ``mok``.
    """

    line: int
    kind: FindingKind
    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The outcome for one text. ``text`` is the new text even where something is refused, so that it can be shown."""

    original: str
    text: str
    findings: tuple[Finding, ...]

    @property
    def changed(self) -> bool:
        """Whether the new text differs."""
        return self.text != self.original

    @property
    def refused(self) -> tuple[Finding, ...]:
        """Findings that block the conversion."""
        return tuple(finding for finding in self.findings if finding.kind == "refused")


def line_of(text: str, offset: int) -> int:
    """1-based line of ``offset``."""
    return text.count("\n", 0, offset) + 1


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Apply edits in any order. Overlapping edits are a bug of the caller: ValueError."""
    pieces, position = [], 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if edit.start < position:
            raise ValueError(f"overlapping edits at line {line_of(text, edit.start)}")
        pieces += [text[position : edit.start], edit.new]
        position = edit.end
    return "".join(pieces) + text[position:]
