"""One simulated call: dispatch, tiles in ticket order, combine."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from mok_megatron.floors import Direction, Floors, gemm_hbm_bytes, routed_flops
from mok_megatron.memory import BACKWARD_TILE_COLUMNS
from mok_megatron.simulator.links import Floats, Ports, combine_pull, combine_push, dispatch
from mok_megatron.simulator.machine import Machine, Policy
from mok_megatron.simulator.traffic import Traffic
from mok_megatron.tile_order import BLOCK_ROWS, FC1_TILE_COLUMNS, FC2_TILE_COLUMNS, TileOrder, fc2_lag


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A prediction for one call; seconds.

    Attributes:
        total_s: from the first rank's start to the last rank's end.
        dispatch_s: until the last row arrived.
        compute_s: until the last tile was done.
        tail_s: what combine adds after the last tile.
        waiting: share of the clusters' time spent waiting for rows or earlier tiles.
        floors: of this very traffic on this machine.
        imbalance: rows of the fullest rank over the mean.
        flops: useful FLOPs per rank (mean).
    """

    direction: Direction
    total_s: float
    dispatch_s: float
    compute_s: float
    tail_s: float
    waiting: float
    floors: Floors
    imbalance: float
    flops: float
    basis: str

    @property
    def tflops(self) -> float:
        """Useful TFLOP/s per GPU."""
        return self.flops / self.total_s / 1e12

    def describe(self) -> str:
        """The prediction with what it rests on."""
        return (
            f"predicted {self.direction} {self.total_s * 1e3:.3f} ms ({self.tflops:.0f} TFLOP/s per GPU, floor "
            f"{self.floors.bound * 1e3:.3f} ms by {self.floors.limit}); not a measurement: {self.basis}"
        )


def simulate(
    machine: Machine, policy: Policy, traffic: Traffic, direction: Direction = "fwd", *, seed: int = 0
) -> Outcome:
    """Run one call of the layer on every rank of ``traffic``; bf16 rows."""
    shape = traffic.shape
    ranks, row_bytes = shape.ep_size, 2 * shape.hidden
    rng = np.random.default_rng(seed)
    spread = np.linspace(0.0, machine.skew_s, ranks)
    ready = machine.start_s(direction, traffic.tokens * shape.top_k)
    starts = [ready + float(offset) for offset in rng.permutation(spread)]

    ports = Ports(machine, policy, ranks)
    # Every rank reads its peers' rows: none can begin before the last one has published them.
    began = [max(starts)] * ranks if ranks > 1 else starts
    arrival, arrived = dispatch(traffic, policy, ports, began, row_bytes)

    floors = traffic_floors(machine, policy, traffic, direction)
    slow = slowdown(machine, traffic, direction, floors)
    block_done = np.zeros(len(traffic.block_sources))
    ends, waited = [], 0.0
    for rank in range(ranks):
        first, last = int(traffic.first_block[rank]), int(traffic.first_block[rank + 1])
        workers = [starts[rank]] * policy.compute_clusters(machine)
        if policy.copy_layout == "dedicated" and policy.combine == "pull":
            workers += [arrived[rank]] * (policy.copy_sms(machine) // 2)
        run = _RankRun(machine, traffic, rank, direction, slow, rng)
        done, end, waits = run.tiles(arrival[first:last], workers)
        block_done[first:last] = done
        ends.append(end)
        waited += waits / len(workers)

    combine = combine_pull if policy.combine == "pull" else combine_push
    ports.peer = [max(ports.peer)] * ranks
    combined = combine(traffic, policy, ports, block_done, row_bytes, [max(arrived)] * ranks)
    total = max(*ends, *combined) + (machine.latency_s if ranks > 1 else 0.0)
    total = max(total, floors.hbm_s)
    return Outcome(
        direction=direction,
        total_s=total,
        dispatch_s=max(arrived),
        compute_s=max(ends),
        tail_s=max(0.0, total - max(ends)),
        waiting=waited / sum(ends) if sum(ends) else 0.0,
        floors=floors,
        imbalance=traffic.imbalance,
        flops=routed_flops(shape, traffic.tokens, direction),
        basis=machine.basis,
    )


def slowdown(machine: Machine, traffic: Traffic, direction: Direction, floors: Floors) -> float:
    """Factor on every tile's time: rows on NVLink and the tiles' own loads and stores are in the way of the GEMM."""
    if not floors.flop_s:
        return 1.0
    tokens = float(traffic.rows.max()) / traffic.shape.top_k
    memory_s = gemm_hbm_bytes(traffic.shape, tokens, direction) / machine.hbm
    return (
        1.0
        + machine.contention * min(1.0, floors.nvlink_s / floors.flop_s)
        + machine.hbm_contention * min(1.0, memory_s / floors.flop_s)
    )


def traffic_floors(machine: Machine, policy: Policy, traffic: Traffic, direction: Direction) -> Floors:
    """Floors of the busiest rank or link for this very routing."""
    shape = traffic.shape
    per_row = routed_flops(shape, 1, direction) / shape.top_k
    inward, outward = np.zeros(shape.ep_size), np.zeros(shape.ep_size)
    for rank in range(shape.ep_size):
        for block in range(int(traffic.first_block[rank]), int(traffic.first_block[rank + 1])):
            for source, rows, crossings in traffic.block_sources[block]:
                if source != rank:
                    there = crossings if policy.dedup else rows
                    back = crossings if policy.combine_per_rank else rows
                    inward[rank] += there
                    outward[source] += there
                    inward[source] += back
                    outward[rank] += back
    busiest = max(float(inward.max()), float(outward.max())) * 2 * shape.hidden
    weights = shape.experts_per_rank * 3 * shape.hidden * shape.intermediate
    per_weight = 2 if direction == "fwd" else 10  # backward also reads and writes its fp32 gradient
    return Floors(
        flop_s=float(traffic.rows.max()) * per_row / machine.rate(direction, -math.inf),
        nvlink_s=busiest / machine.nvlink,
        hbm_s=weights * per_weight / machine.hbm,
    )


class _RankRun:
    """Tiles of one rank: durations, and the walk through the tickets."""

    def __init__(
        self,
        machine: Machine,
        traffic: Traffic,
        rank: int,
        direction: Direction,
        slow: float,
        rng: np.random.Generator,
    ) -> None:
        shape = traffic.shape
        self.rng = rng
        self.machine = machine
        self.row_blocks = traffic.expert_blocks[rank].tolist()
        self.direction = direction
        self.shape = shape
        self.slow = slow
        # Backward walks the same order: its first phase is dY W2 with the activation's gradient, its second dGateUp W1.
        first_columns = FC1_TILE_COLUMNS if direction == "fwd" else BACKWARD_TILE_COLUMNS
        fc1_columns = -(-shape.intermediate // first_columns)
        lag = fc2_lag(
            traffic.tokens * shape.ep_size * shape.top_k / shape.num_experts,
            fc1_columns=fc1_columns,
            clusters=machine.sms // 2,
            experts=shape.experts_per_rank,
        )
        self.order = TileOrder(
            self.row_blocks, fc1_columns=fc1_columns, fc2_columns=-(-shape.hidden // FC2_TILE_COLUMNS), lag=lag
        )

    def _duration(self, begin: float, depth: int, epilogue: float) -> float:
        """A cluster tile of 256 x 256 accumulators, ``depth`` deep: at the clock that it begins with."""
        flops = 2.0 * 256 * 256 * depth
        return (flops / (self.machine.rate(self.direction, begin) / (self.machine.sms // 2)) + epilogue) * self.slow

    def _noise(self, count: int) -> list[float]:
        if self.machine.jitter == 0.0:
            return [1.0] * count
        factors: list[float] = np.maximum(self.rng.normal(1.0, self.machine.jitter, count), 0.5).tolist()
        return factors

    def tiles(self, arrival: Floats, workers: list[float]) -> tuple[Floats, float, float]:
        """(time at which each block's last column is done, end of the last tile, summed waiting of the workers)."""
        hidden, width, forward = self.shape.hidden, self.shape.intermediate, self.direction == "fwd"
        epilogues = self.machine.epilogues
        first = (hidden, epilogues.fc1 if forward else epilogues.act_grad)
        second = (width * (1 if forward else 2), epilogues.fc2)
        rows_ready = arrival.tolist()
        first_left = [self.order.columns["fc1"]] * len(rows_ready)
        first_done, second_done = [0.0] * len(rows_ready), [0.0] * len(rows_ready)
        heapq.heapify(workers)
        waits = 0.0
        for tile, noise in zip(self.order, self._noise(self.order.num_tickets), strict=True):
            low, high = tile.row_block, tile.row_block + (0 if tile.wide else 1)
            free = workers[0]
            if tile.phase == "fc1":
                begin = max(free, rows_ready[low], rows_ready[high])
                end = begin + self._duration(begin, *first) * noise
                columns = min(2, self.order.columns["fc1"] - tile.column) if tile.wide else 1
                for block in {low, high}:
                    first_left[block] -= columns
                    first_done[block] = max(first_done[block], end)
            else:
                if first_left[low] or first_left[high]:
                    raise RuntimeError(f"ticket order: {tile} comes before all FC1 tiles of its row blocks")
                begin = max(free, first_done[low], first_done[high])
                end = begin + self._duration(begin, *second) * noise
                second_done[low], second_done[high] = max(second_done[low], end), max(second_done[high], end)
            waits += begin - free
            heapq.heapreplace(workers, end)
        if not forward:
            self._weight_gradients(workers)
        return np.array(second_done), max(workers), waits

    def _weight_gradients(self, workers: list[float]) -> None:
        """dW tiles of 256 x 256, expert by expert, behind all dgrad tickets: what they read is finished by then."""
        hidden, width = self.shape.hidden, self.shape.intermediate
        columns = -(-hidden // 256)
        tiles = -(-2 * width // 256) * columns + columns * -(-width // 256)
        for blocks in self.row_blocks:
            for noise in self._noise(tiles):
                duration = self._duration(workers[0], blocks * BLOCK_ROWS, self.machine.epilogues.wgrad)
                heapq.heapreplace(workers, workers[0] + duration * noise)
