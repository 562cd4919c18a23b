"""Routing -> Schedule: which row of which rank every (token, expert) route occupies. Deterministic, in torch.

Worked example: W=1, E=2, K=2, block_rows=4, three tokens routed to {0}, {0, 1}, {1}::

    experts = [[0, -1], [0, 1], [1, -1]]            slots 0..5, slot = t * K + k
    rows of expert 0: slots 0, 2, then two padding rows; rows of expert 1: slots 3, 4, then two padding rows
    row_src_slot     = [0, 2, -1, -1, 3, 4, -1, -1]     row_src_rank = [0, 0, -1, -1, 0, 0, -1, -1]
    expert_first_row = [0, 4, 8]                        total_rows = 8
    slot_dst_row     = [[0, -1], [1, 4], [5, -1]]       slot_dst_rank = [[0, -1], [0, 0], [0, -1]]
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Both sides' tables of one layer call. Index tensors are int32; -1 marks an absent route or a padding row.

    At the source (this rank's T tokens):
        experts: ``[T, K]`` expert ids, ascending in a row, absent ones last.
        weights: ``[T, K]`` fp32 router weights, 0 where absent.
        slot_dst_rank, slot_dst_row: ``[T, K]`` rank and row that hold the slot's route.
    At the destination (this rank's e experts; rows of an expert are ordered by (source rank, token) and padded to a
    multiple of ``block_rows``):
        row_src_rank, row_src_slot: ``[R]`` source rank and slot of each row.
        expert_first_row: ``[e + 1]`` first row of each local expert; the last entry is the number of rows in use.
    """

    experts: Tensor
    weights: Tensor
    slot_dst_rank: Tensor
    slot_dst_row: Tensor
    row_src_rank: Tensor
    row_src_slot: Tensor
    expert_first_row: Tensor
    block_rows: int
