"""``mok-megatron args CONFIG``: the Megatron command line of a model config."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``args``."""
    parser = subparsers.add_parser(
        "args",
        help="print the Megatron command line of a model config",
        description="Print the Megatron flags of a model config and one of its layouts, spelled for the installed "
        "megatron-core, quoted for a shell. Notes go to stderr.",
        epilog='In a script: eval "flags=($(mok-megatron args CONFIG --one-line))", then "${flags[@]}".',
    )
    parser.add_argument("config", metavar="CONFIG", help="a config file (.yaml), or the name of a shipped config")
    parser.add_argument("--layout", metavar="NAME", help="layout of the config (default: the first one)")
    parser.add_argument(
        "--dispatcher", metavar="TYPE", help="token dispatcher, e.g. alltoall to compare (default: the layout's, mok)"
    )
    parser.add_argument(
        "--megatron", metavar="VERSION", help="spell for this megatron-core, e.g. 0.17 (default: the installed one)"
    )
    parser.add_argument("--one-line", action="store_true", help="all flags on one line, without backslashes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the flags on stdout and the notes on stderr."""
    from mok_megatron import megatron_args, model_config

    version = megatron_args.parse_version(args.megatron) if args.megatron else megatron_args.installed_version()
    config = model_config.load_model_config(args.config)
    command = megatron_args.command_line(config, args.layout, version=version, dispatcher=args.dispatcher)
    for note in command.notes:
        print(f"note: {note}", file=sys.stderr)
    lines = [" ".join([f"--{flag}", *map(shlex.quote, values)]) for flag, values in command.flags]
    print((" " if args.one_line else " \\\n").join(lines))
    return 0
