"""Measure the MoE layer against cuBLAS and other implementations, all in one process per GPU.

One GPU: ``python scripts/bench_layer.py``; W GPUs: ``torchrun --nproc-per-node W scripts/bench_layer.py``.
How it measures, and what the columns say: docs/benchmarks/README.md. Exit code 1 when an implementation fails, gives a
wrong result, or was asked for by name and cannot run; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from scripts.bench import report
from scripts.bench.implementations import Direction, Implementation, registry, select
from scripts.bench.inputs import Ranks, make_case
from scripts.bench.ours import with_ring
from scripts.bench.routing import ROUTINGS, route
from scripts.bench.runner import Options, Result, failures, measure_case
from scripts.bench.shapes import BAR_SHAPES, named_shapes
from scripts.bench.timing import Cublas, CudaMeter

DIRECTIONS: dict[str, frozenset[Direction]] = {
    "forward": frozenset({"forward"}),
    "backward": frozenset({"backward"}),
    "both": frozenset({"forward", "backward"}),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; exits with 2 for one that means nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shapes, names = list(named_shapes()), list(registry())
    add = parser.add_argument
    add("--shapes", nargs="+", choices=shapes, default=list(BAR_SHAPES), metavar="NAME", help=", ".join(shapes))
    add("--impl", nargs="+", choices=names, metavar="NAME", help=f"{', '.join(names)}; default: what runs here")
    add("--tokens", nargs="+", type=_positive, default=[8192], metavar="T", help="tokens per rank")
    add("--routing", nargs="+", choices=list(ROUTINGS), default=["uniform"])
    add(
        "--ring-fraction", nargs="+", type=_fraction, default=[], metavar="F",
        help="also mok with a ring of F of the rows of the case, as mok-ring-F",
    )  # fmt: skip
    add("--direction", choices=list(DIRECTIONS), default="forward")
    kept = parser.add_mutually_exclusive_group()
    add_kept = kept.add_argument
    add_kept("--save", dest="saves", action="store_true", default=True, help="keep what backward needs (default)")
    add_kept("--no-grad", dest="saves", action="store_false", help="run every forward under no_grad")
    add("--iterations", type=_positive, help="timed calls (default: 8 to 40, by duration)")
    add("--json", type=Path, metavar="FILE", help="write the results")
    add("--picture", type=Path, metavar="FILE", help="draw them (.png, .svg, .pdf)")
    options = parser.parse_args(arguments)
    if not options.saves and options.direction != "forward":
        parser.error(f"--no-grad has no backward: --direction {options.direction} needs what forward saves")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {value}")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be in (0, 1], got {value:g}")
    return value


def _join_ranks() -> Ranks:
    """This process's place, from torchrun's environment; alone without it."""
    names = (("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0"))
    world, rank, local = (int(os.environ.get(name, default)) for name, default in names)
    if torch.cuda.device_count() <= local:
        raise SystemExit(f"bench_layer: rank {rank} needs GPU {local}, this machine has {torch.cuda.device_count()}")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    if world == 1:
        return Ranks(rank=0, world=1, device=device)
    dist.init_process_group("nccl", device_id=device)
    return Ranks(rank=rank, world=world, device=device, group=dist.group.WORLD)


def check(options: argparse.Namespace, world: int) -> None:
    """Raise ValueError for what cannot be measured on ``world`` ranks, before anything is."""
    select(registry(), options.impl, DIRECTIONS[options.direction], saves=options.saves)
    for name in options.shapes:
        for routing in options.routing:
            route(routing, named_shapes()[name].on_ranks(world), 1, 0, torch.Generator())


def chosen(options: argparse.Namespace) -> list[Implementation]:
    """What is to be measured: the implementations named, or those by default, and the rings asked for."""
    entries = select(registry(), options.impl, DIRECTIONS[options.direction], saves=options.saves)
    return entries + [with_ring(fraction) for fraction in options.ring_fraction]


def run(options: argparse.Namespace, ranks: Ranks, arguments: list[str]) -> list[Result]:
    """All cases, one after the other; rank 0 prints and writes each as soon as it is done."""
    meter = CudaMeter(ranks)
    cublas = Cublas(meter, ranks.device)
    entries = chosen(options)
    timed = Options(directions=DIRECTIONS[options.direction], saves=options.saves, iterations=options.iterations)
    shapes = named_shapes()
    results: list[Result] = []
    for name, routing, tokens in itertools.product(options.shapes, options.routing, options.tokens):
        case = make_case(name, shapes[name].on_ranks(ranks.world), ranks, tokens=tokens, routing=routing)
        found = measure_case(case, entries, meter, cublas, timed)
        del case
        torch.cuda.empty_cache()
        results += found
        if ranks.rank == 0:
            parts = (report.cublas_lines(found), report.table(found), report.ring_lines(found))
            print(*filter(None, parts), "", sep="\n", flush=True)
            if options.json is not None:
                report.write_json(options.json, report.document(results, ["scripts/bench_layer.py", *arguments]))
    return results


def main(arguments: list[str]) -> int:
    """Run the command line; the exit code."""
    options = parse(arguments)
    try:
        check(options, int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError as error:
        sys.stderr.write(f"bench_layer: {error}\n")
        return 2
    ranks = _join_ranks()
    results = run(options, ranks, arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
    failed = failures(results, options.impl and [entry.name for entry in chosen(options)])
    if ranks.rank == 0:
        _conclude(options, results, arguments)
        sys.stderr.writelines(f"bench_layer: {line}\n" for line in failed)
    return 1 if failed else 0


def _conclude(options: argparse.Namespace, results: list[Result], arguments: list[str]) -> None:
    document = report.document(results, ["scripts/bench_layer.py", *arguments])
    print(
        f"{document['gpu']}, power limit {document['power_limit']}, driver {document['driver']}, "
        f"torch {document['torch']}, commit {document['commit'][:12]}"
    )
    if options.picture is not None:
        report.draw(options.picture, results, f"{document['gpu']}, bf16")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
