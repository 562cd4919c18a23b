"""The one table of routings: what breaks MoE dispatchers in the field, for tests on CPU and GPU and for benchmarks.

A case fixes experts, K and the tokens of each rank; ``generate`` draws router outputs for a seed. Hidden sizes, dtype
and backend are the user's. ``CASES`` maps names to cases; ``cases_for(world)`` picks those of one EP size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

PickExperts = Callable[[Generator, int, int, int], Tensor]
"""(generator, T, E, K) -> routing map ``[T, E]`` bool over the tokens of all ranks, in rank order."""


def map_from_indices(indices: Tensor, num_experts: int) -> Tensor:
    """``indices [T, K]`` expert ids, -1 for none -> ``[T, E]`` bool. An id that a row repeats counts once."""
    table = torch.zeros(indices.shape[0], num_experts + 1, dtype=torch.bool)
    table.scatter_(1, torch.where(indices < 0, num_experts, indices), True)
    return table[:, :num_experts]


def _uniform(generator: Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    return map_from_indices(torch.rand(tokens, experts, generator=generator).topk(top_k).indices, experts)


def _skewed(generator: Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Early experts get most of the rows."""
    score = torch.rand(tokens, experts, generator=generator) - torch.arange(experts) / experts
    return map_from_indices(score.topk(top_k).indices, experts)


def _among(first: int, last: int) -> PickExperts:
    """Only experts first..last-1 get rows; all others stay empty."""

    def pick(generator: Generator, tokens: int, experts: int, top_k: int) -> Tensor:
        chosen = torch.rand(tokens, last - first, generator=generator).topk(min(top_k, last - first)).indices
        return map_from_indices(chosen + first, experts)

    return pick


def all_to(*experts: int, tokens: int | None = None) -> PickExperts:
    """All of the first ``tokens`` (None: all) go to these experts, the others nowhere."""

    def pick(generator: Generator, total: int, num_experts: int, top_k: int) -> Tensor:
        table = torch.zeros(total, num_experts, dtype=torch.bool)
        table[:tokens, list(experts)] = True
        return table

    return pick


def _one_row_each(generator: Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    return map_from_indices(torch.randperm(experts, generator=generator).view(tokens, top_k), experts)


def _quarter_masked(generator: Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """A quarter of the rows, spread over the batch, has no expert (padding tokens)."""
    table = _uniform(generator, tokens, experts, top_k)
    table[torch.randperm(tokens, generator=generator)[: tokens // 4]] = False
    return table


def _dropped(generator: Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Any of a row's K routes may be missing, as with a capacity limit: rows with 0..K experts."""
    return _uniform(generator, tokens, experts, top_k) & (torch.rand(tokens, experts, generator=generator) < 0.6)


def _one_of_k(generator: Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    return _uniform(generator, tokens, experts, 1)


def _none(generator: Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    return torch.zeros(tokens, experts, dtype=torch.bool)


def _half_on_first_k(generator: Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Router replay sends every padding token to experts 0..K-1."""
    table = _uniform(generator, tokens, experts, top_k)
    table[::2] = torch.arange(experts) < top_k
    return table


def _repeated_ids(generator: Generator, tokens: int, experts: int, top_k: int) -> Tensor:
    """Index-style rows that name one expert K times; each counts once."""
    chosen = torch.randint(experts, (tokens, 1), generator=generator).expand(tokens, top_k).clone()
    chosen[::3] = torch.rand(len(chosen[::3]), experts, generator=generator).topk(top_k).indices
    return map_from_indices(chosen, experts)


@dataclass(frozen=True, kw_only=True)
class RoutingCase:
    """One routing: ``tokens`` per rank (its length is W), E, K, and how experts are picked."""

    name: str
    tokens: tuple[int, ...]
    pick: PickExperts = _uniform
    num_experts: int = 8
    top_k: int = 2

    @property
    def world(self) -> int:
        """W, the EP size."""
        return len(self.tokens)

    def generate(self, seed: int) -> tuple[Tensor, Tensor]:
        """``probs [sum T, E]`` fp32 in (0, 1], 0 off-route, not normalised; ``routing_map [sum T, E]`` bool.

        Rows are in rank order; most probabilities need more mantissa bits than bf16 has.
        """
        generator = torch.Generator().manual_seed(seed)
        routing_map = self.pick(generator, sum(self.tokens), self.num_experts, self.top_k)
        probs = 1 - torch.rand(routing_map.shape, generator=generator)
        return probs * routing_map, routing_map


ODD_TOKEN_COUNTS = (*range(1, 18), 63, 64, 65, 127, 128, 129)

_ALL = [
    RoutingCase(name="w1_uniform", tokens=(128,)),
    RoutingCase(name="w1_k1", tokens=(33,), top_k=1),
    RoutingCase(name="w1_one_expert_in_all", tokens=(17,), num_experts=1, top_k=1),
    RoutingCase(name="w1_one_row_each", tokens=(4,), pick=_one_row_each),
    RoutingCase(name="w1_no_tokens", tokens=(0,)),
    RoutingCase(name="w1_e60_k4", tokens=(129,), num_experts=60, top_k=4),
    RoutingCase(name="w1_long", tokens=(4095,)),
    RoutingCase(name="uniform", tokens=(128, 128)),
    RoutingCase(name="skewed", tokens=(128, 128), pick=_skewed),
    RoutingCase(name="k1", tokens=(64, 65), top_k=1),
    RoutingCase(name="k8_of_16", tokens=(65, 63), num_experts=16, top_k=8),
    RoutingCase(name="every_expert", tokens=(17, 16), num_experts=4, top_k=4),
    RoutingCase(name="all_to_one_expert", tokens=(65, 63), pick=_among(3, 4)),
    RoutingCase(name="all_to_rank0", tokens=(65, 63), pick=_among(0, 4)),
    RoutingCase(name="all_to_rank1", tokens=(65, 63), pick=_among(4, 8)),
    RoutingCase(name="half_of_each_rank_empty", tokens=(65, 63), pick=_among(2, 6)),
    RoutingCase(name="one_row_each", tokens=(3, 1), pick=_one_row_each),
    RoutingCase(name="quarter_masked", tokens=(64, 64), pick=_quarter_masked),
    RoutingCase(name="dropped", tokens=(64, 64), top_k=4, pick=_dropped),
    RoutingCase(name="one_of_k", tokens=(64, 64), pick=_one_of_k),
    RoutingCase(name="no_routes", tokens=(64, 64), pick=_none),
    RoutingCase(name="half_on_first_k", tokens=(64, 64), pick=_half_on_first_k),
    RoutingCase(name="repeated_ids", tokens=(64, 64), pick=_repeated_ids),
    RoutingCase(name="unequal_by_one", tokens=(128, 127)),
    RoutingCase(name="unequal_extreme", tokens=(1, 4096)),
    RoutingCase(name="rank0_without_tokens", tokens=(0, 64)),
    RoutingCase(name="rank1_without_tokens_all_to_rank1", tokens=(64, 0), pick=_among(4, 8)),
    RoutingCase(name="no_tokens_anywhere", tokens=(0, 0)),
    *(RoutingCase(name=f"tokens_{count}", tokens=(count, count)) for count in ODD_TOKEN_COUNTS),
    RoutingCase(name="w4_uniform", tokens=(32, 33, 31, 32)),
    RoutingCase(name="w4_e60_k4", tokens=(31, 17, 0, 64), num_experts=60, top_k=4),
    RoutingCase(name="w4_one_expert_per_rank", tokens=(5, 9, 16, 1), num_experts=4),
    RoutingCase(name="w4_all_to_rank2", tokens=(7, 64, 0, 63), pick=_among(4, 6)),
    RoutingCase(name="w4_dropped", tokens=(65, 2, 31, 17), num_experts=12, top_k=4, pick=_dropped),
    RoutingCase(name="w4_no_tokens", tokens=(0, 0, 0, 0)),
]

CASES = {case.name: case for case in _ALL}


def cases_for(world: int) -> list[RoutingCase]:
    """All cases of EP size ``world``."""
    return [case for case in _ALL if case.world == world]
