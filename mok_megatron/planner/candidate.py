"""One way to spread a model over the machines, and the reasons why one cannot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mok_megatron.architecture import Architecture, Gqa
from mok_megatron.planner.cluster import Cluster, Placement
from mok_megatron.simulator.machine import Machine

RECOMPUTE_LEVELS = ("none", "no-save-x", "mok", "selective", "full")
"""Least time first, least memory last.

``none``: everything is kept. ``no-save-x``: rows are dispatched again in backward. ``mok``: gate and up are computed
again, too. ``selective``: norms, MLA up-projections, dense and shared MLPs are also recomputed. ``full``: only a
layer's input is kept.
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained on what; ``machine`` holds a GPU's rates where a measurement gave them.

    Raises ValueError for a sequence or batch that the model cannot have.
    """

    arch: Architecture
    cluster: Cluster
    seq_length: int
    global_batch: int
    machine: Machine | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.seq_length <= self.arch.max_positions:
            nearest = min(max(1, self.seq_length), self.arch.max_positions)
            raise ValueError(
                f"seq_length must be 1 to {self.arch.max_positions} (the model's max_positions), got "
                f"{self.seq_length}; nearest is {nearest}"
            )
        if self.global_batch < 1:
            raise ValueError(f"the global batch must be at least 1, got {self.global_batch}")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Parallel sizes and how many GPUs per NVLink domain are used."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batch: int = 1
    used: int
    world: int

    @cached_property
    def dp(self) -> int:
        """Data-parallel size of attention and dense parts."""
        return self.world // (self.tp * self.pp * self.cp)

    @cached_property
    def expert_dp(self) -> int:
        """Data-parallel size of the experts: world / (ep * pp), expert tensor parallelism being 1."""
        return self.world // (self.ep * self.pp)

    def microbatches(self, global_batch: int) -> int:
        """Microbatches of a step on each pipeline."""
        return global_batch // (self.micro_batch * self.dp)

    def label(self) -> str:
        """``TP1 PP8 VPP4 CP1 EP64 DP64``, and the microbatch."""
        return f"TP{self.tp} PP{self.pp} VPP{self.vpp} CP{self.cp} EP{self.ep} DP{self.dp} mbs{self.micro_batch}"


def refusal(job: Job, c: Candidate) -> tuple[str, str] | None:
    """Why ``c`` cannot be launched: (kind, sentence with the numbers and the nearest valid choice), or None."""
    return _expert_refusal(job, c) or _dense_refusal(job, c) or _batch_refusal(job, c)


def _expert_refusal(job: Job, c: Candidate) -> tuple[str, str] | None:
    gpu, experts = job.cluster.gpu, job.arch.moe.experts
    if experts % c.ep:
        return "EP does not divide experts", (
            f"ep={c.ep} does not divide the {experts} experts; nearest is ep={nearest_divisor(experts, c.ep)}"
        )
    if c.ep > gpu.domain_gpus:
        largest = max(d for d in divisors(experts) if d <= gpu.domain_gpus)
        return "EP exceeds the NVLink domain", (
            f"ep={c.ep} needs {c.ep} GPUs in one NVLink domain, {gpu.title} has {gpu.domain_gpus}; "
            f"the largest that divides {experts} experts and fits is ep={largest} (the alltoall dispatcher has no such "
            "limit; layouts that need it are not planned)"
        )
    if c.used % c.ep:
        fits = job.cluster.usable_per_domain(c.ep)
        return "EP group would span NVLink domains", (
            f"ep={c.ep} does not divide the {c.used} GPUs used per {job.cluster.noun}: EP groups are consecutive ranks "
            f"and would span two of them; use {fits[-1] if fits else 'another ep'} GPUs per {job.cluster.noun}"
        )
    if c.world % (c.ep * c.pp):
        return "EP x PP does not divide the world", (
            f"ep * pp = {c.ep} * {c.pp} = {c.ep * c.pp} does not divide the {c.world} GPUs; a pipeline stage has "
            f"{c.world / c.pp:g}, nearest is pp={nearest_divisor(max(1, c.world // c.ep), c.pp)}"
        )
    return None


def _dense_refusal(job: Job, c: Candidate) -> tuple[str, str] | None:
    attention, gpu = job.arch.flag_attention, job.cluster.gpu
    if c.tp > gpu.domain_gpus or c.used % c.tp:
        return "TP group would span NVLink domains", (
            f"tp={c.tp} does not divide the {c.used} GPUs used per {job.cluster.noun}; nearest is "
            f"tp={nearest_divisor(c.used, c.tp)}"
        )
    if attention.heads % c.tp:
        return "TP does not divide heads", (
            f"tp={c.tp} does not divide the {attention.heads} attention heads; nearest is "
            f"tp={nearest_divisor(attention.heads, c.tp)}"
        )
    if isinstance(attention, Gqa) and attention.kv_heads % c.tp and c.tp % attention.kv_heads:
        return "TP does not fit KV heads", (
            f"tp={c.tp} and kv_heads={attention.kv_heads}: one must divide the other; nearest is "
            f"tp={nearest_divisor(attention.kv_heads, c.tp)}"
        )
    if c.world % (c.tp * c.pp * c.cp):
        return "TP x PP x CP does not divide the world", (
            f"tp * pp * cp = {c.tp} * {c.pp} * {c.cp} = {c.tp * c.pp * c.cp} does not divide the {c.world} GPUs; "
            f"nearest is {nearest_divisor(c.world, c.tp * c.pp * c.cp)}"
        )
    if c.cp > 1 and job.seq_length % (2 * c.cp):
        return "CP does not divide the sequence", (
            f"cp={c.cp} needs seq_length to be a multiple of 2 * cp = {2 * c.cp}, got {job.seq_length}; "
            f"nearest is {nearest_multiple(2 * c.cp, job.seq_length)}"
        )
    if job.seq_length % (c.tp * c.cp):
        return "TP x CP does not divide the sequence", (
            f"sequence parallelism needs seq_length to be a multiple of tp * cp = {c.tp * c.cp}, got {job.seq_length}; "
            f"nearest is {nearest_multiple(c.tp * c.cp, job.seq_length)}"
        )
    if c.vpp > 1 and c.pp == 1:
        return "VPP without PP", f"vpp={c.vpp} needs pp > 1, got pp=1; use vpp=1"
    return None


def _batch_refusal(job: Job, c: Candidate) -> tuple[str, str] | None:
    per_step = c.micro_batch * c.dp
    if job.global_batch < per_step or job.global_batch % per_step:
        nearest = nearest_multiple(per_step, job.global_batch)
        return "global batch not divisible", (
            f"global batch {job.global_batch} is not a multiple of micro_batch * dp = {c.micro_batch} * {c.dp} = "
            f"{per_step}; nearest is {nearest}"
        )
    microbatches = c.microbatches(job.global_batch)
    if c.vpp > 1 and microbatches % c.pp:
        unit = per_step * c.pp
        return "microbatches do not fit VPP", (
            f"interleaved stages (vpp={c.vpp}) need the {microbatches} microbatches to be a multiple of pp={c.pp}; "
            f"nearest global batch is {nearest_multiple(unit, job.global_batch)}, or use vpp=1"
        )
    return None


def placement(job: Job, c: Candidate) -> Placement:
    """Ranks of ``c`` on the machines."""
    return Placement(cluster=job.cluster, used=c.used)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of ``number`` whose ratio to ``wanted`` is closest to one."""
    return min(divisors(number), key=lambda d: max(d / wanted, wanted / d))


def nearest_multiple(unit: int, wanted: int) -> int:
    """The positive multiple of ``unit`` that is closest to ``wanted``."""
    return max(unit, round(wanted / unit) * unit)
