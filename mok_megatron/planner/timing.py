"""Predicted times of layers, stages and steps. Closed formulas with stated assumptions; nothing here is measured.

The MoE layer's formula follows the simulator (a test compares them). What overlaps: dispatch and combine with the
experts' GEMMs inside the kernel; gradient reduction with the backward of the last microbatch (less a tenth).
"""

from __future__ import annotations

from dataclasses import dataclass

from mok_megatron.config import MoeShape
from mok_megatron.floors import (
    DIRECTIONS,
    Direction,
    Floors,
    dispatch_crossings,
    gemm_hbm_bytes,
    layer_floors,
    nvlink_bytes,
    routed_flops,
)
from mok_megatron.hardware import GpuSpec
from mok_megatron.memory import BACKWARD_TILE_COLUMNS
from mok_megatron.params import count_params
from mok_megatron.planner.candidate import Candidate, Job
from mok_megatron.planner.layercost import BF16, FP32, core_flops, layer_costs
from mok_megatron.planner.memory_use import OPTIMIZER_BYTES, MemoryUse, tokens_per_gpu
from mok_megatron.planner.pipeline import Stages
from mok_megatron.simulator.machine import Machine, Policy
from mok_megatron.tile_order import BLOCK_ROWS, FC1_TILE_COLUMNS, FC2_TILE_COLUMNS

PLANNED_POLICY = Policy()
"""How the planned kernel moves rows."""
DENSE_EFFICIENCY = 0.7
"""Attention projections and dense MLPs, as a share of a large GEMM's rate: an assumption."""
CORE_EFFICIENCY = 0.5
"""Attention scores and values likewise."""
ELEMENTWISE_PASSES = 40
"""HBM passes over a token's hidden state per layer and direction, outside GEMMs (norms, rope, router, residuals)."""

PORT_SHARE, PUSH_SHARE = 0.85, 0.65
"""Share of the copying rate that is left when several ranks want rows of the same one, or push rows to the same one, as
they do where an expert's first rows are all of source 0: fitted to the simulator."""

ASSUMPTIONS = (
    f"attention and dense GEMMs at {DENSE_EFFICIENCY:.0%}, attention core at {CORE_EFFICIENCY:.0%} of a large GEMM",
    "uniform routing; the kernel at the clock under the power limit, 6 % slower while rows are copied",
    "pipeline bubble (pp - 1) / vpp microbatches; gradient reduction hides behind the last microbatch's backward",
    f"reserve of 5 GB per GPU, allocator loss 6 % of activations, optimizer {OPTIMIZER_BYTES} bytes per parameter",
    "error of a step unknown: no whole step was measured; the MoE formula is within 15 % of the simulator",
)


@dataclass(frozen=True, kw_only=True)
class MoeTime:
    """One MoE layer call on one GPU: predicted time beside its floors."""

    total_s: float
    floors: Floors


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Predicted seconds of one training step and its parts."""

    total_s: float
    stage_s: float
    bubble_s: float
    exposed_dp_s: float
    optimizer_s: float
    moe: dict[Direction, MoeTime]
    layer_s: dict[str, float]


def kernel_machine(job: Job) -> Machine:
    """The job's machine as a training step meets it: calls follow each other, so the power limit always holds."""
    return (job.machine or Machine.from_gpu(job.cluster.gpu)).with_(burst_s=0.0)


def moe_time(
    shape: MoeShape,
    tokens: int,
    direction: Direction,
    gpu: GpuSpec,
    machine: Machine,
    *,
    save_x: bool = True,
    rebuild: bool = False,
) -> MoeTime:
    """Predicted time of the routed experts' call; ``rebuild`` adds gate and up to backward (2 of 6 forward GEMMs)."""
    floors = layer_floors(shape, tokens, direction, gpu, save_x=save_x)
    forward_flops = routed_flops(shape, tokens, "fwd")
    flops = forward_flops * ((1 if direction == "fwd" else 2) + (2 / 3 if rebuild else 0))
    rate = machine.rate(direction, 0.0)
    # Padding: half a block per expert.
    rows = tokens * shape.top_k
    padding = 1 + shape.experts_per_rank * 64 / rows if rows else 1.0
    epilogue_s, longest = _tile_costs(shape, rows * padding, direction, machine)
    nvlink_share = min(1.0, floors.nvlink_s * rate / flops) if flops else 0.0
    memory_s = gemm_hbm_bytes(shape, tokens, direction) / machine.hbm
    memory_share = min(1.0, memory_s * rate / flops) if flops else 0.0
    slow = 1 + machine.contention * nvlink_share + machine.hbm_contention * memory_share
    compute = (flops * padding / rate + epilogue_s) * slow
    into, back = nvlink_bytes(shape, tokens, direction, save_x=save_x)
    rate, experts = PLANNED_POLICY.copy_rate(machine), shape.experts_per_rank
    dispatch, combine = into / (rate * PORT_SHARE), back / (rate * PUSH_SHARE)
    # Tiles begin when the first rows are there; rows come by source, so the first columns of tiles wait now and then.
    compute += 1.4 * dispatch / experts
    if direction == "fwd":
        # Rows are pushed when their expert's FC2 is done: then those of all experts from number j on are still to come.
        ends = [max(compute * j / experts, dispatch) + combine * (1 - (j - 1) / experts) for j in range(1, experts + 1)]
        total = max(*ends, compute)
    else:
        total = max(compute, dispatch + combine)  # weight gradients cover the combine of dX
    total += machine.start_s(direction, rows) + longest * slow
    return MoeTime(total_s=max(total, floors.bound), floors=floors)


def _tile_costs(shape: MoeShape, rows: float, direction: Direction, machine: Machine) -> tuple[float, float]:
    """(epilogues' seconds in all on each cluster, seconds of the longest tile) with ``rows`` rows in whole blocks."""
    clusters, costs = machine.sms // 2, machine.epilogues
    hidden, width = -(-shape.hidden // FC2_TILE_COLUMNS), shape.intermediate
    pairs = rows / (2 * BLOCK_ROWS)
    if direction == "fwd":
        tiles = [(pairs * -(-width // FC1_TILE_COLUMNS), costs.fc1, float(shape.hidden))]
        tiles += [(pairs * hidden, costs.fc2, width)]
    else:
        columns, both = -(-width // BACKWARD_TILE_COLUMNS), -(-2 * width // BACKWARD_TILE_COLUMNS)
        per_expert = hidden * (columns + both)
        tiles = [(pairs * columns, costs.act_grad, shape.hidden), (pairs * hidden, costs.fc2, 2 * width)]
        tiles += [(shape.experts_per_rank * per_expert, costs.wgrad, rows / shape.experts_per_rank)]
    one_deep = 2.0 * 256 * 256 / (machine.rate(direction, 0.0) / clusters)
    return (
        sum(count * epilogue for count, epilogue, _ in tiles) / clusters,
        max(depth * one_deep + epilogue for _, epilogue, depth in tiles),
    )


def comm_sms(gpu: GpuSpec) -> int:
    """Fewest SMs whose two copying warps saturate NVLink; all of them where they cannot."""
    machine = Machine.from_gpu(gpu)
    return next((n for n in range(1, gpu.sms) if Policy(comm_sms=n).copy_rate(machine) >= machine.nvlink), gpu.sms)


def layer_seconds(
    job: Job, c: Candidate, shape: MoeShape, recompute: str
) -> tuple[dict[str, float], dict[Direction, MoeTime]]:
    """Seconds of one microbatch, forward and backward, per kind of layer: ``dense``, ``moe``, ``mtp``, ``loss``."""
    gpu, costs, tokens = job.cluster.gpu, layer_costs(job.arch), tokens_per_gpu(job, c)
    rate, machine = gpu.gemm_flops * DENSE_EFFICIENCY, kernel_machine(job)
    # Forward + backward: 3 times the projections' forward FLOPs, 3.5 times the core's (flash recomputes scores).
    core_s = tokens * core_flops(costs, job.seq_length) / (gpu.gemm_flops * CORE_EFFICIENCY)
    attention = tokens * 2 * costs.attention_params * 3 / rate + 3.5 * core_s
    elementwise = 2 * ELEMENTWISE_PASSES * tokens * costs.hidden * BF16 / gpu.hbm_bandwidth
    attention += elementwise + 2 * _tp_seconds(job, c, 2)
    dense = tokens * 2 * costs.dense_params * 3 / rate + 2 * _tp_seconds(job, c, 2)
    shared = tokens * 2 * (costs.shared_params + costs.router_params) * 3 / rate
    rebuild, save_x = recompute not in ("none", "no-save-x"), recompute == "none"
    moe = {
        d: moe_time(shape, tokens, d, gpu, machine, save_x=save_x or d == "fwd", rebuild=rebuild and d == "bwd")
        for d in DIRECTIONS
    }
    routed = sum(m.total_s for m in moe.values())
    kinds = {"dense": attention + dense, "moe": attention + shared + routed}
    if recompute == "selective":
        kinds["dense"] += dense / 3 + attention / 12
        kinds["moe"] += shared / 3 + attention / 12
    if recompute == "full":
        kinds["dense"] *= 4 / 3
        kinds["moe"] = (attention + shared) * 4 / 3 + 2 * moe["fwd"].total_s + moe["bwd"].total_s
    head = tokens * 2 * job.arch.vocab * costs.hidden * 3 / rate
    kinds["mtp"] = kinds["moe"] + tokens * 2 * costs.mtp_extra_params * 3 / rate + head
    kinds["loss"] = head
    return kinds, moe


def _tp_seconds(job: Job, c: Candidate, collectives: int) -> float:
    """All-gathers and reduce-scatters of sequence parallelism over NVLink, not overlapped."""
    if c.tp == 1:
        return 0.0
    size = c.micro_batch * job.seq_length / c.cp * layer_costs(job.arch).hidden * BF16 * (c.tp - 1) / c.tp
    return collectives * size / job.cluster.gpu.nvlink_achievable


def step_time(
    job: Job,
    c: Candidate,
    stages: Stages,
    kinds: dict[str, float],
    moe: dict[Direction, MoeTime],
    worst: MemoryUse,
) -> StepTime:
    """The step of the slowest pipeline rank: (microbatches + bubble) x its time per microbatch, and what is exposed."""
    arch, gpu = job.arch, job.cluster.gpu
    stage_s = max(rank_seconds(arch.dense_layers, stages, kinds, rank) for rank in range(c.pp))
    hop = tokens_per_gpu(job, c) * layer_costs(arch).hidden * BF16 / gpu.network_bandwidth
    if c.pp > 1:
        stage_s += 2 * hop * (1 if c.vpp == 1 else 0.25 * c.vpp)
    microbatches = c.microbatches(job.global_batch)
    bubble = (c.pp - 1) / c.vpp * stage_s
    reduced = worst.gradients + worst.weights  # gradients scattered in fp32, weights gathered in bf16
    reduce_s = reduced / gpu.network_bandwidth if c.dp * c.cp > 1 and c.expert_dp > 1 else 0.0
    exposed = max(0.1 * reduce_s, reduce_s - stage_s * 2 / 3)
    optimizer_s = 2 * (worst.optimizer + worst.optimizer / OPTIMIZER_BYTES * (FP32 + BF16)) / gpu.hbm_bandwidth
    return StepTime(
        total_s=microbatches * stage_s + bubble + exposed + optimizer_s,
        stage_s=stage_s,
        bubble_s=bubble,
        exposed_dp_s=exposed,
        optimizer_s=optimizer_s,
        moe=moe,
        layer_s=kinds,
    )


def rank_seconds(dense_layers: int, stages: Stages, kinds: dict[str, float], rank: int) -> float:
    """Seconds per microbatch of all chunks of one pipeline rank."""
    total = 0.0
    for chunk in stages.of_rank(rank):
        dense = chunk.dense(dense_layers)
        total += dense * kinds["dense"] + (len(chunk.layers) - dense) * kinds["moe"]
        total += chunk.mtp * kinds["mtp"] + chunk.loss * kinds["loss"]
    return total


def model_flops_per_token(job: Job) -> float:
    """6 x active parameters (embedding lookup left out) + 3 x attention core: forward and backward."""
    counts, costs, arch = count_params(job.arch), layer_costs(job.arch), job.arch
    active = counts.active - counts.embedding + counts.mtp_active + (counts.embedding if arch.tied_embeddings else 0)
    return 6.0 * active + 3.0 * core_flops(costs, job.seq_length) * (arch.layers + arch.mtp_layers)


def nvlink_crossings(shape: MoeShape) -> tuple[float, float]:
    """Crossings per token: (dispatch, one per (token, rank); combine, one per route)."""
    return dispatch_crossings(shape), dispatch_crossings(shape, per_route=True)
