"""The tile order: Python model against the C++ that the kernels use, completeness, and freedom from deadlock."""

from __future__ import annotations

import itertools
import random
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.tile_order import (
    NO_WEIGHT_GRADIENTS,
    Phase,
    Segment,
    Tile,
    TileOrder,
    WeightGradients,
    backward_ring,
    cut_into_segments,
    fc2_lag,
    ring_of,
)

SOURCE = Path(__file__).parent / "native" / "tile_order.cpp"
PHASES: dict[int, Phase] = {0: "fc1", 1: "fc2", 3: "wgrad2", 4: "wgrad1", 5: "rebuild"}
STOP = 2


class Native:
    """The C++ side: requests as lines of integers, answers as lines of integers."""

    def __init__(self, binary: Path) -> None:
        self.binary = binary

    def __call__(self, requests: Iterable[Sequence[int]]) -> list[list[list[int]]]:
        lines = "".join(" ".join(map(str, request)) + "\n" for request in requests)
        output = subprocess.run([str(self.binary)], input=lines, capture_output=True, text=True, check=True, timeout=60)
        answers = output.stdout.split("\n\n")[:-1]
        return [[[int(word) for word in line.split()] for line in answer.splitlines()] for answer in answers]


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    binary = tmp_path_factory.mktemp("native") / "tile_order"
    flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    subprocess.run(["g++", *flags, "-o", str(binary), str(SOURCE)], check=True, timeout=120)
    return Native(binary)


SMALL = list(itertools.product(range(5), repeat=3))
LARGE = [[0] * 7, [1] * 16, [17, 0, 16, 1], [513], [0, 0, 40, 3, 0], [2, 19, 33], [1, 0] * 64]
WGRADS = [
    WeightGradients(pairs2=2, columns2=3, pairs1=1, columns1=2),
    WeightGradients(pairs2=9, columns2=1, pairs1=0, columns1=4),
    WeightGradients(pairs2=0, columns2=2, pairs1=17, columns1=3),
]

FORWARD: list[dict[str, Any]] = [
    {"fc1_columns": fc1, "fc2_columns": fc2, "lag": lag, "limit": limit}
    for (fc1, fc2), lag, limit in itertools.product([(1, 1), (2, 3), (3, 2)], [0, 1, 2, 5], [None, 1, 2, 3])
]
FLAT_BACKWARD: list[dict[str, Any]] = [
    {"fc1_columns": 2, "fc2_columns": fc2, "lag": lag, "wgrad": wgrad}
    for fc2, lag, wgrad in itertools.product([0, 3], [1, 4], [*WGRADS, NO_WEIGHT_GRADIENTS])
]
REPLAYING: list[dict[str, Any]] = [
    {
        "rebuild_columns": 3,
        "kept_blocks": kept,
        "fc1_columns": 2,
        "fc1_lag": lag // 2,
        "fc2_columns": fc2,
        "lag": lag,
        "limit": limit,
        "wgrad": wgrad,
        "wgrad_lag": lag,
    }
    for kept, fc2, lag, limit, wgrad in itertools.product(
        [0, 3, 7], [0, 3], [0, 1, 2], [1, 2, 3], [WGRADS[0], NO_WEIGHT_GRADIENTS]
    )
]


def request(row_blocks: Sequence[int], stride: int, **plan: Any) -> list[int]:
    """A line for the native program: tiles of every ``stride``-th ticket of ``TileOrder(row_blocks, **plan)``."""
    wgrad, wgrad_lag, limit = plan.get("wgrad", NO_WEIGHT_GRADIENTS), plan.get("wgrad_lag"), plan.get("limit")
    names = ("rebuild_columns", "kept_blocks", "fc1_columns", "fc1_lag", "fc2_columns", "lag")
    sizes = (wgrad.pairs2, wgrad.columns2, wgrad.pairs1, wgrad.columns1)
    middle = [plan.get(name, 0) for name in names]
    return [0, _or_minus(limit), *middle, *sizes, _or_minus(wgrad_lag), stride, *row_blocks]


def _or_minus(value: int | None) -> int:
    return -1 if value is None else value


def to_tiles(lines: Sequence[Sequence[int]]) -> list[Tile]:
    *rows, stop = lines
    assert stop[0] == STOP, "past the last ticket comes the stop tile"
    return [
        Tile(phase=PHASES[phase], expert=expert, row_block=block, column=column, wide=bool(wide), piece=piece)
        for phase, expert, block, column, wide, piece in rows
    ]


def assert_equal(native: Native, cases: Iterable[tuple[Sequence[int], dict[str, Any], int]]) -> None:
    cases = list(cases)
    answers = native(request(row_blocks, stride, **plan) for row_blocks, plan, stride in cases)
    for (row_blocks, plan, stride), answer in zip(cases, answers, strict=True):
        assert to_tiles(answer) == list(TileOrder(row_blocks, **plan))[::stride], (row_blocks, plan, stride)


@pytest.mark.parametrize("plans", [FORWARD, FLAT_BACKWARD, REPLAYING], ids=["forward", "flat", "replaying"])
def test_native_order_is_the_model(native: Native, plans: list[dict[str, Any]]) -> None:
    assert {*PHASES.values()} == {*get_args(Phase)}
    assert_equal(native, ((row_blocks, plan, 1) for row_blocks in SMALL for plan in plans))
    large = [{**plan, "limit": limit} for plan in plans[::5] for limit in (None, 7, 16)]
    assert_equal(native, ((row_blocks, plan, 1) for row_blocks in LARGE for plan in large))


@pytest.mark.parametrize("stride", [2, 3, 7, 50, 10**6])
def test_a_cluster_that_gets_few_of_the_tickets_sees_the_same_order(native: Native, stride: int) -> None:
    plans = [*FORWARD[::3], *FLAT_BACKWARD[::2], *REPLAYING[::7]]
    assert_equal(native, ((row_blocks, plan, stride) for row_blocks in SMALL[::3] + LARGE[:3] for plan in plans))


def test_native_segments_are_the_models(native: Native) -> None:
    cases = [(blocks, limit) for blocks in SMALL + LARGE for limit in (None, 1, 2, 3, 5, 8)]
    answers = native([1, _or_minus(limit), *blocks] for blocks, limit in cases)
    for (blocks, limit), answer in zip(cases, answers, strict=True):
        segments = cut_into_segments(blocks, limit)
        holding = [segment for segment in segments for _ in range(segment.blocks)]
        found = [
            Segment(expert=expert, piece=piece, first=first, blocks=count, last=bool(last))
            for expert, piece, first, count, last in answer
        ]
        assert found == segments + holding, (blocks, limit)


def test_native_rings_are_the_models(native: Native) -> None:
    capacities = [*range(1, 70), 500, 4096]
    forward = list(itertools.product(capacities, range(12), (1, 2)))
    rings, answers = [ring_of(*case) for case in forward], native([2, *case] for case in forward)
    backward = list(itertools.product(capacities, range(8), (1, 2, 5, 17, 500), (1, 2)))
    rings += [backward_ring(*case) for case in backward]
    answers += native([3, *case] for case in backward)
    assert answers == [[[ring.blocks, ring.segment, ring.lag, ring.window]] for ring in rings]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.one_of(st.none(), st.integers(1, 12)))
@settings(deadline=None, max_examples=300)
def test_segments_cover_the_experts_in_order(row_blocks: list[int], limit: int | None) -> None:
    segments = cut_into_segments(row_blocks, limit)
    first = 0
    for expert, blocks in enumerate(row_blocks):
        pieces = [segment for segment in segments if segment.expert == expert]
        assert [piece.piece for piece in pieces] == list(range(len(pieces)))
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        for piece in pieces:
            assert piece.first == first
            assert piece.blocks > 0 or blocks == 0
            assert limit is None or piece.blocks <= limit
            first += piece.blocks
    assert first == sum(row_blocks)
    assert segments == sorted(segments, key=lambda segment: (segment.expert, segment.piece))


@st.composite
def orders(draw: st.DrawFn) -> TileOrder:
    row_blocks = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    return TileOrder(row_blocks, **draw(st.sampled_from(FORWARD + FLAT_BACKWARD + REPLAYING)))


@given(orders())
@settings(deadline=None, max_examples=300)
def test_every_tile_once_and_only_earlier_inputs(order: TileOrder) -> None:
    seen: set[tuple[Any, ...]] = set()
    done: dict[str, list[int]] = {phase: [0] * sum(order.row_blocks) for phase in order.columns}
    for tile in order:
        segment = next(s for s in order.segments if (s.expert, s.piece) == (tile.expert, tile.piece))
        inside = range(segment.first, segment.first + segment.blocks)
        if tile.phase in ("wgrad1", "wgrad2"):
            key = (tile.phase, segment, tile.row_block, tile.column)
            assert key not in seen
            seen.add(key)
            assert all(done["fc1"][block] == order.columns["fc1"] for block in inside)
            earlier = [s for s in order.segments if s.expert == tile.expert and s.piece < tile.piece]
            assert all((tile.phase, s, tile.row_block, tile.column) in seen for s in earlier)
            continue
        for rank in (0, 1):
            block, column = tile.of_cta(rank)
            if column == order.columns[tile.phase]:
                assert tile.wide and rank == 1
                continue
            assert (tile.phase, block, column) not in seen
            seen.add((tile.phase, block, column))
            assert block in inside
            done[tile.phase][block] += 1
            if tile.phase == "fc1" and order.rebuilt(segment):
                assert done["rebuild"][block] == order.columns["rebuild"]
            assert tile.phase != "fc2" or done["fc1"][block] == order.columns["fc1"]
    rebuilt = sum(segment.blocks for segment in order.segments if order.rebuilt(segment))
    rows = sum(order.row_blocks) * (order.columns["fc1"] + order.columns["fc2"]) + rebuilt * order.columns["rebuild"]
    assert len(seen) == rows + len(order.segments) * order.wgrad.count


@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("seed", range(5))
def test_any_interleaving_finishes(workers: int, seed: int) -> None:
    """Workers take tickets in order, each waits for its tile's inputs; whoever can run is picked at random."""
    rng = random.Random(seed)
    row_blocks = [rng.randrange(5) for _ in range(6)]
    order = TileOrder(row_blocks, fc1_columns=3, fc2_columns=2, lag=rng.randrange(1, 4))
    done = dict.fromkeys(range(sum(row_blocks)), 0)
    held: list[Tile | None] = [None] * workers
    next_ticket = 0

    def ready(tile: Tile) -> bool:
        blocks = {tile.of_cta(0)[0], tile.of_cta(1)[0]}
        return tile.phase == "fc1" or all(done[block] == 3 for block in blocks)

    while next_ticket < order.num_tickets or any(held):
        can_take = [w for w in range(workers) if held[w] is None and next_ticket < order.num_tickets]
        can_finish = [w for w in range(workers) if (tile := held[w]) is not None and ready(tile)]
        assert can_take or can_finish, "deadlock"
        worker = rng.choice(can_take + can_finish)
        tile = held[worker]
        if tile is None:
            held[worker] = order.tile(next_ticket)
            next_ticket += 1
            continue
        if tile.phase == "fc1":
            for rank in (0, 1):
                block, column = tile.of_cta(rank)
                done[block] += column < 3
        held[worker] = None


def test_lag_keeps_waves_apart() -> None:
    assert fc2_lag(2048, fc1_columns=16, clusters=66, experts=32) == 1
    assert fc2_lag(512, fc1_columns=6, clusters=66, experts=128) == 9
    assert fc2_lag(0, fc1_columns=1, clusters=66, experts=4) == 4
