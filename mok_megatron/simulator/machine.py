"""What the simulator assumes about one GPU and its links, and about how the kernel moves rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from mok_megatron.floors import Direction
from mok_megatron.hardware import GpuSpec

CopyLayout = Literal["warps", "dedicated"]
Combine = Literal["pull", "push"]
PullOrder = Literal["row", "rotated"]
TokenOrder = Literal["expert", "token"]

WARPS_PER_COPY_SM = 32
"""Warps of a dedicated copying SM in the measurement behind ``GpuSpec.copy_per_sm``."""


@dataclass(frozen=True, kw_only=True)
class Epilogues:
    """Seconds per cluster tile in which the tensor cores wait for its output.

    Traced on H200 in cycles of the SM's own clock, which ran at 1.40 to 1.75 GHz; here at the mean of 1.53 GHz.

    Attributes:
        fc1: activation; gate, up and h are stored (6100 cycles).
        fc2: y rows are pushed; dX rows likewise (3700 to 4100 cycles).
        act_grad: gate and up are loaded, their gradients and h stored (20000 cycles).
        wgrad: 256 x 256 sums are added to fp32 ``main_grad``. 7000 cycles were traced where the main loop is long
            enough for ``main_grad`` to be fetched meanwhile, 12000 where it is not: an SM sends its 128 KiB at 10.7
            bytes per cycle. One number between them, which fits the backwards of four shapes within 5 %.
    """

    fc1: float = 4.0e-6
    fc2: float = 2.5e-6
    act_grad: float = 13.0e-6
    wgrad: float = 7.0e-6

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"epilogue {name} must be finite and >= 0, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates and delays, in SI units.

    Attributes:
        gemm_flops: whole GPU, large tiles, nothing else running, before the power limit is felt.
        sustained: share of that rate which is left once the power limit has pulled the clock down.
        backward_share: rate of backward's multiplications, whose operands lie otherwise, over forward's.
        burst_s: time from the start of a call after a pause until it has. 0 describes a GPU that never pauses.
        epilogues: what a tile costs beside its multiplications.
        launch_s: from the kernel's launch to its first tile.
        schedule_s, schedule_per_route_s: the schedule's kernels before forward: so much, and so much per (token, k).
        nvlink: bytes/s per direction and GPU that rows of a few KB reach, both directions at once.
        local_copy: bytes/s at which copying warps move rows inside one GPU.
        latency_s: a flag or a row, one way over NVLink.
        contention: fraction by which GEMM tiles slow down while rows are being copied the whole time.
        hbm_contention: likewise while HBM is busy the whole time with the tiles' own operands.
        jitter: relative standard deviation of a tile's duration.
        skew_s: ranks enter the kernel this far apart (uniformly spread).
    """

    name: str
    sms: int
    gemm_flops: float
    hbm: float
    nvlink: float
    copy_per_sm: float
    local_copy: float
    latency_s: float
    sustained: float = 0.845
    backward_share: float = 1.0
    burst_s: float = 4.9e-3
    epilogues: Epilogues = field(default_factory=Epilogues)
    launch_s: float = 12e-6
    schedule_s: float = 14e-6
    schedule_per_route_s: float = 0.24e-9
    contention: float = 0.06
    hbm_contention: float = 0.2
    jitter: float = 0.0
    skew_s: float = 0.0
    basis: str = ""

    def __post_init__(self) -> None:
        for name in ("gemm_flops", "hbm", "nvlink", "copy_per_sm", "local_copy"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value!r}")
        delays = ("latency_s", "burst_s", "launch_s", "schedule_s", "schedule_per_route_s", "skew_s")
        for name in (*delays, "contention", "hbm_contention", "jitter"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
        if not (math.isfinite(self.backward_share) and self.backward_share > 0):
            raise ValueError(f"backward_share must be positive and finite, got {self.backward_share!r}")
        if not 0 < self.sustained <= 1:
            raise ValueError(f"sustained must be above 0 and at most 1, got {self.sustained!r}")
        if self.sms < 2:
            raise ValueError(f"sms must be at least 2 (one cluster of two CTAs), got {self.sms}")

    @classmethod
    def from_gpu(cls, gpu: GpuSpec) -> Machine:
        """Uncalibrated: the GPU's achievable rates as they stand in ``hardware.py``.

        Clocks under the power limit, epilogues and delays are those of H200; the contention is the 6 % that a copying
        neighbour cost cuBLAS there.
        """
        error = "within 20 % of what one GPU was measured to take" if gpu.measured else "error unknown"
        return cls(
            name=gpu.title,
            sms=gpu.sms,
            gemm_flops=gpu.gemm_flops,
            hbm=gpu.hbm_bandwidth,
            nvlink=gpu.nvlink_achievable,
            copy_per_sm=gpu.copy_per_sm,
            local_copy=0.35 * gpu.hbm_bandwidth,
            latency_s=gpu.flag_latency_s,
            basis=f"{gpu.basis}; kernel speed assumed equal to a large GEMM's; not calibrated, {error}",
        )

    def rate(self, direction: Direction, time: float) -> float:
        """FLOP/s of the whole GPU ``time`` seconds after a call began."""
        share = 1.0 if direction == "fwd" else self.backward_share
        return self.gemm_flops * share * (1.0 if time < self.burst_s else self.sustained)

    def start_s(self, direction: Direction, routes: float) -> float:
        """Seconds until the first rows move; ``routes`` is T x K of one rank. Backward reuses forward's schedule."""
        scheduled = self.schedule_s + routes * self.schedule_per_route_s if direction == "fwd" else 0.0
        return self.launch_s + scheduled

    def with_(self, **changes: float | str | Epilogues) -> Machine:
        """A copy with other values."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How the kernel moves rows: the choices that the simulator is there to compare.

    The defaults are the kernel's.

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
    combine: Combine = "push"
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
