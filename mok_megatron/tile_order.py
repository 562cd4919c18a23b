"""The order in which the megakernel's tiles are handed out: the Python model of ``kernels/moe/tile_order.h``.

A ticket is the work of one 2-CTA cluster. ``tall`` tiles cover two row blocks at one column and share the weights,
``wide`` tiles cover one row block (the odd last one of an expert) at two columns and share the rows. FC2 of an expert
follows FC1 with a distance of ``lag`` experts, so that its inputs are long finished when it comes up::

    FC1(0) .. FC1(lag-1), FC1(lag), FC2(0), FC1(lag+1), FC2(1), ...

Every tile waits only for rows that communication warps bring or for tiles of earlier tickets; hence any number of
workers that take tickets in order finishes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

BLOCK_ROWS = 128
"""Tile height: rows of one CTA's tile."""
FC1_TILE_COLUMNS = 128
"""Columns of h in one FC1 tile (as many gate and as many up columns)."""
FC2_TILE_COLUMNS = 256
"""Output columns in one FC2 tile."""
BAND_PAIRS = 8
"""Row-block pairs walked together down a column: with 66 clusters in flight, 8 pairs and 8 columns balance reuse."""

Phase = Literal["fc1", "fc2"]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One cluster tile: ``row_block`` counts blocks of the whole rank, ``column`` column tiles of the phase."""

    phase: Phase
    expert: int
    row_block: int
    column: int
    wide: bool

    def of_cta(self, rank: int) -> tuple[int, int]:
        """(row block, column) of the cluster's CTA 0 or 1; the column of CTA 1 may lie past the last one."""
        return (self.row_block, self.column + rank) if self.wide else (self.row_block + rank, self.column)


def cluster_tiles(row_blocks: int, columns: int) -> int:
    """Tickets of one expert's phase: a tall tile per pair and column, a wide one per two columns of an odd block."""
    return row_blocks // 2 * columns + row_blocks % 2 * -(-columns // 2)


class TileOrder:
    """Tickets of one rank's call.

    Args:
        row_blocks: row blocks of each local expert (rows / 128, rounded up).
        fc1_columns: column tiles of FC1, ceil(I / 128).
        fc2_columns: column tiles of FC2, ceil(H / 256).
        lag: experts between FC1 and FC2 of the same expert, at least 1.
    """

    def __init__(self, row_blocks: Sequence[int], *, fc1_columns: int, fc2_columns: int, lag: int) -> None:
        self.row_blocks = list(row_blocks)
        self.first_block = [0, *accumulate(self.row_blocks)]
        self.columns = {"fc1": fc1_columns, "fc2": fc2_columns}
        self.lag = lag
        self._before = {
            phase: [0, *accumulate(cluster_tiles(blocks, columns) for blocks in self.row_blocks)]
            for phase, columns in self.columns.items()
        }
        steps = len(self.row_blocks) + lag
        self._step_start = [self._tickets_before(step) for step in range(steps + 1)]
        self.num_tickets = self._step_start[-1]

    def _tickets_before(self, step: int) -> int:
        experts = len(self.row_blocks)
        return self._before["fc1"][min(step, experts)] + self._before["fc2"][max(0, step - self.lag)]

    def tile(self, ticket: int) -> Tile:
        """The tile of a ticket in ``range(num_tickets)``."""
        step = bisect_right(self._step_start, ticket) - 1
        index = ticket - self._step_start[step]
        experts = len(self.row_blocks)
        fc1_tiles = self._before["fc1"][step + 1] - self._before["fc1"][step] if step < experts else 0
        if index < fc1_tiles:
            return self._tile_of_expert("fc1", step, index)
        return self._tile_of_expert("fc2", step - self.lag, index - fc1_tiles)

    def _tile_of_expert(self, phase: Phase, expert: int, index: int) -> Tile:
        columns, pairs = self.columns[phase], self.row_blocks[expert] // 2
        first = self.first_block[expert]
        if index >= pairs * columns:
            column = 2 * (index - pairs * columns)
            return Tile(phase=phase, expert=expert, row_block=first + 2 * pairs, column=column, wide=True)
        band, within = divmod(index, BAND_PAIRS * columns)
        height = min(BAND_PAIRS, pairs - band * BAND_PAIRS)
        column, pair = divmod(within, height)
        return Tile(
            phase=phase,
            expert=expert,
            row_block=first + 2 * (band * BAND_PAIRS + pair),
            column=column,
            wide=False,
        )

    def __iter__(self) -> Iterator[Tile]:
        return (self.tile(ticket) for ticket in range(self.num_tickets))


def fc2_lag(expected_rows: float, *, fc1_columns: int, clusters: int, experts: int) -> int:
    """Experts between FC1 and FC2 that keep 1.5 waves of FC1 tiles in between.

    ``expected_rows`` is the mean number of rows per local expert.
    """
    tiles = max(expected_rows / (2 * BLOCK_ROWS), 0.5) * fc1_columns
    return max(1, min(experts, -int(-1.5 * clusters // tiles)))
