"""Routing -> Schedule: which row of which rank every (token, expert) route occupies. Deterministic, in torch.

Worked example: W=1, E=2, K=2, block_rows=4, three tokens routed to {0}, {0, 1}, {1}::

    experts = [[0, -1], [0, 1], [1, -1]]            slots 0..5, slot = t * K + k
    rows of expert 0: slots 0, 2, then two padding rows; rows of expert 1: slots 3, 4, then two padding rows
    row_src_slot     = [0, 2, -1, -1, 3, 4, -1, -1]     row_src_rank = [0, 0, -1, -1, 0, 0, -1, -1]
    expert_first_row = [0, 4, 8]                        total_rows = 8
    slot_dst_row     = [[0, -1], [1, 4], [5, -1]]       slot_dst_rank = [[0, -1], [0, 0], [0, -1]]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mok_megatron.config import MoeShape


class Schedule(NamedTuple):
    """Both sides' tables of one layer call. Index tensors are int32; -1 marks an absent route or a padding row.

    Tables of one size lie in one tensor, since each tensor costs time when it is made and when it is saved.

    At the source (this rank's T tokens):
        slots: ``[3, T, K]``, contiguous:
            experts: expert ids, ascending in a row, absent ones last.
            slot_dst_rank, slot_dst_row: rank and row that hold the slot's route.
        weights: ``[T, K]`` router weights, fp32 (fp64 for an fp64 layer), 0 where absent.
    At the destination (this rank's e experts; rows of an expert are ordered by (source rank, token) and padded to a
    multiple of ``block_rows``):
        rows: ``[2, R]``, contiguous:
            row_src_rank, row_src_slot: source rank and slot of each row.
        expert_first_row: ``[e + 1]`` first row of each local expert; the last entry is the number of rows in use.
    """

    slots: Tensor
    weights: Tensor
    rows: Tensor
    expert_first_row: Tensor
    block_rows: int

    @property
    def experts(self) -> Tensor:
        """``[T, K]``."""
        return self.slots[0]

    @property
    def slot_dst_rank(self) -> Tensor:
        """``[T, K]``."""
        return self.slots[1]

    @property
    def slot_dst_row(self) -> Tensor:
        """``[T, K]``."""
        return self.slots[2]

    @property
    def row_src_rank(self) -> Tensor:
        """``[R]``."""
        return self.rows[0]

    @property
    def row_src_slot(self) -> Tensor:
        """``[R]``."""
        return self.rows[1]


def compact(
    probs: Tensor, routing_map: Tensor, top_k: int, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Dense routing -> slots: ``probs [T, E]``, ``routing_map [T, E]`` bool -> ``experts`` and ``weights [T, K]``.

    ``experts`` is int32, ascending in a row, absent ones (-1) last; ``weights`` has ``dtype`` and is 0 where absent,
    whatever ``probs`` holds off-route. No host synchronisation. A map names an expert at most once per token, so an
    index-style routing that repeats an id in a row counts it once when it is turned into a map. A row with more than K
    ones loses its highest ids: ``validate_routing`` refuses it where values can be read.
    """
    num_experts = routing_map.shape[1]
    ids = torch.arange(num_experts, dtype=torch.int32, device=routing_map.device)
    candidates = torch.where(routing_map, ids, num_experts)
    lowest = torch.topk(candidates, top_k, dim=1, largest=False, sorted=True).values
    absent = lowest == num_experts
    routed = probs.gather(1, lowest.masked_fill(absent, 0).long()).to(dtype)
    return lowest.masked_fill(absent, -1).to(torch.int32), routed.masked_fill(absent, 0)


def build_schedule(
    experts_by_rank: Sequence[Tensor], weights: Tensor, *, rank: int, num_experts: int, block_rows: int
) -> Schedule:
    """Tables of ``rank`` from every rank's slots: a pure function, the same on all ranks up to ``rank``.

    ``experts_by_rank[s]`` is ``[T_s, K]`` int32 as ``compact`` makes it (no expert twice in a row), T_s may differ and
    be 0; ``weights [T, K]`` belongs to ``rank``. Raises ValueError where the sizes do not fit together.
    """
    _check_tables(experts_by_rank, weights, rank, num_experts, block_rows)
    experts = experts_by_rank[rank]
    device, local_experts = experts.device, num_experts // len(experts_by_rank)

    # All routes of the group in (source rank, slot) order; a stable sort by expert then leaves (source rank, token)
    # order inside every expert, because a token names an expert once.
    route_expert = torch.cat([table.reshape(-1) for table in experts_by_rank]).long()
    route_rank = torch.cat([torch.full((table.numel(),), s, device=device) for s, table in enumerate(experts_by_rank)])
    route_slot = torch.cat([torch.arange(table.numel(), device=device) for table in experts_by_rank])
    present = route_expert >= 0
    route_expert, order = torch.sort(route_expert[present], stable=True)
    route_rank, route_slot = route_rank[present][order], route_slot[present][order]

    counts = torch.bincount(route_expert, minlength=num_experts)
    padded = (counts + block_rows - 1) // block_rows * block_rows
    group_end = padded.view(-1, local_experts).cumsum(1)
    group_first = (group_end - padded.view(-1, local_experts)).view(-1)
    index_in_group = torch.arange(route_expert.numel(), device=device) - (counts.cumsum(0) - counts)[route_expert]
    route_row = group_first[route_expert] + index_in_group
    route_dst = route_expert // local_experts

    here = route_dst == rank
    expert_first_row = torch.cat([group_end.new_zeros(1), group_end[rank]])
    total_rows = int(expert_first_row[-1])
    mine = route_rank == rank
    slot_dst_rank = _scatter(route_slot[mine], route_dst[mine], experts.numel()).view(experts.shape)
    slot_dst_row = _scatter(route_slot[mine], route_row[mine], experts.numel()).view(experts.shape)
    row_src_rank = _scatter(route_row[here], route_rank[here], total_rows)
    row_src_slot = _scatter(route_row[here], route_slot[here], total_rows)
    return Schedule(
        slots=torch.stack((experts, slot_dst_rank, slot_dst_row)),
        weights=weights,
        rows=torch.stack((row_src_rank, row_src_slot)),
        expert_first_row=expert_first_row.to(torch.int32),
        block_rows=block_rows,
    )


def validate_routing(probs: Tensor, routing_map: Tensor, shape: MoeShape, *, x: Tensor) -> None:
    """Refuse a routing that does not fit the layer or ``x [T, H]``, before anything is changed.

    Shapes, dtypes and devices are always checked. Values are read only where that costs no device synchronisation, on
    the CPU: a row with more than K experts, and a routed probability that is NaN, infinite or negative. (The gradients
    themselves are right for any finite weight.) Raises ValueError with the offending values.
    """
    if x.dim() != 2 or x.shape[1] != shape.hidden:
        raise ValueError(f"x must be [tokens, hidden={shape.hidden}], got {list(x.shape)}")
    expected = (x.shape[0], shape.num_experts)
    for name, tensor in (("probs", probs), ("routing_map", routing_map)):
        if tensor.shape != expected:
            raise ValueError(
                f"{name} must be [tokens={expected[0]}, experts={expected[1]}] as x and the layer say, "
                f"got {list(tensor.shape)}"
            )
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}: move it there")
    if routing_map.dtype != torch.bool:
        raise ValueError(f"routing_map must be bool, got {routing_map.dtype}: compare it with 0 first")
    if probs.dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(f"probs must be float32, bfloat16 or float64, got {probs.dtype}")
    if x.is_cpu:
        _check_values(probs.detach(), routing_map, shape.top_k)


def _check_values(probs: Tensor, routing_map: Tensor, top_k: int) -> None:
    per_token = routing_map.sum(1)
    if (per_token > top_k).any():
        token = int(per_token.argmax())
        raise ValueError(
            f"routing_map routes token {token} to {int(per_token[token])} experts, more than top_k={top_k}"
        )
    bad = routing_map & ~(torch.isfinite(probs) & (probs >= 0))
    if bad.any():
        token, expert = bad.nonzero()[0].tolist()
        raise ValueError(
            f"probs[{token}, {expert}] = {probs[token, expert].item()} is routed but not a finite number >= 0 "
            f"({int(bad.sum())} such entries): look at the router's input"
        )


def _check_tables(
    experts_by_rank: Sequence[Tensor], weights: Tensor, rank: int, num_experts: int, block_rows: int
) -> None:
    world = len(experts_by_rank)
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not one of the {world} ranks that gave a table")
    if num_experts % world:
        raise ValueError(f"num_experts={num_experts} is not divisible by the {world} ranks that gave a table")
    if block_rows < 1:
        raise ValueError(f"block_rows must be >= 1, got {block_rows}")
    if weights.shape != experts_by_rank[rank].shape:
        raise ValueError(
            f"weights {list(weights.shape)} and experts {list(experts_by_rank[rank].shape)} of rank {rank} "
            f"differ in shape"
        )


def _scatter(index: Tensor, values: Tensor, size: int) -> Tensor:
    """``[size]`` int32 with ``values`` at ``index`` and -1 elsewhere; the indices are distinct."""
    table = torch.full((size,), -1, dtype=torch.int32, device=values.device)
    table[index] = values.to(torch.int32)
    return table
