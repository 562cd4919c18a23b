"""Row movement of the reference backend: which rows each rank sends where, and the all-to-alls that move them.

Two kinds of rows travel. Towards the experts a token goes once to each rank that holds one of its experts (``tokens``:
x, dY) and is copied there to all its rows; scalars go once per route. Back to the source one row per route travels
(``routes``: y, dX, d_weights), so that the sum over a token's experts is taken at the source in one fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Movement:
    """Index tables (int64) and all-to-all split sizes of one schedule.

    At the source:
        send_tokens: token of each row sent towards the experts, ordered by (destination rank, token).
        slot_position: ``[T, K]`` place of the slot's route among the returned rows; their number where absent.
        send_slots: slot of each returned row, ordered by (destination rank, slot).
    At the destination:
        valid_rows: rows that hold a route, ascending; recv_position: where each finds its token among received rows.
        route_rows: row of each route sent back, ordered by (source rank, slot).
    Split sizes by peer: tokens sent and received, routes of mine that the peer holds, routes of the peer that I hold.
    """

    send_tokens: Tensor
    slot_position: Tensor
    send_slots: Tensor
    valid_rows: Tensor
    recv_position: Tensor
    route_rows: Tensor
    tokens_sent: list[int]
    tokens_received: list[int]
    routes_out: list[int]
    routes_held: list[int]

    @classmethod
    def from_schedule(cls, schedule: Schedule, world: int) -> Movement:
        """Derive both sides from the schedule alone. Reads split sizes on the host."""
        dst = schedule.slot_dst_rank.long()
        num_tokens, top_k = dst.shape
        goes_to = torch.zeros(num_tokens, world + 1, dtype=torch.bool, device=dst.device)
        goes_to.scatter_(1, torch.where(dst < 0, world, dst), True)
        goes_to = goes_to[:, :world].T
        flat_dst = dst.reshape(-1)
        slots = (flat_dst >= 0).nonzero().squeeze(1)
        send_slots = slots[torch.sort(flat_dst[slots], stable=True).indices]
        slot_position = torch.full_like(flat_dst, send_slots.numel())
        slot_position[send_slots] = torch.arange(send_slots.numel(), device=dst.device)

        valid_rows = (schedule.row_src_rank >= 0).nonzero().squeeze(1)
        src_rank, src_slot = schedule.row_src_rank[valid_rows].long(), schedule.row_src_slot[valid_rows].long()
        # Both keys sort by (source rank, index at the source); an index fits 32 bits.
        tokens, recv_position = torch.unique((src_rank << 32) | (src_slot // top_k), return_inverse=True)
        return cls(
            send_tokens=goes_to.nonzero()[:, 1],
            slot_position=slot_position.view(num_tokens, top_k),
            send_slots=send_slots,
            valid_rows=valid_rows,
            recv_position=recv_position,
            route_rows=valid_rows[torch.argsort((src_rank << 32) | src_slot)],
            tokens_sent=goes_to.sum(1).tolist(),
            tokens_received=torch.bincount(tokens >> 32, minlength=world).tolist(),
            routes_out=torch.bincount(flat_dst[slots], minlength=world).tolist(),
            routes_held=torch.bincount(src_rank, minlength=world).tolist(),
        )


class Mover:
    """Moves rows by one ``Movement`` within an EP group; with ``group`` None everything stays on this rank."""

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup | None) -> None:
        self._plan = Movement.from_schedule(schedule, 1 if group is None else group.size())
        self._num_rows = schedule.row_src_rank.numel()
        self._group = group

    def dispatch(self, per_token: Tensor) -> Tensor:
        """``[T, N]`` at the sources -> ``[R, N]`` at the experts; padding rows are 0."""
        plan = self._plan
        received = self._exchange(per_token[plan.send_tokens], plan.tokens_sent, plan.tokens_received)
        rows = per_token.new_zeros(self._num_rows, per_token.shape[1])
        rows[plan.valid_rows] = received[plan.recv_position]
        return rows

    def dispatch_slots(self, per_slot: Tensor) -> Tensor:
        """``[T, K]`` at the sources -> ``[R]`` at the experts; padding rows are 0."""
        plan = self._plan
        received = self._exchange(per_slot.reshape(-1)[plan.send_slots], plan.routes_out, plan.routes_held)
        rows = per_slot.new_zeros(self._num_rows)
        rows[plan.route_rows] = received
        return rows

    def collect(self, rows: Tensor) -> Tensor:
        """``[R, ...]`` at the experts -> ``[routes + 1, ...]`` at the sources, by ``slot_position``; then a 0 row."""
        plan = self._plan
        returned = self._exchange(rows[plan.route_rows], plan.routes_held, plan.routes_out)
        return torch.cat([returned, returned.new_zeros(1, *returned.shape[1:])])

    def combine(self, rows: Tensor, weights: Tensor | None, accumulate: torch.dtype) -> Tensor:
        """``[R, N]`` at the experts -> ``[T, N]``: sum over k, weighted by ``weights [T, K]`` if given.

        Products and sums are taken in ``accumulate``, by ascending expert id, and rounded once to the rows' dtype.
        """
        returned, position = self.collect(rows), self._plan.slot_position
        total = torch.zeros(position.shape[0], rows.shape[1], dtype=accumulate, device=rows.device)
        for k in range(position.shape[1]):
            term = returned[position[:, k]].to(accumulate)
            total += term if weights is None else term * weights[:, k : k + 1].to(accumulate)
        return total.to(rows.dtype)

    def collect_slots(self, rows: Tensor) -> Tensor:
        """``[R]`` at the experts -> ``[T, K]`` at the sources; 0 where absent."""
        return self.collect(rows)[self._plan.slot_position]

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        if self._group is None:
            return rows
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=self._group)
        return received


def gather_tables(experts: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """``experts [T, K]`` of every rank of the group, by rank; T may differ and be 0."""
    if group is None:
        return [experts]
    count = torch.tensor([experts.shape[0]], device=experts.device)
    counts = [torch.empty_like(count) for _ in range(group.size())]
    dist.all_gather(counts, count, group=group)
    sizes = [int(c) for c in counts]
    padded = experts.new_full((max(sizes), experts.shape[1]), -1)
    padded[: experts.shape[0]] = experts
    tables = [torch.empty_like(padded) for _ in sizes]
    if padded.numel():
        dist.all_gather(tables, padded, group=group)
    return [table[:size] for table, size in zip(tables, sizes, strict=True)]
