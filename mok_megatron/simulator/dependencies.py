"""The counters that order the kernel's tiles, and a check that no interleaving of workers can block on them."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mok_megatron.tile_order import Tile, TileOrder


class DependencyCounts:
    """Counters of one rank's call, one per row block, as the kernel keeps them in memory.

    An FC1 tile waits for the rows of its blocks; an FC2 tile waits for all FC1 columns of its blocks; a block may be
    combined when all its FC2 columns are done.
    """

    def __init__(self, order: TileOrder) -> None:
        blocks = sum(order.row_blocks)
        self._order = order
        self.arrived = [False] * blocks
        self.fc1_left = [order.columns["fc1"]] * blocks
        self.fc2_left = [order.columns["fc2"]] * blocks

    def blocks(self, tile: Tile) -> tuple[int, ...]:
        """Row blocks that a cluster tile covers."""
        return (tile.row_block,) if tile.wide else (tile.row_block, tile.row_block + 1)

    def columns(self, tile: Tile) -> int:
        """Column tiles of each of its blocks that a cluster tile covers (1, or up to 2 for a wide one)."""
        return min(2, self._order.columns[tile.phase] - tile.column) if tile.wide else 1

    def is_ready(self, tile: Tile) -> bool:
        """Whether the tile may start."""
        blocks = self.blocks(tile)
        if tile.phase == "fc1":
            return all(self.arrived[block] for block in blocks)
        return all(self.fc1_left[block] == 0 for block in blocks)

    def finish(self, tile: Tile) -> None:
        """Count a tile as done."""
        left = self.fc1_left if tile.phase == "fc1" else self.fc2_left
        for block in self.blocks(tile):
            left[block] -= self.columns(tile)


def run_interleaved(order: TileOrder, workers: int, arrival_order: Sequence[int], rng: random.Random) -> int:
    """Advance ``workers`` that take tickets in order, and the arrival of row blocks, one random step at a time.

    A worker holds its ticket until the counters let it run, as a CTA spins. Returns the number of steps. Raises
    RuntimeError if nothing can advance while work is left, which would be a deadlock of the kernel.
    """
    counts = DependencyCounts(order)
    held: list[Tile | None] = [None] * workers
    next_ticket, arriving, steps = 0, 0, 0
    while True:
        can_take = next_ticket < order.num_tickets
        moves = [w for w, tile in enumerate(held) if (tile is None and can_take) or (tile and counts.is_ready(tile))]
        if arriving < len(arrival_order):
            moves.append(workers)
        if not moves:
            break
        steps += 1
        move = rng.choice(moves)
        if move == workers:
            counts.arrived[arrival_order[arriving]] = True
            arriving += 1
            continue
        tile = held[move]
        if tile is None:
            held[move] = order.tile(next_ticket)
            next_ticket += 1
        else:
            counts.finish(tile)
            held[move] = None
    stuck = [tile for tile in held if tile is not None]
    if stuck or next_ticket < order.num_tickets or any(counts.fc2_left):
        raise RuntimeError(
            f"deadlock: {len(stuck)} of {workers} workers wait (first for {stuck[0] if stuck else None}), "
            f"{order.num_tickets - next_ticket} tickets left, {sum(map(bool, counts.fc2_left))} blocks unfinished"
        )
    return steps
