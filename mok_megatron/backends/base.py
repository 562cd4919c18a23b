"""The protocol between the autograd function and a backend.

A backend is bound at model build to one layer shape, one EP group and one device, is shared by all layers of that
shape, and holds no parameters. Everything that backward needs travels in ``Saved``, as ordinary tensors, so any number
of microbatches can be in flight in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from mok_megatron.config import MoeShape
from mok_megatron.schedule import Schedule


class Saved(NamedTuple):
    """What forward keeps for backward: the schedule and plain tensors (None where the options say: not kept).

    A backend may keep only the first rows; backward then makes the others again.

    Attributes:
        x: layer input ``[T, H]``.
        gate_up: ``[R, 2I]``, gate columns then up columns, before clamp and activation; None with ``recompute``.
        x_rows: dispatched rows ``[R, H]``; None with ``recompute`` or without ``save_x``.
    """

    schedule: Schedule
    x: Tensor
    gate_up: Tensor | None
    x_rows: Tensor | None


class WeightGrads(NamedTuple):
    """Where backward puts the weight gradients.

    ``w1[i]`` is ``[2I, H]`` and ``w2[i]`` is ``[H, I]`` for local expert i, or None for a frozen weight. With
    ``accumulate`` the gradient is added to what is there (Megatron's ``main_grad``, fp32 or bf16); without it the
    tensor is overwritten, with zeros for an expert without tokens.
    """

    w1: Sequence[Tensor | None]
    w2: Sequence[Tensor | None]
    accumulate: bool


class Backend(Protocol):
    """One implementation of the layer behind the router. All ranks of the EP group call each method in one order."""

    name: str
    shape: MoeShape
    block_rows: int
    """Tile height M: each expert's rows are padded to a multiple of it."""

    def reserve(self, max_tokens: int) -> None:
        """Make room for up to ``max_tokens`` tokens per rank, at model build. Collective, the same number on all.

        Calls with more tokens are refused where there are peers; one rank alone grows. Without it, the group's first
        call reserves the most tokens that any rank brings.
        """
        ...

    def build_schedule(self, x: Tensor, probs: Tensor, routing_map: Tensor, *, layer: int) -> Schedule:
        """Routing -> tables; opens the call whose ``forward`` follows.

        ``x [T, H]`` contiguous is where peers may pull rows from once they have the tables; ``probs [T, E]`` fp32, bf16
        or fp64; ``routing_map [T, E]`` bool, 0..K ones a row. ``layer`` is Megatron's layer number, for messages only.
        """
        ...

    def forward(
        self, x: Tensor, schedule: Schedule, w1: Sequence[Tensor], w2: Sequence[Tensor], *, save: bool, layer: int
    ) -> tuple[Tensor, Saved | None]:
        """``x [T, H]`` -> ``y [T, H]``, same dtype; ``w1[i] [2I, H]`` (gate rows, then up), ``w2[i] [H, I]``.

        Nothing is kept when ``save`` is False.
        """
        ...

    def backward(
        self,
        dy: Tensor,
        saved: Saved,
        w1: Sequence[Tensor],
        w2: Sequence[Tensor],
        grads: WeightGrads,
        *,
        needs_dx: bool,
        dprobs: Tensor | None,
        layer: int,
    ) -> Tensor | None:
        """``dy [T, H]`` -> ``dx [T, H]`` (None unless ``needs_dx``).

        ``dprobs [T, E]`` contiguous, fp32, bf16 or fp64, where wanted, is overwritten with the gradient of the router's
        probabilities, 0 where a token has no route. ``needs_dx`` is the same on every rank of the group.
        """
        ...

    def close(self) -> None:
        """Free the workspace; call before the process group is destroyed. Idempotent."""
        ...
