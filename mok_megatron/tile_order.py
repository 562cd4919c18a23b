"""The order in which the megakernel's tiles are handed out: the Python model of ``kernels/moe/tile_order.h``.

A ticket is the work of one 2-CTA cluster. ``tall`` tiles cover two row blocks at one column and share the weights,
``wide`` tiles cover one row block (the odd last one of a segment) at two columns and share the rows. A segment is an
expert or, where the rows exceed the ring, a piece of one. FC2 of a segment follows FC1 with a distance of ``lag``
segments, so that its inputs are long finished when it comes up::

    FC1(0) .. FC1(lag-1), FC1(lag), FC2(0), FC1(lag+1), FC2(1), ...

Backward has the same order (its first phase is the data gradient of FC2), with FC1 once more in front where gate and up
have to be rebuilt, and with the weight gradients behind everything else or, where rows are replayed, some segments
behind.

Every tile waits only for rows that communication warps bring or for tiles of earlier tickets; hence any number of
workers that take tickets in order finishes. Rows that exceed the capacity go through a ``Ring``: a row block takes the
place of an earlier one as soon as all tiles that read that one are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
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

Phase = Literal["rebuild", "fc1", "fc2", "wgrad2", "wgrad1"]


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One cluster tile: ``row_block`` counts blocks of the whole rank, ``column`` column tiles of the phase.

    A weight gradient's ``row_block`` counts blocks of 128 lines of its matrix; ``piece`` numbers the expert's segments.
    """

    phase: Phase
    expert: int
    row_block: int
    column: int
    wide: bool
    piece: int = 0

    def of_cta(self, rank: int) -> tuple[int, int]:
        """(row block, column) of the cluster's CTA 0 or 1; the column of CTA 1 may lie past the last one."""
        return (self.row_block, self.column + rank) if self.wide else (self.row_block + rank, self.column)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Row blocks ``first .. first + blocks - 1`` of the rank: those of an expert, or its piece number ``piece``."""

    expert: int
    piece: int
    first: int
    blocks: int
    last: bool

    @property
    def whole(self) -> bool:
        """Whether the expert is not cut."""
        return self.piece == 0 and self.last


def cut_into_segments(row_blocks: Sequence[int], limit: int | None) -> list[Segment]:
    """Segments of at most ``limit`` blocks (None: experts are not cut); an expert without rows is an empty one.

    Pieces of an expert have about the same size, an even number of blocks where the limit allows; the last may have
    fewer.
    """
    segments = []
    for expert, (blocks, first) in enumerate(zip(row_blocks, accumulate(row_blocks, initial=0), strict=False)):
        size = blocks
        if limit is not None and blocks > limit:
            size = -(-blocks // -(-blocks // limit))
            size = min(size + size % 2, limit)
        starts = range(0, blocks, size) if blocks else [0]
        segments += [
            Segment(
                expert=expert,
                piece=piece,
                first=first + start,
                blocks=min(size, blocks - start),
                last=start + size >= blocks,
            )
            for piece, start in enumerate(starts)
        ]
    return segments


@dataclass(frozen=True, kw_only=True)
class WeightGradients:
    """Weight gradients of every expert: pairs of row blocks of 128 lines, and columns of 256, of dW2 and of dW1.

    A matrix without pairs is not wanted.
    """

    pairs2: int
    columns2: int
    pairs1: int
    columns1: int

    @property
    def count(self) -> int:
        """Cluster tiles of an expert."""
        return self.pairs2 * self.columns2 + self.pairs1 * self.columns1


NO_WEIGHT_GRADIENTS = WeightGradients(pairs2=0, columns2=0, pairs1=0, columns1=0)


def _banded(pairs: int, columns: int) -> Iterator[tuple[int, int]]:
    """(pair, column) in bands of BAND_PAIRS, column by column inside a band."""
    for band in range(0, pairs, BAND_PAIRS):
        for column in range(columns):
            for pair in range(band, min(band + BAND_PAIRS, pairs)):
                yield pair, column


class TileOrder:
    """Tickets of one rank's call.

    Args:
        row_blocks: row blocks of each local expert (rows / 128, rounded up).
        fc1_columns: column tiles of FC1, ceil(I / 128); of backward's first data gradient, ceil(I / 256).
        fc2_columns: column tiles of FC2, ceil(H / 256); 0 where it is not wanted.
        lag: segments from the first phase to FC2.
        limit: blocks of a segment at most; None: experts are not cut.
        rebuild_columns: column tiles of backward's FC1, ceil(I / 128); 0: nothing is rebuilt.
        kept_blocks: segments that end before this block are not rebuilt.
        fc1_lag: segments from rebuilding to FC1, at most ``lag``.
        wgrad: weight gradients of each segment.
        wgrad_lag: segments from the first phase to the weight gradients, at least ``lag``; None: they come behind
            everything else.
    """

    def __init__(
        self,
        row_blocks: Sequence[int],
        *,
        fc1_columns: int,
        fc2_columns: int,
        lag: int,
        limit: int | None = None,
        rebuild_columns: int = 0,
        kept_blocks: int = 0,
        fc1_lag: int = 0,
        wgrad: WeightGradients = NO_WEIGHT_GRADIENTS,
        wgrad_lag: int | None = None,
    ) -> None:
        self.row_blocks = list(row_blocks)
        self.first_block = [0, *accumulate(self.row_blocks)]
        self.segments = cut_into_segments(self.row_blocks, limit)
        self.columns = {"rebuild": rebuild_columns, "fc1": fc1_columns, "fc2": fc2_columns}
        self.kept_blocks = kept_blocks
        self.wgrad = wgrad
        self.lag, self.fc1_lag = lag, fc1_lag
        self.wgrad_lag = len(self.segments) + lag if wgrad_lag is None else wgrad_lag

    @cached_property
    def _tiles(self) -> list[Tile]:
        return [tile for step in range(len(self.segments) + self.wgrad_lag) for tile in self._step(step)]

    @property
    def num_tickets(self) -> int:
        """Tickets of the call."""
        return len(self._tiles)

    def tile(self, ticket: int) -> Tile:
        """The tile of a ticket in ``range(num_tickets)``."""
        return self._tiles[ticket]

    def __iter__(self) -> Iterator[Tile]:
        return (self.tile(ticket) for ticket in range(self.num_tickets))

    def rebuilt(self, segment: Segment) -> bool:
        """Whether gate and up of the segment's rows are computed again."""
        return self.columns["rebuild"] > 0 and segment.first + segment.blocks > self.kept_blocks

    def _step(self, step: int) -> Iterator[Tile]:
        """Rebuild of segment ``step``, and each later phase of the segment that is its lag behind."""

        def due(lag: int) -> list[Segment]:
            return [self.segments[step - lag]] if lag <= step < lag + len(self.segments) else []

        for segment in due(0):
            if self.rebuilt(segment):
                yield from self._tiles_of_rows("rebuild", segment)
        for segment in due(self.fc1_lag):
            yield from self._tiles_of_rows("fc1", segment)
        for segment in due(self.lag):
            yield from self._tiles_of_rows("fc2", segment)
        for segment in due(self.wgrad_lag):
            yield from self._weight_gradients(segment)

    def _tiles_of_rows(self, phase: Phase, segment: Segment) -> Iterator[Tile]:
        pairs, odd = divmod(segment.blocks, 2)
        tall = [(2 * pair, column, False) for pair, column in _banded(pairs, self.columns[phase])]
        wide = [(2 * pairs, column, True) for column in range(0, self.columns[phase], 2) if odd]
        for block, column, is_wide in tall + wide:
            yield Tile(
                phase=phase,
                expert=segment.expert,
                row_block=segment.first + block,
                column=column,
                wide=is_wide,
                piece=segment.piece,
            )

    def _weight_gradients(self, segment: Segment) -> Iterator[Tile]:
        matrices: list[tuple[Phase, int, int]] = [
            ("wgrad2", self.wgrad.pairs2, self.wgrad.columns2),
            ("wgrad1", self.wgrad.pairs1, self.wgrad.columns1),
        ]
        for phase, pairs, columns in matrices:
            for pair, column in _banded(pairs, columns):
                yield Tile(
                    phase=phase,
                    expert=segment.expert,
                    row_block=2 * pair,
                    column=column,
                    wide=False,
                    piece=segment.piece,
                )


@dataclass(frozen=True, kw_only=True)
class Ring:
    """How rows that exceed the capacity go through a ring of ``blocks`` row blocks.

    Block b takes the place of block b - ``blocks``. ``segment`` bounds the blocks of a segment, ``lag`` counts segments
    from the first phase to the last, and ``window`` counts blocks inside of which a peer's token is brought to all its
    rows at once. Block b may have to wait for the place of the last block of its window; that place is free in time
    since ``lag + 1`` segments and a window, which share a block, fit into the ring.
    """

    blocks: int
    segment: int
    lag: int
    window: int


def ring_of(blocks: int, lag: int, world: int) -> Ring:
    """A ring of ``blocks``, as forward has it; ``lag`` segments are wished for between the first and the last phase."""
    window = 1 if world == 1 else max(1, blocks // 8)
    room = blocks + 1 - window
    lag = min(lag, room - 1)
    return Ring(blocks=blocks, segment=room // (lag + 1), lag=lag, window=window)


MOST_BACKWARD_LAG = 6


def backward_ring(capacity_blocks: int, lag: int, usual_blocks: int, world: int) -> Ring:
    """The ring of backward, where dY and x share the capacity.

    ``lag`` segments are wished for: half from rebuild to FC1, half from there to all other phases. There are fewer
    where an expert of ``usual_blocks`` row blocks would be cut.
    """
    blocks = max(1, capacity_blocks // 2)
    rings = [ring_of(blocks, fewer, world) for fewer in range(min(lag, MOST_BACKWARD_LAG), 0, -1)]
    return next((ring for ring in rings if ring.segment >= usual_blocks), ring_of(blocks, 0, world))


def fc2_lag(expected_rows: float, *, fc1_columns: int, clusters: int, experts: int) -> int:
    """Experts between FC1 and FC2 that keep 1.5 waves of FC1 tiles in between.

    ``expected_rows`` is the mean number of rows per local expert.
    """
    tiles = max(expected_rows / (2 * BLOCK_ROWS), 0.5) * fc1_columns
    return max(1, min(experts, -int(-1.5 * clusters // tiles)))
