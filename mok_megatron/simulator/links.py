"""Rows on the wire: when every row block arrives, and when every token is combined.

Each GPU has one ingress and one egress port of ``Machine.nvlink`` bytes/s, served in the order of request. Requests of
all ranks are taken in order of time, so that ports which several ranks want at once are shared as the links would.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mok_megatron.simulator.machine import Machine, Policy
from mok_megatron.simulator.traffic import Traffic

Floats = NDArray[np.float64]

WINDOW = 2
"""Requests of one rank in flight: about 264 copying warps hold two blocks of 128 rows."""
COMBINE_TOKENS = 128
"""Tokens combined as one request."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Rows that one rank wants: ``remote`` lists (peer, bytes over NVLink), ``local_bytes`` stay in the GPU."""

    remote: list[tuple[int, float]]
    local_bytes: float
    ready: float
    block: int


class Ports:
    """Busy-until times of all ingress and egress ports."""

    def __init__(self, machine: Machine, policy: Policy, ranks: int) -> None:
        self.bandwidth = machine.nvlink
        self.copy_rate = policy.copy_rate(machine)
        self.local_copy = machine.local_copy
        self.latency = machine.latency_s
        self.own = [0.0] * ranks
        self.peer = [0.0] * ranks
        """``own``: the port of the rank whose warps copy; ``peer``: the port at the other end."""

    def serve(self, queues: list[list[Request]], starts: list[float]) -> list[list[float]]:
        """Finish times of every request; each rank works through its queue in order, ``WINDOW`` at a time."""
        finished: list[list[float]] = [[] for _ in queues]
        heap = []
        for rank, queue in enumerate(queues):
            self.own[rank] = max(self.own[rank], starts[rank])
            if queue:
                heap.append((max(self.own[rank], queue[0].ready), rank, 0))
        heapq.heapify(heap)
        while heap:
            begin, rank, index = heapq.heappop(heap)
            request, queue = queues[rank][index], queues[rank]
            finished[rank].append(self._transfer(rank, request, begin))
            if index + 1 < len(queue):
                window = finished[rank][index + 1 - WINDOW] if index + 1 >= WINDOW else 0.0
                heapq.heappush(heap, (max(self.own[rank], window, queue[index + 1].ready), rank, index + 1))
        return finished

    def _transfer(self, rank: int, request: Request, begin: float) -> float:
        wire = sum(size for _, size in request.remote)
        self.own[rank] = max(self.own[rank], begin) + wire / self.copy_rate + request.local_bytes / self.local_copy
        done = self.own[rank]
        for peer, size in request.remote:
            self.peer[peer] = max(self.peer[peer], begin) + size / self.bandwidth
            done = max(done, self.peer[peer])
        return done + (self.latency if wire else 0.0)


def dispatch(
    traffic: Traffic, policy: Policy, ports: Ports, starts: list[float], row_bytes: int
) -> tuple[Floats, list[float]]:
    """Arrival time of every global block, and the time at which each rank has all its rows."""
    queues = [_pull_queue(traffic, policy, rank, row_bytes) for rank in range(traffic.shape.ep_size)]
    finished = ports.serve(queues, starts)
    arrival = np.zeros(len(traffic.block_sources))
    for queue, times in zip(queues, finished, strict=True):
        for request, time in zip(queue, times, strict=True):
            arrival[request.block] = time
    return arrival, [max(times, default=start) for times, start in zip(finished, starts, strict=True)]


def _pull_queue(traffic: Traffic, policy: Policy, rank: int, row_bytes: int) -> list[Request]:
    """Blocks of one destination in the order in which it pulls them."""
    queue, block = [], int(traffic.first_block[rank])
    for count in traffic.expert_blocks[rank].tolist():
        blocks = list(range(block, block + count))
        block += count
        if policy.pull_order == "rotated":
            first = next((i for i, b in enumerate(blocks) if traffic.block_sources[b][-1][0] >= rank), 0)
            blocks = blocks[first:] + blocks[:first]
        for b in blocks:
            remote, local = [], 0
            for source, rows, crossings in traffic.block_sources[b]:
                wired = (crossings if policy.dedup else rows) if source != rank else 0
                local += rows - wired
                if wired:
                    remote.append((source, wired * float(row_bytes)))
            queue.append(Request(remote=remote, local_bytes=local * float(row_bytes), ready=0.0, block=b))
    return queue


def combine_pull(
    traffic: Traffic, policy: Policy, ports: Ports, block_done: Floats, row_bytes: int, starts: list[float]
) -> list[float]:
    """Each owner fetches the rows of its tokens, some at a time, when all K of each are ready. End per rank."""
    ranks = traffic.shape.ep_size
    queues: list[list[Request]] = []
    for rank in range(ranks):
        blocks = traffic.route_block[rank]
        route_owner = np.searchsorted(traffic.first_block, blocks, side="right") - 1
        travels = traffic.crossing[rank] if policy.combine_per_rank else np.ones_like(traffic.crossing[rank])
        ready = block_done[blocks].max(axis=1) + ports.latency
        queue = []
        order = np.arange(traffic.tokens)
        if policy.token_order == "expert":
            order = np.argsort(traffic.last_expert[rank], kind="stable")
        for first in range(0, traffic.tokens, COMBINE_TOKENS):
            part = order[first : first + COMBINE_TOKENS]
            rows = np.bincount(route_owner[part][travels[part]], minlength=ranks)
            remote = [(peer, float(n) * row_bytes) for peer, n in enumerate(rows.tolist()) if n and peer != rank]
            local = (rows[rank] + part.size) * float(row_bytes)
            queue.append(Request(remote=remote, local_bytes=local, ready=float(ready[part].max()), block=first))
        queues.append(queue)
    return [max(times, default=start) for times, start in zip(ports.serve(queues, starts), starts, strict=True)]


def combine_push(
    traffic: Traffic, policy: Policy, ports: Ports, block_done: Floats, row_bytes: int, starts: list[float]
) -> list[float]:
    """The experts' ranks send each finished block; owners sum a token when its last row is there. End per rank."""
    ranks = traffic.shape.ep_size
    queues: list[list[Request]] = []
    for rank in range(ranks):
        blocks = range(int(traffic.first_block[rank]), int(traffic.first_block[rank + 1]))
        queue = []
        for b in sorted(blocks, key=lambda block: float(block_done[block])):
            sources = traffic.block_sources[b]
            moved = [(s, crossings if policy.combine_per_rank else rows) for s, rows, crossings in sources]
            remote = [(s, rows * float(row_bytes)) for s, rows in moved if s != rank and rows]
            queue.append(Request(remote=remote, local_bytes=0.0, ready=float(block_done[b]), block=b))
        queues.append(queue)
    landed = block_done.copy()
    for queue, times in zip(queues, ports.serve(queues, starts), strict=True):
        for request, time in zip(queue, times, strict=True):
            landed[request.block] = time
    ends = []
    per_token = (traffic.shape.top_k + 1) * row_bytes / ports.local_copy
    for rank in range(ranks):
        ready = np.sort(landed[traffic.route_block[rank]].max(axis=1)) + ports.latency
        # The sum is a queue with one server: the end is the latest of (ready of token i, then all from i on).
        left = np.arange(traffic.tokens, 0, -1) * per_token
        ends.append(float((ready + left).max()) if traffic.tokens else starts[rank])
    return ends
