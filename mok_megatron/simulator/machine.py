"""What the simulator assumes about one GPU and its links, and about how the kernel moves rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from mok_megatron.hardware import GpuSpec

CopyLayout = Literal["warps", "dedicated"]
Combine = Literal["pull", "push"]
PullOrder = Literal["row", "rotated"]
TokenOrder = Literal["expert", "token"]

WARPS_PER_COPY_SM = 32
"""Warps of a dedicated copying SM in the measurement behind ``GpuSpec.copy_per_sm``."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates and delays, in SI units.

    Attributes:
        gemm_flops: whole GPU, large tiles, nothing else running.
        tile_overhead_s: part of a cluster tile that the tensor cores do not work (fill, drain, exposed epilogue).
        start_s: launch, schedule and the first flag exchange, before the first row moves.
        nvlink: bytes/s per direction and GPU that rows of a few KB reach, both directions at once.
        local_copy: bytes/s at which copying warps move rows inside one GPU.
        latency_s: a flag or a row, one way over NVLink.
        contention: fraction by which GEMM tiles slow down while rows are being copied the whole time.
        jitter: relative standard deviation of a tile's duration.
        skew_s: ranks enter the kernel this far apart (uniformly spread).
    """

    name: str
    sms: int
    gemm_flops: float
    bwd_gemm_flops: float
    hbm: float
    nvlink: float
    copy_per_sm: float
    local_copy: float
    latency_s: float
    tile_overhead_s: float = 1.5e-6
    start_s: float = 15e-6
    contention: float = 0.06
    jitter: float = 0.0
    skew_s: float = 0.0
    basis: str = ""

    def __post_init__(self) -> None:
        for name in ("gemm_flops", "bwd_gemm_flops", "hbm", "nvlink", "copy_per_sm", "local_copy"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        for name in ("latency_s", "tile_overhead_s", "start_s", "contention", "jitter", "skew_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
        if self.sms < 2:
            raise ValueError(f"sms must be at least 2 (one cluster of two CTAs), got {self.sms}")

    @classmethod
    def from_gpu(cls, gpu: GpuSpec) -> Machine:
        """Uncalibrated: the GPU's achievable rates as they stand in ``hardware.py``.

        Backward runs at the same GEMM rate; the contention is the 6 % that a copying neighbour cost cuBLAS on H200.
        """
        return cls(
            name=gpu.title,
            sms=gpu.sms,
            gemm_flops=gpu.gemm_flops,
            bwd_gemm_flops=gpu.gemm_flops,
            hbm=gpu.hbm_bandwidth,
            nvlink=gpu.nvlink_achievable,
            copy_per_sm=gpu.copy_per_sm,
            local_copy=0.5 * gpu.hbm_bandwidth,
            latency_s=gpu.flag_latency_s,
            basis=gpu.basis + "; kernel speed assumed equal to a large GEMM's; not calibrated, error unknown",
        )

    def with_(self, **changes: float | str) -> Machine:
        """A copy with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How the kernel moves rows: the choices that the simulator is there to compare. The defaults are the kernel's.

    Attributes:
        copy_layout: ``warps``: copying warps in every CTA, all SMs compute. ``dedicated``: ``comm_sms`` SMs only
            copy, and take compute tickets once dispatch is done.
        copy_warps: copying warps per CTA in the ``warps`` layout; a dedicated SM has 32.
        comm_sms: SMs whose copying warps move rows; None means all (``warps``) or 8 (``dedicated``).
        dedup: a token crosses once per (token, rank); otherwise once per route.
        combine: ``pull``: a token's owner fetches its K rows when all are ready. ``push``: the expert's rank sends
            each row block when it is finished, and the owner sums what has arrived.
        combine_per_rank: rows are summed at the expert's rank first, so one row per (token, rank) travels. Results
            then depend on W.
        pull_order: ``row``: destinations pull in row order, an expert's rows from source 0 first. ``rotated``: within
            an expert, destination d begins with source d.
        token_order: in which order tokens are combined by ``pull``: ``expert``, by the last local expert among their
            routes, or ``token``, as they come.
    """

    copy_layout: CopyLayout = "warps"
    copy_warps: int = 2
    comm_sms: int | None = None
    dedup: bool = True
    combine: Combine = "pull"
    combine_per_rank: bool = False
    pull_order: PullOrder = "row"
    token_order: TokenOrder = "expert"

    def __post_init__(self) -> None:
        if not 1 <= self.copy_warps <= WARPS_PER_COPY_SM:
            raise ValueError(f"copy_warps must be 1 to {WARPS_PER_COPY_SM}, got {self.copy_warps}")

    def copy_sms(self, machine: Machine) -> int:
        """SMs that copy. Raises ValueError for a number that leaves none to compute, or none to copy."""
        default = machine.sms if self.copy_layout == "warps" else 8
        count = default if self.comm_sms is None else self.comm_sms
        most = machine.sms if self.copy_layout == "warps" else machine.sms - 2
        if not 1 <= count <= most:
            raise ValueError(
                f"comm_sms={count} is out of range: {machine.name} has {machine.sms} SMs, and copy layout "
                f"{self.copy_layout!r} allows 1 to {most}"
            )
        return count

    def compute_clusters(self, machine: Machine) -> int:
        """Two-CTA clusters that compute from the start."""
        dedicated = self.copy_sms(machine) if self.copy_layout == "dedicated" else 0
        return (machine.sms - dedicated) // 2

    def copy_rate(self, machine: Machine) -> float:
        """Bytes/s over NVLink: the copying warps' rate, up to what the link carries."""
        share = 1.0 if self.copy_layout == "dedicated" else self.copy_warps / WARPS_PER_COPY_SM
        return min(self.copy_sms(machine) * machine.copy_per_sm * share, machine.nvlink)
