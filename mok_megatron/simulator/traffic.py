"""Random routing and the rows that it sends where: the input of a simulation, built with numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mok_megatron.config import MoeShape
from mok_megatron.tile_order import BLOCK_ROWS

Ints = NDArray[np.int64]


def sample_routing(shape: MoeShape, tokens: int, *, imbalance: float = 0.0, seed: int = 0) -> Ints:
    """Expert ids ``[W, T, K]``, ascending and distinct in a row.

    Expert popularities are log-normal: ``imbalance`` is the standard deviation of their logarithm, 0 means uniform.
    """
    if imbalance < 0:
        raise ValueError(f"imbalance must be >= 0, got {imbalance}")
    rng = np.random.default_rng(seed)
    popularity = np.exp(rng.normal(0.0, imbalance, shape.num_experts))
    cumulative = np.cumsum(popularity / popularity.sum())
    cumulative[-1] = 1.0

    def draw(rows: int) -> Ints:
        picks = np.searchsorted(cumulative, rng.random((rows, shape.top_k)), side="right")
        return np.sort(np.minimum(picks, shape.num_experts - 1), axis=1)

    experts = draw(shape.ep_size * tokens)
    for _ in range(64):
        clash = np.flatnonzero((np.diff(experts, axis=1) == 0).any(axis=1))
        if not clash.size:
            break
        experts[clash] = draw(clash.size)
    else:
        # Few experts hold nearly all popularity (or K is close to E): choose the rest without replacement.
        keys = rng.exponential(size=(clash.size, shape.num_experts)) / popularity
        experts[clash] = np.sort(np.argsort(keys, axis=1)[:, : shape.top_k], axis=1)
    return experts.reshape(shape.ep_size, tokens, shape.top_k)


ROUTINGS = ("uniform", "zipf", "single-hot", "all-remote")
"""The benchmark's routings (docs/benchmarks/README.md)."""


def named_routing(name: str, shape: MoeShape, tokens: int, *, seed: int = 0) -> Ints:
    """Expert ids ``[W, T, K]`` drawn as the benchmark's routing of that name draws them, with other random numbers."""
    if name not in ROUTINGS:
        raise ValueError(f"unknown routing {name!r}; known are {', '.join(ROUTINGS)}")
    if name == "uniform":
        return sample_routing(shape, tokens, seed=seed)
    rng = np.random.default_rng(seed)
    weights = np.ones((shape.ep_size, 1, shape.num_experts))
    if name == "zipf":
        weights[:] = 1.0 / (1.0 + rng.permutation(shape.num_experts))
    elif name == "single-hot":
        weights[:, :, 0] = np.inf
    else:
        for rank in range(shape.ep_size):
            weights[rank, :, rank * shape.experts_per_rank : (rank + 1) * shape.experts_per_rank] = 0.0
    # The K first of exponential clocks that run at these rates are a draw without replacement.
    with np.errstate(divide="ignore"):
        clocks = rng.exponential(size=(shape.ep_size, tokens, shape.num_experts)) / weights
    return np.sort(np.argpartition(clocks, shape.top_k - 1, axis=2)[:, :, : shape.top_k], axis=2)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Rows per rank, expert, block and source of one call.

    Attributes:
        expert_blocks: ``[W, e]`` row blocks of each local expert.
        first_block: ``[W + 1]`` first block of each rank in a numbering over all ranks.
        route_block: ``[W, T, K]`` global block that holds each route's row.
        crossing: ``[W, T, K]`` whether the route is its token's first one on that rank.
        block_sources: per global block: list of (source rank, rows, rows that cross with dedup).
        last_expert: ``[W, T]`` largest local expert number among a token's routes, whatever their ranks.
        rows: ``[W]`` routed rows per rank, without padding.
    """

    shape: MoeShape
    tokens: int
    expert_blocks: Ints
    first_block: Ints
    route_block: Ints
    crossing: NDArray[np.bool_]
    block_sources: list[list[tuple[int, int, int]]]
    last_expert: Ints
    rows: Ints

    @property
    def imbalance(self) -> float:
        """Rows of the fullest rank over the mean."""
        mean = float(self.rows.mean())
        return float(self.rows.max()) / mean if mean else 1.0


def build_traffic(shape: MoeShape, experts: Ints) -> Traffic:
    """Lay the rows out as the schedule does: by expert, then source rank, then token, padded to blocks."""
    ranks, tokens, top_k = experts.shape
    local = shape.experts_per_rank
    flat = experts.reshape(-1)
    counts = np.bincount(flat, minlength=shape.num_experts)
    blocks = -(-counts // BLOCK_ROWS)
    expert_first_block = np.concatenate([[0], np.cumsum(blocks)])
    expert_first_row = np.concatenate([[0], np.cumsum(counts)])

    by_expert = np.argsort(flat, kind="stable")
    position = np.arange(flat.size) - expert_first_row[flat[by_expert]]
    route_block = np.empty(flat.size, dtype=np.int64)
    route_block[by_expert] = expert_first_block[flat[by_expert]] + position // BLOCK_ROWS

    owner = experts // local
    crossing = np.ones_like(experts, dtype=bool)
    crossing[:, :, 1:] = owner[:, :, 1:] != owner[:, :, :-1]

    source = np.repeat(np.arange(ranks), tokens * top_k)
    key, inverse = np.unique(route_block * ranks + source, return_inverse=True)
    rows = np.bincount(inverse, minlength=key.size)
    crossings = np.bincount(inverse, weights=crossing.reshape(-1), minlength=key.size).astype(np.int64)
    block_sources: list[list[tuple[int, int, int]]] = [[] for _ in range(int(expert_first_block[-1]))]
    for block_and_source, all_rows, crossing_rows in zip(key.tolist(), rows.tolist(), crossings.tolist(), strict=True):
        block, src = divmod(block_and_source, ranks)
        block_sources[block].append((src, all_rows, crossing_rows))

    return Traffic(
        shape=shape,
        tokens=tokens,
        expert_blocks=blocks.reshape(ranks, local),
        first_block=expert_first_block[::local].copy(),
        route_block=route_block.reshape(experts.shape),
        crossing=crossing,
        block_sources=block_sources,
        last_expert=(experts % local).max(axis=2),
        rows=counts.reshape(ranks, local).sum(axis=1),
    )
