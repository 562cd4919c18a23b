"""The tile order: Python model against the C++ that the kernels use, completeness, and freedom from deadlock."""

from __future__ import annotations

import itertools
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.tile_order import BAND_PAIRS, Tile, TileOrder, fc2_lag

NATIVE = Path(__file__).parent / "native"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compiled("tile_order", tmp_path_factory)


@pytest.fixture(scope="session")
def wgrad_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compiled("wgrad_order", tmp_path_factory)


def _compiled(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    binary = tmp_path_factory.mktemp("native") / name
    source = str(NATIVE / f"{name}.cpp")
    subprocess.run(["g++", "-std=c++17", "-O1", "-Wall", "-Werror", "-o", str(binary), source], check=True, timeout=120)
    return binary


def native_tiles(program: Path, row_blocks: Sequence[int], fc1: int, fc2: int, lag: int) -> tuple[int, list[Tile]]:
    arguments = [str(value) for value in (fc1, fc2, lag, *row_blocks)]
    lines = subprocess.run([str(program), *arguments], capture_output=True, text=True, check=True, timeout=60).stdout
    first, *rest = lines.splitlines()
    *rows, stop = [[int(word) for word in line.split()] for line in rest]
    assert stop[0] == 2, "past the last ticket comes the stop tile"
    phases = ("fc1", "fc2")
    return int(first), [
        Tile(phase=phases[phase], expert=expert, row_block=block, column=column, wide=bool(wide))
        for phase, expert, block, column, wide in rows
    ]


SMALL = list(itertools.product(range(4), repeat=3))
LARGE = [[0] * 7, [1] * 16, [17, 0, 16, 1], [513], [0, 0, 40, 3, 0], [2, 19, 33], [1, 0] * 64]


@pytest.mark.parametrize("columns", [(1, 1), (2, 3), (3, 2), (16, 28)])
@pytest.mark.parametrize("lag", [1, 2, 5])
def test_native_order_is_the_model(program: Path, columns: tuple[int, int], lag: int) -> None:
    fc1, fc2 = columns
    for row_blocks in [*SMALL[:: 1 if columns == (2, 3) else 7], *LARGE]:
        order = TileOrder(row_blocks, fc1_columns=fc1, fc2_columns=fc2, lag=lag)
        count, tiles = native_tiles(program, row_blocks, fc1, fc2, lag)
        assert count == order.num_tickets
        assert tiles == list(order)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 9), st.integers(1, 14))
@settings(deadline=None, max_examples=150)
def test_every_tile_once_and_only_earlier_inputs(row_blocks: list[int], fc1: int, fc2: int, lag: int) -> None:
    order = TileOrder(row_blocks, fc1_columns=fc1, fc2_columns=fc2, lag=lag)
    columns = {"fc1": fc1, "fc2": fc2}
    seen: set[tuple[str, int, int]] = set()
    fc1_done = dict.fromkeys(range(sum(row_blocks)), 0)
    for tile in order:
        for rank in (0, 1):
            block, column = tile.of_cta(rank)
            if column == columns[tile.phase]:
                assert tile.wide and rank == 1
                continue
            assert (tile.phase, block, column) not in seen
            seen.add((tile.phase, block, column))
            assert order.first_block[tile.expert] <= block < order.first_block[tile.expert + 1]
            if tile.phase == "fc1":
                fc1_done[block] += 1
            else:
                assert fc1_done[block] == fc1, "an FC2 tile came before an FC1 tile that it needs"
    assert len(seen) == sum(row_blocks) * (fc1 + fc2)


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


def _banded(pairs: int, columns: int) -> list[tuple[int, int]]:
    """(pair, column) in bands of BAND_PAIRS, column by column inside a band."""
    return [
        (pair, column)
        for first in range(0, pairs, BAND_PAIRS)
        for column in range(columns)
        for pair in range(first, min(first + BAND_PAIRS, pairs))
    ]


@pytest.mark.parametrize(
    ("experts", "w2", "w1"),
    [
        (3, (2, 3), (1, 2)),
        (2, (28, 8), (16, 28)),
        (5, (9, 1), (0, 4)),
        (4, (0, 2), (17, 3)),
        (2, (0, 1), (0, 1)),
        (1, (1, 1), (1, 1)),
    ],
)
def test_weight_gradients_come_once_by_expert_and_matrix(
    wgrad_program: Path, experts: int, w2: tuple[int, int], w1: tuple[int, int]
) -> None:
    """Pairs 0: a matrix that nobody wants. dW2 of an expert comes before its dW1, all of an expert before the next."""
    arguments = [str(value) for value in (experts, *w2, *w1)]
    lines = subprocess.run([str(wgrad_program), *arguments], capture_output=True, text=True, check=True, timeout=60)
    *tiles, stop = [[int(word) for word in line.split()] for line in lines.stdout.splitlines()]
    stop_phase, phase_w2, phase_w1 = 2, 3, 4
    assert stop[0] == stop_phase
    assert tiles == [
        [phase, expert, 2 * pair, column, 0]
        for expert in range(experts)
        for phase, matrix in ((phase_w2, w2), (phase_w1, w1))
        for pair, column in _banded(*matrix)
    ]
