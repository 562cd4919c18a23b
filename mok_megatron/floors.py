"""Limits of physics for one MoE layer call on one rank: FLOPs, bytes over NVLink, bytes over HBM.

Notation as in ``config.py``. Uniform routing and no padding are assumed: a real call can only be slower. Every time is
in seconds, every size in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mok_megatron.config import MoeShape
from mok_megatron.hardware import GpuSpec

Direction = Literal["fwd", "bwd"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd")


def routed_flops(shape: MoeShape, tokens: float, direction: Direction) -> float:
    """FLOPs of the routed experts per rank: 6 TKHI forward (3 matrices), twice that backward."""
    return (6 if direction == "fwd" else 12) * tokens * shape.top_k * shape.hidden * shape.intermediate


def ranks_per_token(shape: MoeShape) -> float:
    """Expected number of distinct ranks that hold one token's K experts, all choices being equally likely."""
    if shape.ep_size == 1:
        return 1.0
    absent = 1.0
    for chosen in range(shape.top_k):
        left = shape.num_experts - shape.experts_per_rank - chosen
        absent *= max(left, 0) / (shape.num_experts - chosen)
    return shape.ep_size * (1.0 - absent)


def dispatch_crossings(shape: MoeShape, *, per_route: bool = False) -> float:
    """Expected NVLink crossings per token into other ranks: one per (token, rank), or one per route."""
    copies = shape.top_k if per_route else ranks_per_token(shape)
    return copies * (shape.ep_size - 1) / shape.ep_size


def nvlink_bytes(
    shape: MoeShape, tokens: float, direction: Direction, element_bytes: int = 2, *, save_x: bool = True
) -> tuple[float, float]:
    """(dispatch, combine) bytes that enter one rank per call.

    Dispatch crosses once per (token, rank); combine brings one row per route, which keeps results independent of W.
    Backward dispatches dY (and x again without ``save_x``) and combines dX.
    """
    row = shape.hidden * element_bytes
    copies = 2 if direction == "bwd" and not save_x else 1
    dispatch = copies * tokens * dispatch_crossings(shape) * row
    combine = tokens * dispatch_crossings(shape, per_route=True) * row
    return dispatch, combine


def gemm_hbm_bytes(shape: MoeShape, tokens: float, direction: Direction, element_bytes: int = 2) -> float:
    """Least HBM traffic per rank but for weight gradients: each weight once, each row once per buffer it passes."""
    weights = shape.experts_per_rank * 3 * shape.hidden * shape.intermediate
    width = 4 * shape.hidden + 4 * shape.intermediate
    if direction == "bwd":
        width = 5 * shape.hidden + 10 * shape.intermediate
    return element_bytes * (weights + tokens * shape.top_k * width)


def hbm_bytes(shape: MoeShape, tokens: float, direction: Direction, element_bytes: int = 2) -> float:
    """Least HBM traffic per rank; backward also reads and writes fp32 weight gradients once."""
    gradients = 8 * shape.experts_per_rank * 3 * shape.hidden * shape.intermediate if direction == "bwd" else 0
    return gemm_hbm_bytes(shape, tokens, direction, element_bytes) + gradients


@dataclass(frozen=True, kw_only=True)
class Floors:
    """Least time of one layer call by each limit; ``bound`` is the largest."""

    flop_s: float
    nvlink_s: float
    hbm_s: float

    @property
    def bound(self) -> float:
        """No implementation that moves these rows and multiplies these matrices is faster."""
        return max(self.flop_s, self.nvlink_s, self.hbm_s)

    @property
    def limit(self) -> str:
        """Which limit is the largest."""
        by_name = {"FLOP": self.flop_s, "NVLink": self.nvlink_s, "HBM": self.hbm_s}
        return max(by_name, key=by_name.__getitem__)


def layer_floors(shape: MoeShape, tokens: float, direction: Direction, gpu: GpuSpec, *, save_x: bool = True) -> Floors:
    """Floors of one call with ``tokens`` tokens per rank, at the GPU's achievable GEMM and NVLink rates."""
    if not (math.isfinite(tokens) and tokens >= 0):
        raise ValueError(f"tokens must be a finite number >= 0, got {tokens!r}")
    return Floors(
        flop_s=routed_flops(shape, tokens, direction) / gpu.gemm_flops,
        nvlink_s=sum(nvlink_bytes(shape, tokens, direction, save_x=save_x)) / gpu.nvlink_achievable,
        hbm_s=hbm_bytes(shape, tokens, direction) / gpu.hbm_bandwidth,
    )
