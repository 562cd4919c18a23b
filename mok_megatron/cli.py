"""``mok-megatron <verb>``: finds the verbs in ``mok_megatron.commands`` and turns user errors into one line."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from mok_megatron import commands

EXIT_USER_ERROR = 2


def build_parser() -> argparse.ArgumentParser:
    """The parser with every verb of ``mok_megatron.commands``, in alphabetical order."""
    parser = argparse.ArgumentParser(
        prog="mok-megatron",
        description="Megatron's MoE layer as one backend: tools around --moe-token-dispatcher-type mok.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"mok-megatron {_own_version()}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in sorted(pkgutil.iter_modules(commands.__path__), key=lambda module: module.name):
        importlib.import_module(f"{commands.__name__}.{module.name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code, 2 for a user error, 130 when interrupted."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (head, less) has gone: not an error, but the interpreter's last flush must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"mok-megatron {args.verb}: {_one_line(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return 130
    return code


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())


def _own_version() -> str:
    try:
        return version("mok-megatron")
    except PackageNotFoundError:
        return "unknown (not installed)"


if __name__ == "__main__":
    sys.exit(main())
