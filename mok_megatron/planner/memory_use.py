"""Bytes per GPU of a candidate, for its fullest pipeline rank.

Weights are bf16 and main gradients fp32; the distributed optimizer keeps 12 bytes per parameter (fp32 copy and two
moments), sharded over data parallelism. Attention is of the flash kind: its scores are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mok_megatron import memory
from mok_megatron.architecture import Architecture
from mok_megatron.config import MoeShape
from mok_megatron.planner.candidate import Candidate, Job
from mok_megatron.planner.layercost import BF16, FP32, LayerCosts, layer_costs
from mok_megatron.planner.pipeline import Chunk, Stages

OPTIMIZER_BYTES = 12
RESERVE_BYTES = 5e9
"""CUDA context, NCCL buffers, cuBLAS and TE workspaces: an assumption, typical of large jobs."""
FRAGMENTATION = 0.06
"""Share of activations lost to the caching allocator: an assumption."""
LOGITS_COPIES = BF16 + FP32
"""Bytes per logit while the loss is computed: bf16 logits and the fp32 softmax."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of one GPU."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    reserve: float = RESERVE_BYTES

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace + self.reserve


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Activation bytes that one layer of a kind keeps per microbatch, and what is live while one is recomputed."""

    dense: float
    moe: float
    working: float


@lru_cache(maxsize=4096)
def layer_bytes(arch: Architecture, tokens: int, recompute: str, shape: MoeShape, ring_rows: int) -> LayerBytes:
    """Activations of one layer under a recompute level, for ``tokens`` tokens on one GPU."""
    costs = layer_costs(arch)
    selective = recompute in ("selective", "full")
    attention = costs.residual_saved + costs.attention_saved
    attention += 0 if selective else costs.norm_saved + costs.up_saved
    dense = tokens * (attention + (costs.norm_saved if selective else costs.dense_saved))
    saved = memory.saved_bytes(
        shape,
        tokens,
        ring_rows,
        recompute=recompute not in ("none", "no-save-x"),
        save_x=recompute == "none",
    )
    moe = tokens * (attention + costs.router_saved + (0 if selective else costs.shared_saved)) + saved
    if recompute != "full":
        return LayerBytes(dense=dense, moe=moe, working=0.0)
    kept = tokens * BF16 * costs.hidden
    return LayerBytes(dense=kept, moe=kept, working=moe + tokens * (costs.up_saved + costs.norm_saved))


@lru_cache(maxsize=4096)
def _workspace(shape: MoeShape, tokens: int, ring_rows: int, replays: bool) -> int:
    return memory.workspace_bytes(shape, tokens, ring_rows, replays=replays)


def tokens_per_gpu(job: Job, c: Candidate) -> int:
    """T: tokens of one microbatch on one GPU."""
    return c.micro_batch * job.seq_length // (c.tp * c.cp)


def memory_use(
    job: Job, c: Candidate, stages: Stages, recompute: str, *, shape: MoeShape, ring_rows: int, rank: int
) -> MemoryUse:
    """Bytes of the GPUs of pipeline rank ``rank``."""
    arch, costs = job.arch, layer_costs(job.arch)
    tokens = tokens_per_gpu(job, c)
    per_layer = layer_bytes(arch, tokens, recompute, shape, ring_rows)
    dense_params, expert_params, chunk_bytes = 0.0, 0.0, []
    chunks = stages.of_rank(rank)
    for chunk in chunks:
        dense = chunk.dense(arch.dense_layers)
        moe = len(chunk.layers) - dense + chunk.mtp
        dense_params += _dense_params(arch, costs, c.tp, chunk)
        expert_params += moe * shape.experts_per_rank * costs.expert_params
        # MTP keeps the projection's two inputs as well; the embedding keeps its output.
        kept = dense * per_layer.dense + moe * per_layer.moe
        chunk_bytes.append(kept + tokens * BF16 * costs.hidden * (2 * chunk.mtp + chunk.embedding))
    activations = chunks_in_flight(c, job, rank) * sum(chunk_bytes) / len(chunk_bytes) + per_layer.working
    if any(chunk.loss for chunk in chunks):
        activations += c.micro_batch * job.seq_length / c.cp * arch.vocab / c.tp * LOGITS_COPIES
    params = dense_params + expert_params
    return MemoryUse(
        weights=BF16 * params,
        gradients=FP32 * params,
        optimizer=OPTIMIZER_BYTES * (dense_params / (c.dp * c.cp) + expert_params / c.expert_dp),
        activations=activations * (1 + FRAGMENTATION),
        workspace=_workspace(shape, tokens, ring_rows, recompute != "none"),
    )


def _dense_params(arch: Architecture, costs: LayerCosts, tp: int, chunk: Chunk) -> float:
    """Parameters other than routed experts on one GPU: matrices are split over tp, router and norms are not."""
    dense = chunk.dense(arch.dense_layers)
    moe = len(chunk.layers) - dense + chunk.mtp
    tables = chunk.embedding + (chunk.loss and not (arch.tied_embeddings and chunk.embedding))
    split = (
        (dense + moe) * costs.attention_params
        + dense * costs.dense_params
        + moe * costs.shared_params
        + chunk.mtp * costs.mtp_extra_params
        + tables * arch.vocab * costs.hidden
    )
    return split / tp + (dense + moe) * costs.norm_params + moe * costs.router_params


def chunks_in_flight(c: Candidate, job: Job, rank: int) -> int:
    """Stage chunks whose activations a rank of the 1F1B schedule holds at its fullest.

    Without interleaving pp - rank microbatches; with it Megatron warms up with 2 (pp - rank - 1) + (vpp - 1) pp chunks
    before the first backward.
    """
    microbatches = c.microbatches(job.global_batch)
    if c.vpp == 1:
        return min(c.pp - rank, microbatches)
    return min(2 * (c.pp - rank - 1) + (c.vpp - 1) * c.pp + 1, microbatches * c.vpp)
