"""A search's result as text and as plain data. Every number is a prediction and says so."""

from __future__ import annotations

from typing import Any

from mok_megatron.memory import format_bytes
from mok_megatron.planner.candidate import placement
from mok_megatron.planner.cluster import Placement
from mok_megatron.planner.search import Plan, Search, by_recompute, limit_bytes
from mok_megatron.planner.timing import ASSUMPTIONS, comm_sms, kernel_machine, nvlink_crossings
from mok_megatron.tile_order import BLOCK_ROWS, FC2_TILE_COLUMNS

COLUMNS = (
    ("layout", 40, "<"),
    ("GPUs", 6, ">"),
    ("recompute", 10, "<"),
    ("GB/GPU", 6, ">"),
    ("MoE fwd/bwd ms", 14, ">"),
    ("step s", 7, ">"),
    ("tok/s/GPU", 9, ">"),
    ("TFLOP/s", 7, ">"),
)


def distinct(search: Search, count: int) -> list[Plan]:
    """The best plan of each TP x PP x CP x EP, best first: vpp, microbatch and GPUs in use only vary it."""
    seen: dict[tuple[int, ...], Plan] = {}
    for plan in search.plans:
        c = plan.candidate
        seen.setdefault((c.tp, c.pp, c.cp, c.ep), plan)
    return list(seen.values())[:count]


def table(search: Search, plans: list[Plan]) -> str:
    """Ranked layouts, the reasons for the refused ones, and the assumptions."""
    job = search.job
    lines = [
        f"{job.cluster.domains} {job.cluster.noun}(s) of {job.cluster.gpu.title}, {job.cluster.gpus} GPUs; "
        f"sequence {job.seq_length}, global batch {job.global_batch}. All times and sizes are predicted, not measured.",
        "",
        "  ".join(f"{name:{align}{width}}" for name, width, align in COLUMNS),
    ]
    for plan in plans:
        moe = plan.time.moe
        cells = (
            plan.candidate.label(),
            plan.candidate.world,
            plan.recompute,
            f"{plan.memory.total / 1e9:.0f}",
            f"{moe['fwd'].total_s * 1e3:.2f} / {moe['bwd'].total_s * 1e3:.2f}",
            f"{plan.time.total_s:.2f}",
            f"{plan.per_gpu:.0f}",
            f"{plan.model_tflops:.0f}",
        )
        row = zip(cells, COLUMNS, strict=True)
        lines.append("  ".join(f"{cell:{align}{width}}" for cell, (_, width, align) in row).rstrip())
    lines += ["", f"Refused: {sum(search.refused.values())} layouts"]
    lines += [f"  {count:5d}  {kind}, e.g. {search.examples[kind]}" for kind, count in search.refused.most_common()]
    return "\n".join(lines)


def details(search: Search, plan: Plan) -> str:
    """One plan: where ranks land, memory by part, floors, settings, assumptions."""
    job, c, m, t = search.job, plan.candidate, plan.memory, plan.time
    dispatch, combine = nvlink_crossings(plan.shape)
    parts = ("weights", "gradients", "optimizer", "activations", "workspace", "reserve")
    lines = [
        f"Best: {c.label()}, recompute {plan.recompute}, {c.world} GPUs",
        f"  stages      {plan.stages.text() if c.pp > 1 else 'one'}",
        "  memory      "
        + ", ".join(f"{part} {format_bytes(getattr(m, part))}" for part in parts)
        + f"; total {format_bytes(m.total)} on the fullest GPU",
    ]
    choices = [
        f"{level} {other.memory.total / 1e9:.0f} GB, {other.time.total_s:.2f} s"
        if isinstance(other, Plan)
        else f"{level} {(limit_bytes(job) + other.excess) / 1e9:.0f} GB, too much"
        for level, other in by_recompute(job, c).items()
    ]
    lines.append(f"  recompute   {'; '.join(choices)}")
    for direction, moe in t.moe.items():
        floors = moe.floors
        lines.append(
            f"  MoE {direction}     predicted {moe.total_s * 1e3:.2f} ms for T={plan.tokens}; floors: FLOP "
            f"{floors.flop_s * 1e3:.2f}, NVLink {floors.nvlink_s * 1e3:.2f}, HBM {floors.hbm_s * 1e3:.2f} ms"
        )
    lines += [
        f"  NVLink      {dispatch:.2f} crossings per token out (one per rank), {combine:.2f} back (one per route)",
        f"  step        {c.microbatches(job.global_batch)} microbatches x {t.stage_s * 1e3:.1f} ms + bubble "
        f"{t.bubble_s * 1e3:.0f} ms + exposed gradient reduction {t.exposed_dp_s * 1e3:.0f} ms + optimizer "
        f"{t.optimizer_s * 1e3:.0f} ms",
        f"  settings    comm SMs {comm_sms(job.cluster.gpu)} of {job.cluster.gpu.sms}, ring {plan.ring_rows} rows, "
        f"tile {BLOCK_ROWS} x {FC2_TILE_COLUMNS} per SM, clusters of 2"
        + (", --mok-recompute" if plan.recompute in ("mok", "selective") else "")
        + (", --no-mok-save-x" if plan.recompute not in ("none", "full") else ""),
        *(f"  {line}" for line in where(placement(job, c), c.ep, c.pp)),
        "Assumptions",
        *(f"  - {line}" for line in (kernel_machine(job).basis, *ASSUMPTIONS)),
    ]
    return "\n".join(lines)


def where(place: Placement, ep: int, pp: int, most: int = 8) -> list[str]:
    """Lines that say which ranks, EP groups and pipeline stages each domain holds."""
    lines = []
    per_stage = place.world // pp
    for domain in range(min(place.cluster.domains, most)):
        first, last = domain * place.used, (domain + 1) * place.used - 1
        groups = f"EP group {first // ep}" if place.used == ep else f"EP groups {first // ep}-{last // ep}"
        stages = sorted({first // per_stage, last // per_stage})
        stage = f"stage {stages[0]}" if len(stages) == 1 else f"stages {stages[0]}-{stages[-1]}"
        lines.append(f"{place.cluster.noun} {domain:<3d}   ranks {first}-{last}: {groups}, pipeline {stage}")
    if place.cluster.domains > most:
        lines.append(f"... and {place.cluster.domains - most} more")
    return lines + ([f"reserve    {place.spare_note()}"] if place.spare_note() else [])


def as_data(search: Search, plans: list[Plan]) -> dict[str, Any]:
    """The result for ``--json``: SI units, names as in the table."""
    job = search.job
    return {
        "predicted": True,
        "basis": [kernel_machine(job).basis, *ASSUMPTIONS],
        "gpu": job.cluster.gpu.name,
        "domains": job.cluster.domains,
        "seq_length": job.seq_length,
        "global_batch": job.global_batch,
        "plans": [_plan_data(search, plan) for plan in plans],
        "refused": [
            {"reason": kind, "layouts": count, "example": search.examples[kind]}
            for kind, count in search.refused.most_common()
        ],
    }


def _plan_data(search: Search, plan: Plan) -> dict[str, Any]:
    c, m, t = plan.candidate, plan.memory, plan.time
    return {
        **{name: getattr(c, name) for name in ("tp", "pp", "vpp", "cp", "ep", "dp", "expert_dp", "micro_batch")},
        "gpus": c.world,
        "gpus_per_domain": c.used,
        "recompute": plan.recompute,
        "pipeline": plan.stages.text(),
        "ring_rows": plan.ring_rows,
        "comm_sms": comm_sms(search.job.cluster.gpu),
        "tile": [BLOCK_ROWS, FC2_TILE_COLUMNS],
        "memory_bytes": {
            name: round(getattr(m, name))
            for name in ("weights", "gradients", "optimizer", "activations", "workspace", "reserve", "total")
        },
        "recompute_choices": {
            level: {"memory_bytes": round(other.memory.total), "step_s": other.time.total_s}
            if isinstance(other, Plan)
            else {"memory_bytes": round(limit_bytes(search.job) + other.excess), "step_s": None}
            for level, other in by_recompute(search.job, c).items()
        },
        "moe_layer": {
            direction: {
                "predicted_s": moe.total_s,
                "floors_s": {"flop": moe.floors.flop_s, "nvlink": moe.floors.nvlink_s, "hbm": moe.floors.hbm_s},
            }
            for direction, moe in t.moe.items()
        },
        "step_s": t.total_s,
        "bubble_s": t.bubble_s,
        "exposed_dp_s": t.exposed_dp_s,
        "tokens_per_second": plan.tokens_per_second,
        "tokens_per_second_per_gpu": plan.per_gpu,
        "model_tflops_per_gpu": plan.model_tflops,
    }
