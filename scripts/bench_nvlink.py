"""Measure what the layer does over NVLink, on two GPUs: rows pulled, outputs pushed, signals; alone and beside GEMMs.

``torchrun --nproc-per-node 2 scripts/bench_nvlink.py``. What the tables say: docs/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # read once: the layer may not queue behind what watches it

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron import memory
from mok_megatron.backends import peer_memory
from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.config import MokConfig
from mok_megatron.tile_order import BLOCK_ROWS, FC2_TILE_COLUMNS
from scripts.bench import nvlink_report, report
from scripts.bench.inputs import Case, Ranks, make_case
from scripts.bench.nvlink import Kernels
from scripts.bench.shapes import named_shapes
from scripts.bench.timing import CudaMeter

Row = dict[str, Any]

PULL_WARPS = (2, 32)
"""Warps per SM: those that communicate in the layer's kernel, and as many as there can be."""
PUSH_WARPS = 8
"""Those that multiply, and write what they have multiplied."""
ROWS_PER_WARP = 256
"""For a few warps, so that they take no seconds."""
ROUNDS = 1000
QUEUED_CYCLES = 10_000_000
"""The GPU sleeps for so long (5 ms or more) before an observed forward, until the host has queued all of it."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; exits with 2 for one that means nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=list(named_shapes()), default="deepseek-v3")
    add("--tokens", type=int, default=8192, metavar="T", help="per rank")
    add("--routing", nargs="+", choices=["uniform", "all-remote"], default=["uniform", "all-remote"])
    add("--comm-sms", nargs="+", type=int, default=[2, 4, 8, 16, 32, 132], metavar="N")
    add("--iterations", type=int, default=10, metavar="N")
    add("--json", type=Path, metavar="FILE", help="write the results")
    add("--picture", type=Path, metavar="FILE", help="draw them (.png, .svg, .pdf)")
    options = parser.parse_args(arguments)
    if min(options.tokens, options.iterations, *options.comm_sms) < 1:
        parser.error("--tokens, --iterations and --comm-sms must be >= 1")
    return options


class Peer:
    """This rank's symmetric buffer of rows and flags, and where the peer's is."""

    def __init__(self, ranks: Ranks, rows: int, hidden: int) -> None:
        assert ranks.group is not None
        self.rows, self.vectors = rows, hidden // 8
        self.bytes = rows * hidden * 2
        self._memory = peer_memory.allocate(self.bytes + 1024, ranks.group, ranks.device)
        self.flags = self._memory.buffer[self.bytes :].view(torch.int32)
        self.address = self._memory.addresses[1 - ranks.rank]
        self.flag_address = self.address + self.bytes
        self._memory.buffer[: self.bytes].view(torch.bfloat16).normal_()


def bandwidth(kernels: Kernels, meter: CudaMeter, peer: Peer, ranks: Ranks, options: argparse.Namespace) -> list[Row]:
    """Rows pulled, and outputs pushed, by both ranks at once, in GB/s of one direction."""
    generator = torch.Generator(device=ranks.device).manual_seed(ranks.rank)
    order = torch.randperm(peer.rows, device=ranks.device, generator=generator).int()
    to = torch.empty(peer.rows, peer.vectors * 8, dtype=torch.bfloat16, device=ranks.device)
    counters = torch.zeros(1 + -(-peer.rows // BLOCK_ROWS), dtype=torch.int32, device=ranks.device)
    found = []

    def timed(what: str, sms: int, warps: int, rows: int, *arguments: Tensor | int) -> None:
        def call(index: int) -> None:
            counters.zero_()
            kernels(what, peer.address, order, rows, peer.vectors, *arguments)

        ms = meter.time(call, options.iterations).ms
        rate = 16 * rows * peer.vectors / ms / 1e6
        found.append({"what": what, "sms": sms, "warps": warps, "rows": rows, "ms": ms, "gb_per_s": rate})

    for sms in options.comm_sms:
        for warps in PULL_WARPS:
            rows = min(peer.rows, ROWS_PER_WARP * sms * warps)
            timed("pull", sms, warps, rows, to, counters, counters[1:], sms, warps)
        rows = min(peer.rows, ROWS_PER_WARP * sms * PUSH_WARPS)
        timed("push", sms, PUSH_WARPS, rows, counters, counters[1:], sms)
    return found


def signals(kernels: Kernels, peer: Peer, ranks: Ranks) -> list[Row]:
    """Microseconds from what one warp has done to another's knowing it."""
    nanoseconds = torch.zeros(1, dtype=torch.int64, device=ranks.device)
    flags = torch.zeros(64, dtype=torch.int32, device=ranks.device)
    to = torch.empty(2, peer.vectors * 8, dtype=torch.bfloat16, device=ranks.device)

    def hop_us(launch: Callable[[], None], hops: int) -> float:
        times = []
        for _ in range(4):  # the first is not counted
            for tensor in (flags, peer.flags, nanoseconds):
                tensor.zero_()
            torch.cuda.synchronize()
            dist.barrier()
            launch()
            torch.cuda.synchronize()
            times.append(nanoseconds.item() / hops / 1e3)
        return ranks.largest(statistics.median(times[1:]))

    begins, raised = ranks.rank == 0, peer.flags[64:]
    on_gpu = hop_us(lambda: kernels("answer_on_gpu", flags, ROUNDS, None, 0, None, nanoseconds), 2 * ROUNDS)
    with_row = hop_us(
        lambda: kernels("answer_on_gpu", flags, ROUNDS, peer.address, peer.vectors, to, nanoseconds), 2 * ROUNDS
    )
    row = hop_us(lambda: kernels("bring", peer.address, peer.vectors, to, ROUNDS, nanoseconds), ROUNDS)
    # The waiting rank polls its peer's counter, as combine does; or the peer writes the counter of the waiting rank.
    polled = hop_us(
        lambda: kernels("answer_peer", peer.flag_address + 256, raised, begins, ROUNDS, nanoseconds), 2 * ROUNDS
    )
    written = hop_us(
        lambda: kernels("answer_peer", raised, peer.flag_address + 256, begins, ROUNDS, nanoseconds), 2 * ROUNDS
    )
    return [
        {"what": "flag to another SM of the GPU", "us": on_gpu},
        {"what": "one row pulled, by one warp", "us": row},
        {"what": "one row pulled and another SM told", "us": with_row},
        {"what": "from the last row's arrival to the consumer's start", "us": with_row - row},
        {"what": "to the peer, which polls a counter here", "us": polled},
        {"what": "to the peer, a counter there is written", "us": written},
    ]


def in_layer(kernels: Kernels, meter: CudaMeter, case: Case, sms: int, options: argparse.Namespace) -> Row:
    """The whole forward with ``sms`` communication SMs, and when its rows and outputs were there."""
    ranks, shape, copy = case.ranks, case.shape, case.copies[0]
    config = MokConfig(backend="cuda", comm_sms=sms, ring_rows=case.ring_rows(), time_limit_s=60.0)
    backend = CudaBackend.create(shape, config, ranks.group, ranks.device)
    backend.reserve(case.tokens)
    probs, routing_map = case.dense_routing()
    w1, w2 = list(copy.w1), list(copy.w2)

    def forward(index: int) -> Tensor:
        schedule = backend.build_schedule(copy.x, probs, routing_map, layer=1)
        return backend.forward(copy.x, schedule, w1, w2, save=True, layer=1)[0]

    ms = meter.time(forward, options.iterations).ms
    side = torch.cuda.Stream()
    seen = [_observe(kernels, backend, case, (probs, routing_map), (w1, w2), side) for _ in range(5)][1:]
    stages = {name: ranks.largest(statistics.median(one[name] for one in seen)) for name in seen[0]}
    backend.close()
    remote = case.experts // shape.experts_per_rank != ranks.rank
    row_bytes = 2 * shape.hidden
    pulled = ranks.largest(float(remote.any(1).sum()) * row_bytes)
    pushed = ranks.largest(float(remote.sum()) * row_bytes)
    return {
        "routing": case.routing,
        "sms": sms,
        "ms": ms,
        **stages,
        "pulled_bytes": pulled,
        "pushed_bytes": pushed,
        "pull_gb_per_s": pulled / stages["rows_ms"] / 1e6,
        "push_gb_per_s": pushed / (stages["outputs_ms"] - stages["first_output_ms"]) / 1e6,
    }


def _observe(
    kernels: Kernels,
    backend: CudaBackend,
    case: Case,
    routing: tuple[Tensor, Tensor],
    weights: tuple[list[Tensor], list[Tensor]],
    side: torch.cuda.Stream,
) -> dict[str, float]:
    """Milliseconds after the begin of one forward: all rows here, first and last output tile written, the end.

    What watches, on ``side``, takes the place of a cluster: the forward has two SMs less.
    """
    device, x, space = case.ranks.device, case.copies[0].x, backend.workspace
    assert space is not None
    stamps, signal = torch.zeros(5, dtype=torch.int64, device=device), torch.zeros(1, device=device)
    schedule = backend.build_schedule(x, *routing, layer=1)
    blocks = int(schedule.expert_first_row[-1]) // BLOCK_ROWS
    tiles = blocks * -(-case.shape.hidden // FC2_TILE_COLUMNS)
    kernels("stamp", stamps[4:])  # so that nothing is loaded while the layer runs
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.stream(side):
        kernels(
            "observe",
            space.scratch["counters"] + 4 * memory.COUNTER_WORDS,
            space.base + space.layout.fc2_done,
            space.scratch["epoch"],
            space.sizes.max_rows // BLOCK_ROWS,
            blocks,
            blocks * BLOCK_ROWS,
            tiles,
            stamps[1:],
        )
    torch.cuda._sleep(QUEUED_CYCLES)
    case.ranks.reduce(signal)  # both ranks begin together
    kernels("stamp", stamps)
    backend.forward(x, schedule, *weights, save=True, layer=1)
    kernels("stamp", stamps[4:])
    torch.cuda.synchronize()
    begin, *times = stamps.tolist()
    names = ("rows_ms", "first_output_ms", "outputs_ms", "observed_ms")
    return {name: (time - begin) / 1e6 for name, time in zip(names, times, strict=True)}


def run(options: argparse.Namespace, ranks: Ranks) -> Iterator[dict[str, list[Row]]]:
    """All measurements so far, after each part and each layer; the same calls on both ranks."""
    kernels, meter = Kernels(), CudaMeter(ranks)
    shape = named_shapes()[options.shape].on_ranks(ranks.world)
    peer = Peer(ranks, options.tokens * shape.top_k, shape.hidden)
    found: dict[str, list[Row]] = {"bandwidth": bandwidth(kernels, meter, peer, ranks, options)}
    yield found
    found["signals"] = signals(kernels, peer, ranks)
    yield found
    del peer
    torch.cuda.empty_cache()
    found["layer"] = []
    for routing in options.routing:
        case = make_case(options.shape, shape, ranks, tokens=options.tokens, routing=routing, max_copies=1)
        for sms in options.comm_sms:
            found["layer"].append(in_layer(kernels, meter, case, sms, options))
            yield found


def document(found: Mapping[str, Sequence[Row]], options: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    """What the file holds: where and how it was measured, and the lists."""
    about = report.document([], ["scripts/bench_nvlink.py", *command])
    about.pop("results")
    return {**about, "shape": options.shape, "T": options.tokens, **found}


def main(arguments: list[str]) -> int:
    """Run the command line; the exit code."""
    options = parse(arguments)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world != 2 or torch.cuda.device_count() < 2:
        sys.stderr.write(f"bench_nvlink: needs 2 ranks and 2 GPUs, here are {world} and {torch.cuda.device_count()}\n")
        return 2
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    content: dict[str, Any] = {}
    for found in run(options, Ranks(rank=rank, world=world, device=device, group=dist.group.WORLD)):
        content = document(found, options, arguments)
        if rank == 0 and options.json is not None:
            report.write_json(options.json, content)
    dist.destroy_process_group()
    if rank == 0:
        print(nvlink_report.tables(content))
        if options.picture is not None:
            nvlink_report.draw(options.picture, content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
