"""``mok-megatron build``: compile the kernel library ahead of time."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``build``."""
    parser = subparsers.add_parser(
        "build",
        help="compile the CUDA kernels ahead of time",
        description="Compile the kernels with nvcc into the cache (MOK_MEGATRON_CACHE, default ~/.cache/mok_megatron), "
        "so that no training job has to. Needs no GPU. Prints the path of each library.",
    )
    parser.add_argument("--arch", default="sm90a", help="comma-separated architectures (default: sm90a)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Build each architecture, after all of them have been checked."""
    from mok_megatron.backends.build import BuildError, build, check_architecture

    architectures = args.arch.split(",")
    for architecture in architectures:
        check_architecture(architecture)
    for architecture in architectures:
        try:
            print(f"{architecture}: {build(architecture)}")
        except BuildError as error:
            raise OSError(str(error)) from error
    return 0
