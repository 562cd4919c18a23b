"""Router outputs to measure with: evenly spread, skewed, and the extremes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor

from mok_megatron.config import MoeShape

Scores = Callable[[MoeShape, int, int, Generator], Tensor]
"""(shape, T, rank, generator) -> ``[T, E]`` fp32 scores; a token's experts are the K highest. Finite or -inf."""

ZIPF_EXPONENT = 1.0
_PERMUTATION_SEED = 20


def _noise(shape: MoeShape, tokens: int, generator: Generator) -> Tensor:
    return torch.randn(tokens, shape.num_experts, device=generator.device, generator=generator)


def _uniform(shape: MoeShape, tokens: int, rank: int, generator: Generator) -> Tensor:
    return _noise(shape, tokens, generator)


def _zipf(shape: MoeShape, tokens: int, rank: int, generator: Generator) -> Tensor:
    """The expert of popularity rank i is drawn with weight ``1 / (i + 1)``, without replacement.

    (The K highest of log weight + Gumbel noise are such a draw.) Which expert has which popularity is shuffled, the
    same way on all ranks, so that the busy ones are not all on rank 0.
    """
    shuffle = torch.randperm(shape.num_experts, generator=torch.Generator().manual_seed(_PERMUTATION_SEED))
    log_weight = -ZIPF_EXPONENT * torch.log1p(shuffle.float()).to(generator.device)
    uniform = torch.rand(tokens, shape.num_experts, device=generator.device, generator=generator)
    return log_weight - torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-7)))


def _single_hot(shape: MoeShape, tokens: int, rank: int, generator: Generator) -> Tensor:
    """Every token of every rank goes to expert 0; its other K - 1 experts are uniform."""
    scores = _noise(shape, tokens, generator)
    scores[:, 0] = 100.0
    return scores


def _all_remote(shape: MoeShape, tokens: int, rank: int, generator: Generator) -> Tensor:
    """Uniform over the experts of the other ranks: every row crosses NVLink."""
    remote = shape.num_experts - shape.experts_per_rank
    if remote < shape.top_k:
        raise ValueError(
            f"routing all-remote needs top_k={shape.top_k} experts on other ranks, but of {shape.num_experts} experts "
            f"on {shape.ep_size} rank(s) {remote} are remote: use more ranks"
        )
    scores = _noise(shape, tokens, generator)
    first = rank * shape.experts_per_rank
    scores[:, first : first + shape.experts_per_rank] = -torch.inf
    return scores


ROUTINGS: Mapping[str, Scores] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "single-hot": _single_hot,
    "all-remote": _all_remote,
}


def route(name: str, shape: MoeShape, tokens: int, rank: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """The K experts of ``rank``'s tokens: ids ``[T, K]`` int64 and weights ``[T, K]`` fp32 that sum to 1 per token.

    Raises ValueError for an unknown routing, or one that the shape does not admit.
    """
    if name not in ROUTINGS:
        raise ValueError(f"unknown routing {name!r}; known are {', '.join(ROUTINGS)}")
    experts = ROUTINGS[name](shape, tokens, rank, generator).topk(shape.top_k, dim=1).indices
    logits = torch.randn(tokens, shape.top_k, device=generator.device, generator=generator)
    return experts, logits.softmax(1)
