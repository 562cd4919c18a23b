"""Rows that exceed the ring: no interleaving blocks, overwrites rows in use or mixes up partial sums.

The model follows what kernels/sm90/forward.cu and backward.cu wait for and count, and kernels/moe/dispatch.cuh.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.tile_order import (
    Ring,
    Segment,
    Tile,
    TileOrder,
    WeightGradients,
    backward_ring,
    ring_of,
)

WGRAD = WeightGradients(pairs2=1, columns2=2, pairs1=1, columns1=1)
FC1, FC2, REBUILD = 2, 1, 3
ROWS, CLAIM = 4, 2
"""Rows of a block, and rows that a dispatcher takes at a time."""


def forward_order(row_blocks: Sequence[int], ring: Ring) -> TileOrder:
    return TileOrder(row_blocks, fc1_columns=FC1, fc2_columns=FC2, lag=ring.lag, limit=ring.segment)


def backward_order(row_blocks: Sequence[int], ring: Ring, kept_blocks: int = 0) -> TileOrder:
    return TileOrder(
        row_blocks,
        rebuild_columns=REBUILD,
        kept_blocks=kept_blocks,
        fc1_columns=FC1,
        fc1_lag=ring.lag // 2,
        fc2_columns=FC2,
        lag=ring.lag,
        limit=ring.segment,
        wgrad=WGRAD,
        wgrad_lag=ring.lag,
    )


def is_wgrad(tile: Tile) -> bool:
    return tile.phase in ("wgrad1", "wgrad2")


def blocks_of(tile: Tile, segment: Segment) -> range:
    """Row blocks whose rows a tile reads."""
    if is_wgrad(tile):
        return range(segment.first, segment.first + segment.blocks)
    return range(tile.row_block, tile.row_block + (1 if tile.wide else 2))


def late_blocks(order: TileOrder, ring: Ring) -> list[int]:
    """Blocks that may wait for room made by a ticket behind the first one that needs them."""
    backward = order.wgrad.count > 0
    of_piece = {(segment.expert, segment.piece): segment for segment in order.segments}
    needed: dict[int, int] = {}
    released: dict[int, int] = {}
    for ticket, tile in enumerate(order):
        segment = of_piece[tile.expert, tile.piece]
        for block in blocks_of(tile, segment):
            needed.setdefault(block, ticket)
        done = range(segment.first, segment.first + segment.blocks) if backward else blocks_of(tile, segment)
        if tile.phase == "fc2" or (backward and tile.phase != "rebuild"):
            released.update(dict.fromkeys(done, ticket))
    late, total = [], sum(order.row_blocks)
    for block, ticket in needed.items():
        end = min((block // ring.window + 1) * ring.window, total)
        if any(released[other - ring.blocks] >= ticket for other in range(ring.blocks, end)):
            late.append(block)
    return late


SKEWED = [[40], [0, 37, 0], [1] * 30, [1, 0, 25, 1, 1], [13, 2, 13], [2, 1, 3, 1, 2, 5, 1, 1, 4]]
RINGS = [
    ring_of(capacity, lag, world) for capacity in [*range(1, 14), 24, 50] for lag in (1, 2, 3, 9) for world in (1, 2)
]
BACKWARD_RINGS = [
    backward_ring(capacity, lag, usual, world)
    for capacity in [*range(1, 40), 100]
    for lag, usual, world in ((2, 1, 2), (2, 4, 1), (6, 1, 1), (6, 3, 2))
]


def orders(ring: Ring, backward: bool, row_blocks: Sequence[int]) -> Iterator[TileOrder]:
    if backward:
        yield from (backward_order(row_blocks, ring, kept) for kept in (0, 2 * ring.blocks))
    else:
        yield forward_order(row_blocks, ring)


@pytest.mark.parametrize("backward", [False, True])
def test_room_is_made_by_earlier_tickets(backward: bool) -> None:
    rng = random.Random(0)
    random_blocks = [[rng.choice((0, 1, 2, 3, 9)) for _ in range(rng.randrange(1, 9))] for _ in range(40)]
    for ring in BACKWARD_RINGS if backward else RINGS:
        for row_blocks in SKEWED + random_blocks:
            for order in orders(ring, backward, row_blocks):
                assert not late_blocks(order, ring), (ring, row_blocks)


@pytest.mark.parametrize("backward", [False, True])
def test_no_rule_of_the_ring_can_be_loosened(backward: bool) -> None:
    """A wider window, larger segments or one more lag than fit: room may be made too late."""
    for ring in BACKWARD_RINGS if backward else RINGS:
        for name in ("window", "segment", "lag"):
            broken = replace(ring, **{name: getattr(ring, name) + 1})
            if (broken.lag + 1) * broken.segment <= ring.blocks + 1 - broken.window:
                assert name != "segment", "segments are as large as they can be"
                continue
            if broken.window > broken.blocks:
                continue  # a window holds only one block of each place
            count = 2 + (ring.blocks + broken.window) // broken.segment
            full = ([first] + [broken.segment] * count for first in range(broken.segment))
            found = any(late_blocks(order, broken) for blocks in full for order in orders(broken, backward, blocks))
            assert found, (ring, broken)


@dataclass
class Rules:
    """What may be left out to see that it is needed."""

    wait_for_room: bool = True
    wait_for_piece: bool = True
    wait_for_other_expert: bool = True


@dataclass
class Run:
    """One launch of one rank: counters, places of the ring and partial sums; ``go`` picks who advances at random."""

    order: TileOrder
    ring: Ring
    rng: random.Random
    rules: Rules = field(default_factory=Rules)
    frozen: frozenset[int] = frozenset()
    """Experts whose weight gradients nobody wants."""

    def __post_init__(self) -> None:
        self.backward = self.order.wgrad.count > 0
        self.total = sum(self.order.row_blocks)
        self.of_piece = {(segment.expert, segment.piece): segment for segment in self.order.segments}
        self.of_block = {b: s for s in self.order.segments for b in range(s.first, s.first + s.blocks)}
        self.count: Counter[tuple[str, int]] = Counter()
        self.places: dict[int, int] = {}  # place -> block
        self.partials: dict[tuple[str, int, int], tuple[int, int]] = {}  # wgrad tile -> piece whose sum it holds
        tokens = max(1, self.total * ROWS // 3)
        self.token = [self.rng.randrange(tokens) for _ in range(self.total * ROWS)]

    # ---- communication warps ----

    def targets(self, row: int) -> list[int]:
        """Rows that this row's token is brought to; none where an earlier row of the window brings it."""
        window = self.ring.window * ROWS
        first = row // window * window
        rows = [r for r in range(first, min(first + window, len(self.token))) if self.token[r] == self.token[row]]
        return rows if rows[0] == row else []

    def segment_done(self, segment: Segment) -> bool:
        tiles = segment.blocks * (FC1 + FC2) + 2 * self.order.wgrad.count
        return self.count["segment", segment.first] == tiles

    def has_room(self, block: int) -> bool:
        before = block - self.ring.blocks
        if before < 0 or not self.rules.wait_for_room:
            return True
        return self.segment_done(self.of_block[before]) if self.backward else self.count["fc2", before] == FC2

    def dispatcher(self, claims: Iterator[int]) -> Iterator[bool]:
        """Yields whether it can go on."""
        for first in claims:
            brought = []
            for row in range(first, first + CLAIM):
                for target in (targets := self.targets(row)):
                    while not self.has_room(target // ROWS):
                        yield False
                yield True
                for target in targets:
                    block = target // ROWS
                    self.places[block % self.ring.blocks] = block
                    yield True
                brought += targets
            for target in brought:
                self.count["rows", target // ROWS] += 1
            yield True

    # ---- tiles ----

    def ready(self, tile: Tile) -> bool:
        segment, columns = self.of_piece[tile.expert, tile.piece], self.order.columns
        if is_wgrad(tile):
            return self.wgrad_ready(tile, segment)
        for block in blocks_of(tile, segment):
            if tile.phase != "fc2" and self.count["rows", block] < ROWS:
                return False
            rebuilt = tile.phase == "fc1" and self.order.rebuilt(segment)
            if rebuilt and self.count["rebuild", block] < columns["rebuild"]:
                return False
            if tile.phase == "fc2" and self.count["fc1", block] < columns["fc1"]:
                return False
        return True

    def wgrad_ready(self, tile: Tile, segment: Segment) -> bool:
        if not self.loads(tile):
            return True
        if self.count["segment fc1", segment.first] < segment.blocks * FC1:
            return False
        return all(self.segment_done(before) for before in self.sums_before(segment))

    def sums_before(self, segment: Segment) -> list[Segment]:
        """Segments that must be done with the place of a partial sum: the last one that had it."""
        if segment.piece > 0:
            return [self.of_piece[segment.expert, segment.piece - 1]] if self.rules.wait_for_piece else []
        if segment.last or not self.rules.wait_for_other_expert:
            return []
        cut = [s for s in self.order.segments if s.expert < segment.expert and s.piece > 0 and s.last]
        return [s for s in cut if s.expert not in self.frozen][-1:]

    def loads(self, tile: Tile) -> bool:
        return not is_wgrad(tile) or (self.order.row_blocks[tile.expert] > 0 and tile.expert not in self.frozen)

    def check_places(self, tile: Tile) -> None:
        if self.loads(tile):
            for block in blocks_of(tile, self.of_piece[tile.expert, tile.piece]):
                assert self.places.get(block % self.ring.blocks) == block, f"{tile}: block {block} is overwritten"

    def worker(self, tickets: Iterator[Tile]) -> Iterator[bool]:
        """Yields whether it can go on."""
        for tile in tickets:
            yield True
            while not self.ready(tile):
                yield False
            yield True
            self.check_places(tile)
            self.load_partial(tile)
            yield True
            self.check_places(tile)
            self.store_partial(tile)
            yield True
            self.add(tile)

    def load_partial(self, tile: Tile) -> None:
        if is_wgrad(tile) and self.loads(tile) and tile.piece > 0:
            key = (tile.phase, tile.row_block, tile.column)
            assert self.partials.get(key) == (tile.expert, tile.piece - 1), f"{tile}: partial sum {self.partials}"

    def store_partial(self, tile: Tile) -> None:
        if is_wgrad(tile) and self.loads(tile) and not self.of_piece[tile.expert, tile.piece].last:
            self.partials[tile.phase, tile.row_block, tile.column] = (tile.expert, tile.piece)

    def add(self, tile: Tile) -> None:
        first = self.of_piece[tile.expert, tile.piece].first
        if is_wgrad(tile):
            self.count["segment", first] += 2 * (self.order.row_blocks[tile.expert] > 0)
            return
        for block, column in map(tile.of_cta, (0, 1)):
            if column == self.order.columns[tile.phase]:
                continue
            self.count[tile.phase, block] += 1
            self.count["segment fc1", first] += tile.phase == "fc1"
            self.count["segment", first] += tile.phase != "rebuild"

    def go(self, workers: int, dispatchers: int) -> None:
        """Everybody has a speed of its own, so that some stay far behind."""
        claims, tickets = iter(range(0, self.total * ROWS, CLAIM)), iter(self.order)
        actors = [self.dispatcher(claims) for _ in range(dispatchers)] + [self.worker(tickets) for _ in range(workers)]
        running = {actor: self.rng.choice((0.01, 0.3, 1.0)) for actor in actors}
        waited = 0  # looks in a row at which nobody could go on
        while running:
            if waited > 40 * len(running):
                waited = sum(not next(actor, True) for actor in list(running))
                assert waited < len(running), "deadlock"
                waited = 0
            actor = self.rng.choices(list(running), list(running.values()))[0]
            try:
                waited = 0 if next(actor) else waited + 1
            except StopIteration:
                del running[actor]
        assert all(self.count["fc2", block] == FC2 for block in range(self.total))


def start(backward: bool, capacity: int, row_blocks: Sequence[int], seed: int, **rules: bool) -> None:
    rng = random.Random(seed)
    world = rng.choice((1, 2))
    ring = ring_of(capacity, rng.choice((1, 2, 5)), world)
    if backward:
        ring = backward_ring(capacity, rng.choice((2, 4, 6)), rng.choice((1, 3, 6)), world)
    order = backward_order(row_blocks, ring, rng.choice((0, capacity))) if backward else forward_order(row_blocks, ring)
    frozen = frozenset(expert for expert in range(len(row_blocks)) if rng.random() < 0.2)
    Run(order, ring, rng, Rules(**rules), frozen).go(rng.choice((1, 2, 3, 6)), rng.choice((1, 2, 5)))


row_blocks_in_use = st.one_of(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.builds(lambda before, blocks, after: [0] * before + [blocks] + [0] * after, *[st.integers(0, 2)] * 3),
    st.permutations([1, 0, 12, 2, 1]).map(list),
)


@settings(deadline=None, max_examples=200)
@given(st.booleans(), st.integers(1, 24), row_blocks_in_use, st.integers(0, 2**32))
def test_any_interleaving_is_right(backward: bool, capacity: int, row_blocks: list[int], seed: int) -> None:
    start(backward, capacity, row_blocks, seed)


@pytest.mark.parametrize(
    ("rule", "error"),
    [("wait_for_room", "overwritten"), ("wait_for_piece", "partial sum"), ("wait_for_other_expert", "partial sum")],
)
def test_every_wait_is_needed(rule: str, error: str) -> None:
    cases = itertools.product(range(300), [(6, [1, 2, 1, 2, 1, 2]), (6, [4, 1, 5]), (24, [6, 1, 6])])
    with pytest.raises(AssertionError, match=error):
        for seed, (capacity, row_blocks) in cases:
            start(True, capacity, row_blocks, seed, **{rule: False})
