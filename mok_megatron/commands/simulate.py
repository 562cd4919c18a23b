"""``mok-megatron simulate CONFIG --gpu GPU --ep N``: predicted time of the MoE layer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``simulate``."""
    parser = subparsers.add_parser(
        "simulate",
        help="predict the MoE layer's time on W ranks with a discrete-event model of the kernel",
        description="Run the kernel's ticket order and dependency counts with a GPU's rates. A prediction, not a "
        "measurement: what it rests on is printed with it. --study prints the tables of docs/performance-model.md.",
    )
    parser.add_argument("config", metavar="CONFIG", help="a config file (.yaml), or the name of a shipped config")
    parser.add_argument("--gpu", required=True, help="h100, h200, b200, gb200 or gb300")
    parser.add_argument("--ep", type=int, required=True, help="expert-parallel size")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per rank (default: 4096)")
    parser.add_argument(
        "--combine",
        choices=("pull", "push"),
        default="push",
        help="who moves y rows: their token's rank, or the expert's, as the kernel does (default: push)",
    )
    parser.add_argument("--comm-sms", type=int, help="SMs whose warps copy (default: all)")
    parser.add_argument("--copy-warps", type=int, default=2, help="copying warps per CTA (default: 2)")
    parser.add_argument(
        "--imbalance", type=float, default=0.0, help="sigma of the log of expert popularity (default: 0)"
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="take the kernel's rates from this benchmark file"
    )
    parser.add_argument("--study", action="store_true", help="print tables that compare choices, in Markdown")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print predictions."""
    from mok_megatron.hardware import gpu
    from mok_megatron.model_config import load_model_config
    from mok_megatron.planner.candidate import nearest_divisor
    from mok_megatron.simulator import Machine, Policy, calibrated_machine, studies

    spec = gpu(args.gpu)
    arch = load_model_config(args.config).architecture
    if args.ep < 1 or arch.moe.experts % args.ep:
        nearest = nearest_divisor(arch.moe.experts, max(1, args.ep))
        raise ValueError(f"--ep {args.ep} does not divide the {arch.moe.experts} experts; nearest is --ep {nearest}")
    shape = arch.moe_shape(args.ep)
    if args.ep > spec.domain_gpus:
        raise ValueError(f"--ep {args.ep} exceeds the {spec.domain_gpus} GPUs of one NVLink domain of {spec.title}")
    if args.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, got {args.tokens}")
    machine = calibrated_machine(spec, args.calibrate) if args.calibrate else Machine.from_gpu(spec)
    policy = Policy(combine=args.combine, comm_sms=args.comm_sms, copy_warps=args.copy_warps)
    if not args.study:
        print(*studies.predictions(machine, policy, shape, args.tokens, args.imbalance), sep="\n")
        return 0
    print(f"Predicted, not measured; {machine.basis}. T={args.tokens} per rank, bf16.\n")
    sizes = [ep for ep in (2, 4, 8, 16, 32, 64, 72) if ep <= spec.domain_gpus]
    print("EP size\n", studies.markdown(studies.ep_sizes(machine, shape, args.tokens, sizes)), sep="\n")
    for title, study in studies.STUDIES.items():
        print(f"\n{title} (EP {args.ep})\n", studies.markdown(study(machine, shape, args.tokens)), sep="\n")
    return 0
