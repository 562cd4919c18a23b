#!/usr/bin/env python3
"""Write the tables of docs/options.md from the code: backend options, refused and honoured options of Megatron.

Usage: scripts/update_options_doc.py [--check]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "options.md"
sys.path.insert(0, str(ROOT))

from mok_megatron.config import MokConfig  # noqa: E402
from mok_megatron.honoured import HONOURED  # noqa: E402
from mok_megatron.options import descriptions, flag_names  # noqa: E402
from mok_megatron.refusals import REFUSALS  # noqa: E402


def tables() -> dict[str, str]:
    """Name of a block in the page -> its Markdown."""
    described = descriptions()
    options = (
        (" / ".join(f"`{flag}`" for flag in flag_names(option.name)), f"`{option.default}`", described[option.name])
        for option in fields(MokConfig)
    )
    refused = ((f"`{r.field}`", f"`{r.option}`", r.values, r.reason, r.remedy) for r in REFUSALS)
    honoured = ((f"`{name}`", how) for name, how in HONOURED.items())
    return {
        "backend": table(("Flag", "Default", "Meaning"), options),
        "refused": table(("Field", "Flag", "Refused", "Why", "Instead"), refused),
        "honoured": table(("Field", "Honoured by"), honoured),
    }


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(tuple(head)), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


def render(page: str) -> str:
    """The page with its tables as the code says. Raises ValueError for a table that has no place in the page."""
    return fill_blocks(page, tables(), PAGE)


def fill_blocks(page: str, blocks: dict[str, str], path: Path) -> str:
    """``page``, the text of ``path``, with each block between its markers. Raises ValueError where there are none."""
    for name, content in blocks.items():
        block = rf"(?s)<!-- {name} -->.*?<!-- /{name} -->"
        found = re.findall(block, page)
        if len(found) != 1:
            raise ValueError(f"{path}: expected one block <!-- {name} --> ... <!-- /{name} -->")
        page = page.replace(found[0], f"<!-- {name} -->\n{content}\n<!-- /{name} -->")
    return page


def update(path: Path, render: Callable[[str], str], *, check: bool, source: str, script: str) -> int:
    """Write ``render`` of the page at ``path`` there, or only ``check`` it: 1 if it shows not what ``source``."""
    page = path.read_text(encoding="utf-8")
    wanted = render(page)
    if not check:
        path.write_text(wanted, encoding="utf-8")
    elif page != wanted:
        print(f"{path.relative_to(ROOT)} does not show what {source}: run {script}")
        return 1
    return 0


def main(arguments: list[str]) -> int:
    check = arguments == ["--check"]
    return update(PAGE, render, check=check, source="the code says", script="scripts/update_options_doc.py")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
