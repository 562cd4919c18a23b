"""The warps of the megakernel never stop, and none of their rules is idle. The model: tests/tile_protocol.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from tests.tile_protocol import Model, Rules, Tile

IDLE = Tile(counted=0, loads=False)


def _experts(
    count: int, lag: int, *, wide: bool = False, backward: bool = True, rebuild: bool = False, wgrads: int = 0
) -> list[Tile]:
    """Experts of one tile each, a phase ``lag`` experts behind the one that it needs; then tiles that are not counted.

    ``wide``: the second CTA's columns lie past the last one.
    """
    phases, tickets, tiles = ["rebuild", "fc1", "fc2"][not rebuild :], dict[tuple[str, int], int](), list[Tile]()
    for step in range(count + lag * (len(phases) - 1)):
        for place, phase in enumerate(phases):
            expert = step - lag * place
            if 0 <= expert < count:
                tickets[phase, expert] = len(tiles)
                needs = (tickets[phases[place - 1], expert],) if place else ()
                inputs = backward and phase == "fc1"
                tiles.append(Tile(needs, own=not wide, counted=1 if wide else 2, inputs=inputs))
    return tiles + [IDLE, Tile((tickets["fc1", count - 1],), counted=0)][:wgrads]


ORDERS: dict[str, Callable[..., list[Tile]]] = {
    "one expert": partial(_experts, 1, 0),
    "two experts": partial(_experts, 2, 0),
    "lag 1": partial(_experts, 3, 1),
    "forward": partial(_experts, 2, 1, backward=False),
    "rebuilt": partial(_experts, 2, 0, rebuild=True),
    "idle experts' weight gradients": lambda wide=False: [*_experts(1, 0, wide=wide), IDLE, IDLE, Tile(inputs=True)],
    "weight gradients": partial(_experts, 2, 1, wgrads=2),
}
TILES = pytest.mark.parametrize("wide", [False, True], ids=["tall", "wide"])

KERNEL = Rules()
ONE_CTA = Rules(ctas=1)


@TILES
@pytest.mark.parametrize("order", ORDERS)
def test_one_cluster_never_stops(order: str, wide: bool) -> None:
    assert not Model(ORDERS[order](wide=wide), 1, KERNEL).stops()


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("order", ORDERS)
def test_two_groups_never_stop(order: str, depth: int) -> None:
    assert not Model(ORDERS[order](), 1, replace(ONE_CTA, groups=2, depth=depth)).stops()


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
@TILES
def test_tiles_of_any_depth_never_stop(wide: bool, depth: int) -> None:
    assert not Model(ORDERS["two experts"](wide=wide), 1, replace(KERNEL, depth=depth)).stops()


def test_two_groups_of_both_ctas_never_stop() -> None:
    assert not Model(ORDERS["one expert"](wide=True), 1, replace(KERNEL, groups=2, depth=3)).stops()


@pytest.mark.parametrize("order", ["one expert", "two experts", "rebuilt", "idle experts' weight gradients"])
def test_two_clusters_never_stop(order: str) -> None:
    assert not Model(ORDERS[order](), 2, replace(ONE_CTA, depth=1)).stops()


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_a_slow_warp_misses_no_phase(depth: int) -> None:
    assert not Model(ORDERS["one expert"](wide=True), 1, replace(KERNEL, depth=depth, warps=2)).stops()


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_stages_that_are_not_read_have_to_be_seen_by_all_warps(depth: int) -> None:
    """Else the next tile fills a stage that a slow warp still waits for, and by parity two phases look like none."""
    apart = replace(KERNEL, depth=depth, warps=2, skip_together=False)
    assert Model(ORDERS["one expert"](wide=True), 1, apart).stops()
    assert not Model(ORDERS["one expert"](wide=True), 1, replace(apart, warps=1)).stops()


def test_stages_of_an_epilogue_have_to_fit_into_the_ring() -> None:
    assert Model(ORDERS["one expert"](wide=True), 1, replace(KERNEL, inputs=KERNEL.ring + 1)).stops()


@TILES
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_a_report_before_the_first_stage_is_needed(depth: int, wide: bool) -> None:
    """FC2 waits for the FC1 tile that the same cluster has just computed."""
    silent = replace(KERNEL, depth=depth, report_unless_loaded=False)
    assert Model(ORDERS["one expert"](wide=wide), 1, silent).stops()


@TILES
def test_a_tile_without_a_product_or_the_wait_for_the_next_one_has_to_report(wide: bool) -> None:
    """Main loops report; where there is none, the slot of the last tile with a result would not become free."""
    silent = replace(KERNEL, report_unless_published=False, report_when_idle=False)
    order = ORDERS["idle experts' weight gradients"](wide=wide)
    assert Model(order, 1, silent).stops()
    assert not Model(order, 1, replace(silent, report_unless_published=True)).stops()
    assert not Model(order, 1, replace(silent, report_when_idle=True)).stops()
    assert not Model(ORDERS["two experts"](wide=wide), 1, silent).stops(), "main loops report"


def test_a_slot_is_armed_when_its_last_tile_has_landed() -> None:
    """CTA 0's producer publishes a slot and does not read it; what tells it is that all others have."""
    late = replace(KERNEL, depth=1, late_tiles=True)
    idle = ORDERS["idle experts' weight gradients"]()
    assert not Model(idle, 1, late).stops()
    assert not Model(ORDERS["two experts"](), 1, late).stops()
    with pytest.raises(AssertionError, match="armed twice in a phase"):
        Model(idle, 1, replace(late, arm_first=True)).stops()


def test_a_slot_has_to_be_kept_until_its_tile_is_counted() -> None:
    """Else a group gets any number of tiles ahead of the counting warp, which waits for a phase that has gone by."""
    assert Model(_experts(5, 5), 1, replace(ONE_CTA, hold_slot=False)).stops()


@pytest.mark.parametrize("groups", [1, 2])
def test_one_barrier_would_bear_no_late_counting_warp(groups: int) -> None:
    """It may find two reports where it waits for the first: by its parity, the phase has then not ended."""
    assert Model(ORDERS["lag 1"](), 1, replace(ONE_CTA, groups=groups, written_barriers=1)).stops()
    assert Model(ORDERS["lag 1"](wide=True), 1, replace(KERNEL, written_barriers=1)).stops()


@pytest.mark.parametrize(("depth", "ring"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 3)])
def test_one_barrier_would_bear_no_groups_a_whole_tile_apart(depth: int, ring: int) -> None:
    """With ``depth <= 2 * ring`` one group may report twice before the other has reported once."""
    one = replace(ONE_CTA, depth=depth, ring=ring, inputs=ring, groups=2, written_barriers=1, prompt=True)
    order = _experts(3, 2)
    assert Model(order, 1, one).stops()
    assert not Model(order, 1, replace(one, depth=2 * ring + 1)).stops()
    assert not Model(order, 1, replace(one, written_barriers=2, prompt=False)).stops()
