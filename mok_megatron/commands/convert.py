"""``mok-megatron convert FILE``: a launch file that uses another dispatcher -> the same launch with ``mok``."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

_EXIT_CODES = """\
exit codes:
  0  nothing to do, or (without --check) converted
  1  with --check: the file would change
  2  refused, nothing written: a setting that mok does not honour, or a form that is not understood
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``convert``."""
    parser = subparsers.add_parser(
        "convert",
        help="convert a launch script or argument file from another dispatcher to mok",
        description="Convert a Megatron launch script (bash, Slurm) or an argument YAML that uses alltoall, allgather, "
        "or flex with deepep, hybridep or ncclep. Prints the diff, and on stderr what was replaced, dropped, kept and "
        "refused, with the reasons. Writes only with --write or --output.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the launch script or argument file")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file would change")
    target.add_argument("--write", action="store_true", help="change FILE in place")
    target.add_argument("--output", metavar="OUT", type=Path, help="write to a new file OUT")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, show, and write where asked to. Returns the exit code."""
    from mok_megatron.convert import convert_text, detect_format

    text = _read(args.file)
    try:
        conversion = convert_text(text, detect_format(args.file, text))
    except ValueError as error:
        raise ValueError(f"{args.file}: {error}") from error
    sys.stdout.writelines(_diff(args.file, text, conversion.text))
    for finding in conversion.findings:
        print(f"{args.file}:{finding.line}: {finding.kind} {finding.what}: {finding.why}", file=sys.stderr)
    if conversion.refused:
        count = len(conversion.refused)
        print(f"{args.file}: refused, nothing written: {count} setting(s) that mok does not honour", file=sys.stderr)
        return 2
    if args.check:
        return 1 if conversion.changed else 0
    if args.write and conversion.changed:
        _write(args.file, conversion.text, like=args.file)
    elif args.output is not None:
        if args.output.exists():
            raise ValueError(f"{args.output} exists: choose a new name, or change FILE in place with --write")
        _write(args.output, conversion.text, like=args.file)
    return 0


def _read(path: Path) -> str:
    """The file's text with its line ends as they are. Raises ValueError where it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from error


def _diff(path: Path, old: str, new: str) -> list[str]:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True), new.splitlines(keepends=True), str(path), f"{path} (mok)"
    )
    return [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]


def _write(path: Path, text: str, like: Path) -> None:
    """Write atomically, with the permissions of ``like``."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8"))
        Path(temporary).chmod(like.stat().st_mode & 0o7777)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise
