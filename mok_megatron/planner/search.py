"""All layouts of a job: refused ones with the reason, the others ranked by predicted tokens per second."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from mok_megatron.architecture import Architecture
from mok_megatron.config import MoeShape
from mok_megatron.floors import Direction
from mok_megatron.memory import default_ring_rows
from mok_megatron.planner.candidate import (
    RECOMPUTE_LEVELS,
    Candidate,
    Job,
    divisors,
    refusal,
)
from mok_megatron.planner.memory_use import MemoryUse, memory_use, tokens_per_gpu
from mok_megatron.planner.pipeline import Stages, split
from mok_megatron.planner.timing import MoeTime, StepTime, layer_seconds, model_flops_per_token, step_time

_KINDS = ("dense", "mtp", "loss")

NO_MEMORY = "does not fit into memory"
MEMORY_SHARE = 0.95
"""Share of a GPU's memory that a plan may fill by its own estimate."""
RESERVE_WORTH = 1.03
"""Trays in reserve weigh as much as this gain in speed: without them one failed tray stops the job."""
MAX_TP, MAX_CP, MAX_VPP, MAX_MICRO_BATCH = 8, 8, 8, 4


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout that fits, with its predictions."""

    candidate: Candidate
    recompute: str
    stages: Stages
    shape: MoeShape
    tokens: int
    ring_rows: int
    memory: MemoryUse
    time: StepTime
    tokens_per_second: float
    model_tflops: float

    @property
    def per_gpu(self) -> float:
        """Tokens per second and GPU that runs a rank."""
        return self.tokens_per_second / self.candidate.world


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Why a layout cannot be had: its kind, a sentence with the numbers, and bytes over the limit where it is that."""

    kind: str
    sentence: str
    excess: float = 0.0


@dataclass(kw_only=True)
class Search:
    """Result of ``search``: plans, best first, and why the other layouts were refused."""

    job: Job
    plans: list[Plan]
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    _closest: dict[str, float] = field(default_factory=dict)

    def refuse(self, reason: Refused, c: Candidate) -> None:
        """Count a refusal; of each kind the one closest to fitting is kept as the example, else the first."""
        self.refused[reason.kind] += 1
        if reason.excess < self._closest.get(reason.kind, float("inf")):
            self._closest[reason.kind] = reason.excess
            self.examples[reason.kind] = f"{c.label()}: {reason.sentence}"


def search(job: Job, pins: dict[str, int] | None = None, *, recompute: str | None = None) -> Search:
    """Try every layout; ``pins`` fixes some of tp, pp, vpp, cp, ep, micro_batch, used.

    Raises ValueError, with the numbers and the nearest valid choice, where nothing is left.
    """
    pins = dict(pins or {})
    _check_pins(job, pins)
    result = Search(job=job, plans=[])
    for c in candidates(job, pins):
        reason = refusal(job, c)
        if reason is not None:
            result.refuse(Refused(kind=reason[0], sentence=reason[1]), c)
            continue
        plan_or_reason = _evaluate(job, c, recompute)
        if isinstance(plan_or_reason, Plan):
            result.plans.append(plan_or_reason)
        else:
            result.refuse(plan_or_reason, c)
    result.plans.sort(key=lambda plan: (-_worth(job, plan), plan.candidate.tp, plan.candidate.pp))
    if not result.plans:
        raise ValueError(_nothing_left(result, pins))
    return result


def _worth(job: Job, plan: Plan) -> float:
    """What plans are ranked by: the whole job's speed, since racks are paid for whole, and a little for a reserve."""
    has_reserve = job.cluster.gpu.is_rack and plan.candidate.used < job.cluster.gpu.domain_gpus
    return plan.tokens_per_second * (RESERVE_WORTH if has_reserve else 1.0)


def candidates(job: Job, pins: dict[str, int]) -> Iterator[Candidate]:
    """All combinations of parallel sizes worth a look; a pinned size is taken as it is, sensible or not."""
    arch, cluster = job.arch, job.cluster
    domain = cluster.gpu.domain_gpus

    def choices(name: str, values: list[int]) -> list[int]:
        return [pins[name]] if name in pins else values

    for ep in choices("ep", [d for d in divisors(arch.moe.experts) if d <= domain]):
        for used in choices("used", cluster.usable_per_domain(ep) or [_largest_whole(cluster.gpu.node_gpus, domain)]):
            world = used * cluster.domains
            stages = [p for p in divisors(world) if p <= arch.layers]
            for pp, tp, cp in itertools.product(
                choices("pp", stages),
                choices("tp", [t for t in (1, 2, 4, 8) if t <= min(MAX_TP, domain)]),
                choices("cp", [x for x in (1, 2, 4, 8) if x == 1 or (x <= MAX_CP and job.seq_length // x >= 4096)]),
            ):
                vpps = [v for v in range(1, MAX_VPP + 1) if v == 1 or (pp > 1 and pp * v <= arch.layers)]
                for vpp, micro_batch in itertools.product(
                    choices("vpp", vpps), choices("micro_batch", [1, 2, MAX_MICRO_BATCH])
                ):
                    yield Candidate(
                        tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, micro_batch=micro_batch, used=used, world=world
                    )


def _largest_whole(node: int, domain: int) -> int:
    return domain // node * node


def _evaluate(job: Job, c: Candidate, recompute: str | None) -> Plan | Refused:
    """The plan with the least recompute that fits, or the reason why none does."""
    tokens = tokens_per_gpu(job, c)
    shape = job.arch.moe_shape(c.ep)
    ring_rows = default_ring_rows(shape, tokens)
    limit = limit_bytes(job)
    levels = (recompute,) if recompute else RECOMPUTE_LEVELS
    first_look = True  # with the most recompute: if that does not fit, nothing does
    for level in (levels[-1], *levels):
        costs = _layer_seconds(job, c.tp, c.cp, c.micro_batch, c.ep, level)
        stages = _stages(job.arch, c.pp, c.vpp, *(round(costs[0][k] / costs[0]["moe"], 1) for k in _KINDS))
        if stages is None:
            sentence = (
                f"pp * vpp = {c.pp * c.vpp} stages for {job.arch.layers} layers and {job.arch.mtp_layers} MTP layers "
                f"(which stay together, in the last chunk, not on the first rank); use fewer stages"
            )
            return Refused(kind="layers do not fill the stages", sentence=sentence)
        uses = [
            memory_use(job, c, stages, level, shape=shape, ring_rows=ring_rows, rank=rank)
            for rank in _extreme_ranks(c.pp)
        ]
        worst = max(uses, key=lambda use: use.total)
        if first_look and worst.total > limit:
            sentence = (
                f"needs {worst.total / 1e9:.0f} GB per GPU with recompute {level} (weights and gradients "
                f"{(worst.weights + worst.gradients) / 1e9:.0f}, optimizer {worst.optimizer / 1e9:.0f}, activations "
                f"{worst.activations / 1e9:.0f}), {job.cluster.gpu.title} offers {limit / 1e9:.0f}"
            )
            return Refused(kind=NO_MEMORY, sentence=sentence, excess=worst.total - limit)
        if not first_look and worst.total <= limit:
            return _plan(job, c, level, stages, shape, tokens, ring_rows, worst, costs)
        first_look = False
    raise AssertionError("the last level fits, as the first look found")


def limit_bytes(job: Job) -> float:
    """What a plan may fill of a GPU's memory."""
    return job.cluster.gpu.memory_bytes * MEMORY_SHARE


def by_recompute(job: Job, c: Candidate) -> dict[str, Plan | Refused]:
    """The same layout with each recompute level: its plan, or why it does not fit."""
    return {level: _evaluate(job, c, level) for level in RECOMPUTE_LEVELS}


def _extreme_ranks(pp: int) -> list[int]:
    """First ranks hold the most microbatches, the last one the loss: the fullest is among these."""
    return sorted({0, min(1, pp - 1), pp - 1})


def _plan(
    job: Job,
    c: Candidate,
    level: str,
    stages: Stages,
    shape: MoeShape,
    tokens: int,
    ring_rows: int,
    worst: MemoryUse,
    costs: tuple[dict[str, float], dict[Direction, MoeTime]],
) -> Plan:
    time = step_time(job, c, stages, *costs, worst)
    rate = job.global_batch * job.seq_length / time.total_s
    return Plan(
        candidate=c,
        recompute=level,
        stages=stages,
        shape=shape,
        tokens=tokens,
        ring_rows=ring_rows,
        memory=worst,
        time=time,
        tokens_per_second=rate,
        model_tflops=rate * model_flops_per_token(job) / c.world / 1e12,
    )


@lru_cache(maxsize=4096)
def _layer_seconds(
    job: Job, tp: int, cp: int, micro_batch: int, ep: int, level: str
) -> tuple[dict[str, float], dict[Direction, MoeTime]]:
    c = Candidate(tp=tp, cp=cp, ep=ep, micro_batch=micro_batch, used=ep, world=tp * cp * ep)
    return layer_seconds(job, c, job.arch.moe_shape(ep), level)


@lru_cache(maxsize=65536)
def _stages(arch: Architecture, pp: int, vpp: int, dense: float, mtp: float, loss: float) -> Stages | None:
    """The split for costs given in MoE layers."""
    costs = [dense] * arch.dense_layers + [1.0] * arch.moe_layers
    return split(costs, pp=pp, vpp=vpp, mtp=arch.mtp_layers, mtp_cost=mtp, loss_cost=loss)


def _check_pins(job: Job, pins: dict[str, int]) -> None:
    gpu = job.cluster.gpu
    for name, value in pins.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    used = pins.get("used", gpu.domain_gpus)
    if used > gpu.domain_gpus or used % gpu.node_gpus:
        whole = min(max(1, round(used / gpu.node_gpus)) * gpu.node_gpus, gpu.domain_gpus)
        raise ValueError(
            f"{used} GPUs per {job.cluster.noun}: must be whole nodes of {gpu.node_gpus}, at most {gpu.domain_gpus}; "
            f"nearest is {whole}"
        )
    if "ep" in pins:
        ep = pins["ep"]
        reason = refusal(job, Candidate(ep=ep, used=ep, world=ep))
        if reason is not None and reason[0].startswith("EP"):
            raise ValueError(reason[1])


def _nothing_left(result: Search, pins: dict[str, int]) -> str:
    """Message for an empty result: the commonest reasons with their numbers, and the nearest choice that works."""
    job = result.job
    wanted = ", ".join(f"{name}={value}" for name, value in pins.items()) or "any layout"
    # Memory first: the other reasons are arithmetic, and most layouts meet one of them anyway.
    reasons = sorted(result.refused.items(), key=lambda item: (item[0] != NO_MEMORY, -item[1]))[:2]
    why = "; ".join(f"{kind} ({count} layouts, e.g. {result.examples[kind]})" for kind, count in reasons)
    return f"nothing fits {wanted} on {job.cluster.domains} {job.cluster.noun}(s): {why}.{_nearest(job, pins)}"


def _nearest(job: Job, pins: dict[str, int]) -> str:
    """The best plan whose sizes are closest to the pinned ones, or else how many machines would do."""

    def distance(plan: Plan) -> float:
        sizes = ((int(getattr(plan.candidate, name)), value) for name, value in pins.items())
        return sum(max(size / value, value / size) - 1 for size, value in sizes)

    plans = _try(job)
    if pins and plans:
        nearest = min(plans, key=lambda plan: (distance(plan), -_worth(job, plan)))
        return f" Nearest that works: {nearest.candidate.label()}, recompute {nearest.recompute}"
    for factor in (2, 4, 8, 16, 32):
        cluster = replace(job.cluster, domains=job.cluster.domains * factor)
        if _try(replace(job, cluster=cluster)):
            return f" It would fit {cluster.domains} {cluster.noun}s ({cluster.gpus} GPUs)"
    return ""


def _try(job: Job) -> list[Plan]:
    """All plans without pins."""
    tried = (_evaluate(job, c, None) for c in candidates(job, {}) if refusal(job, c) is None)
    return [plan for plan in tried if isinstance(plan, Plan)]
