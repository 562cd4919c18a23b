"""The tensors of one measured case, the same for every implementation, and what a rank must know of its group."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron import memory
from mok_megatron.config import MoeShape
from mok_megatron.tile_order import BLOCK_ROWS

from .routing import route

MEMORY_SHARE = 0.4
"""Part of the free memory that inputs and weights may take when there is a choice."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the W of the run. ``group`` is None for a single one."""

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    def gather(self, tensor: Tensor) -> Tensor:
        """Every rank's ``tensor``, equal in shape, joined along dim 0 in rank order."""
        if self.group is None:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts)

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """``tensor`` summed (or reduced by ``operation``) over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(tensor, op=operation, group=self.group)
        return tensor

    def largest(self, value: float) -> float:
        """The largest ``value`` of all ranks."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        return float(self.reduce(tensor, dist.ReduceOp.MAX).item())


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One set of tensors: ``x``, ``dy [T, H]``, ``w1 [e, 2I, H]`` (gate rows, then up), ``w2 [e, H, I]``, all bf16."""

    x: Tensor
    dy: Tensor
    w1: Tensor
    w2: Tensor

    @property
    def bytes(self) -> int:
        """Memory of the set."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.x, self.dy, self.w1, self.w2))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape, token count and routing, with its tensors on this rank.

    Attributes:
        tokens: T per rank, the same on all.
        experts, weights: ``[T, K]`` int64 ids and fp32 router weights.
        copies: sets with equal values at different addresses; calls take them in turn, so that none finds its weights
            or its input in the cache.
        load: routes of the busiest rank over the mean.
        rows: rows of the fullest rank, each expert's padded to whole blocks.
    """

    name: str
    shape: MoeShape
    routing: str
    ranks: Ranks
    experts: Tensor
    weights: Tensor
    copies: tuple[Copy, ...]
    load: float
    rows: int

    @property
    def tokens(self) -> int:
        """T."""
        return self.experts.shape[0]

    @property
    def first_expert(self) -> int:
        """Global id of this rank's first expert."""
        return self.ranks.rank * self.shape.experts_per_rank

    def dense_routing(self) -> tuple[Tensor, Tensor]:
        """What Megatron's router returns: ``probs [T, E]`` fp32, ``routing_map [T, E]`` bool."""
        size = (self.tokens, self.shape.num_experts)
        probs = self.weights.new_zeros(size).scatter_(1, self.experts, self.weights)
        routing_map = torch.zeros(size, dtype=torch.bool, device=probs.device).scatter_(1, self.experts, True)
        return probs, routing_map

    def ring_rows(self, fraction: float | None = None) -> int | None:
        """Row capacity to ask for: None (the default) unless this routing needs more, or ``fraction`` of its rows."""
        if fraction is not None:
            return math.ceil(fraction * self.rows / BLOCK_ROWS) * BLOCK_ROWS
        default = memory.default_ring_rows(self.shape, self.tokens)
        return self.rows if self.rows > default else None


def make_case(
    name: str, shape: MoeShape, ranks: Ranks, *, tokens: int, routing: str, max_copies: int = 2, seed: int = 1
) -> Case:
    """Draw a case's tensors. Values are normal with unit-scale outputs: zeros would draw less power and run faster.

    There are ``max_copies`` sets if ``MEMORY_SHARE`` of the free memory holds them, else fewer. Raises ValueError for
    a routing that the shape does not admit, or tokens < 1.
    """
    if tokens < 1:
        raise ValueError(f"tokens must be >= 1, got {tokens}")
    generator = torch.Generator(device=ranks.device).manual_seed(seed + ranks.rank)
    experts, weights = route(routing, shape, tokens, ranks.rank, generator)
    counts = ranks.reduce(torch.bincount(experts.flatten(), minlength=shape.num_experts)).view(ranks.world, -1)
    padded = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS

    def normal(*size: int, scale: float) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=ranks.device).normal_(0, scale, generator=generator)

    hidden, inner, local = shape.hidden, shape.intermediate, shape.experts_per_rank
    first = Copy(
        x=normal(tokens, hidden, scale=1.0),
        dy=normal(tokens, hidden, scale=1.0),
        w1=normal(local, 2 * inner, hidden, scale=hidden**-0.5),
        w2=normal(local, hidden, inner, scale=inner**-0.5),
    )
    copies = [first]
    while len(copies) < max_copies and (len(copies) + 1) * first.bytes < _budget(ranks, len(copies) * first.bytes):
        copies.append(Copy(x=first.x.clone(), dy=first.dy.clone(), w1=first.w1.clone(), w2=first.w2.clone()))
    return Case(
        name=name,
        shape=shape,
        routing=routing,
        ranks=ranks,
        experts=experts,
        weights=weights,
        copies=tuple(copies),
        load=float(counts.sum(1).max()) / (tokens * shape.top_k),
        rows=int(padded.sum(1).max()),
    )


def _budget(ranks: Ranks, taken: int) -> float:
    """Bytes that all sets together may take, the same on every rank."""
    if ranks.device.type != "cuda":
        return float("inf")
    free = torch.cuda.mem_get_info(ranks.device)[0] + taken
    return MEMORY_SHARE * -ranks.largest(-free)
