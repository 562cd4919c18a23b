"""``mok-megatron plan CONFIG --gpu GPU --racks N``: layouts that fit, ranked by predicted speed, and launch files."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

_SIZES = ("tp", "pp", "vpp", "cp", "ep", "micro_batch")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``plan``."""
    parser = subparsers.add_parser(
        "plan",
        help="find layouts for a model on given machines, predict memory and speed, write launch files",
        description="Try every TP x PP x VPP x CP x EP x DP layout of a model config on the given machines; say why "
        "layouts are refused, rank the others, and predict memory and time. Predictions, not measurements.",
    )
    parser.add_argument("config", metavar="CONFIG", help="a config file (.yaml), or the name of a shipped config")
    parser.add_argument("--gpu", required=True, help="h100, h200, b200, gb200 or gb300")
    count = parser.add_mutually_exclusive_group(required=True)
    count.add_argument("--racks", type=int, help="NVL72 racks (72 GPUs)")
    count.add_argument("--nodes", type=int, help="nodes: HGX boards of 8 GPUs, or NVL72 trays of 4")
    parser.add_argument("--seq", type=int, help="sequence length (default: that of the config's first layout)")
    parser.add_argument("--global-batch", type=int, help="sequences per step (default likewise)")
    for size in _SIZES:
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, help=f"only layouts with this {size}")
    parser.add_argument("--gpus-per-domain", type=int, dest="used", help="GPUs in use per rack or node, e.g. 64 of 72")
    parser.add_argument("--recompute", help="only this level: none, no-save-x, mok, selective or full")
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="take the kernel's rates from this benchmark file"
    )
    parser.add_argument("--top", type=int, default=8, help="layouts to show (default: 8)")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the machines with the best layout as SVG")
    parser.add_argument("--write", type=Path, metavar="DIR", help="write config, arguments, sbatch script of the best")
    parser.add_argument("--force", action="store_true", help="let --write and --picture replace files")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Search, print, write."""
    from mok_megatron.hardware import gpu
    from mok_megatron.model_config import load_model_config
    from mok_megatron.planner import report
    from mok_megatron.planner.candidate import RECOMPUTE_LEVELS, Job, placement
    from mok_megatron.planner.cluster import Cluster
    from mok_megatron.planner.launch_files import write_files
    from mok_megatron.planner.picture import rack_svg, rack_text
    from mok_megatron.planner.search import search
    from mok_megatron.simulator import calibrated_machine

    if args.recompute is not None and args.recompute not in RECOMPUTE_LEVELS:
        raise ValueError(f"--recompute must be one of {', '.join(RECOMPUTE_LEVELS)}, got {args.recompute!r}")
    if args.top < 1:
        raise ValueError(f"--top must be at least 1, got {args.top}")
    if args.picture and args.picture.exists() and not args.force:
        raise ValueError(f"{args.picture} exists: choose another name, or add --force")
    config = load_model_config(args.config)
    first = config.layout()
    spec = gpu(args.gpu)
    job = Job(
        arch=config.architecture,
        cluster=Cluster.of(spec, racks=args.racks, nodes=args.nodes),
        seq_length=first.seq_length if args.seq is None else args.seq,
        global_batch=first.global_batch if args.global_batch is None else args.global_batch,
        machine=calibrated_machine(spec, args.calibrate) if args.calibrate else None,
    )
    pins = {name: value for name in (*_SIZES, "used") if (value := getattr(args, name)) is not None}
    result = search(job, pins, recompute=args.recompute)
    best, plans = result.plans[0], report.distinct(result, args.top)
    place = placement(job, best.candidate)
    if args.json:
        print(json.dumps(report.as_data(result, plans), indent=2))
    else:
        picture = rack_text(place, ep=best.candidate.ep, coloured=sys.stdout.isatty())
        print(report.table(result, plans), report.details(result, best), picture, sep="\n\n")
    written = []
    if args.picture:
        title = f"{config.name} on {job.cluster.gpu.title}: {best.candidate.label()}"
        svg = rack_svg(place, ep=best.candidate.ep, pp=best.candidate.pp, title=title)
        args.picture.write_text(svg, encoding="utf-8")
        written.append(args.picture)
    if args.write:
        written += write_files(args.write, args.config, config, result, best, force=args.force)
    if written and not args.json:
        print("", *(f"wrote {path}" for path in written), sep="\n")
    return 0
