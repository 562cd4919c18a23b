"""Slots, stages and reports of the megakernel's warps (kernels/moe/kernel.cuh) as a state machine, over all timings.

Of each cluster the model has the producer (takes tickets, publishes tiles into two slots, loads stages), the counting
warp and one or two consumer warpgroups; the two CTAs of a cluster do the same and are one here. A step is what one of
them does between two looks at shared state. Every order of steps is tried, up to states that were seen before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

SLOTS = 2


@dataclass(frozen=True)
class Tile:
    """``adds``: the counter that it is counted in; ``needs``: a counter and its value; ``loads``: multiplies at all."""

    adds: int | None = None
    needs: tuple[int, int] | None = None
    loads: bool = True


@dataclass(frozen=True)
class Rules:
    """What the warps do; the defaults are the kernel's, but that they assume nothing about timing."""

    depth: int = 5  # stages per tile
    ring: int = 2  # stages in shared memory
    groups: int = 1
    report_unless_loaded: bool = True  # before the first stage of a tile that is not here yet
    report_unless_published: bool = True  # before waiting for a tile
    hold_slot: bool = True  # the counting warp gives a slot back when the tile is counted, not when it is read
    written_barriers: int = 2  # per group, used in turn
    prompt: bool = False  # the counting warp sees a report before anything else happens


class Group(NamedTuple):
    """A consumer warpgroup: ``at`` names its next step, ``stage`` counts what it has consumed of the tile."""

    at: str = "look"
    tile: int = 0
    stage: int = 0
    released: int = 0  # stages of all tiles
    unreported: bool = False
    reports: int = 0


class Cluster(NamedTuple):
    """``taken`` are its tickets; the producer is about to publish ``published`` or to load what it has published."""

    groups: tuple[Group, ...]
    taken: tuple[int, ...] = ()
    published: int = 0
    loading: bool = False
    loaded: int = 0  # stages of all tiles
    seen: int = 0  # tiles that the counting warp has done with
    counted: int = 0


class State(NamedTuple):
    clusters: tuple[Cluster, ...]
    ticket: int
    done: tuple[int, ...]


class Model:
    def __init__(self, tiles: Sequence[Tile], clusters: int, rules: Rules) -> None:
        self.tiles, self.rules = list(tiles), rules
        self.start = State((Cluster((Group(),) * rules.groups),) * clusters, 0, (0,) * len(tiles))

    def tile(self, cluster: Cluster, index: int) -> Tile | None:
        """The cluster's tile of that number; None: stop."""
        ticket = cluster.taken[index]
        return self.tiles[ticket] if ticket < len(self.tiles) else None

    def next(self, state: State) -> Iterator[State]:
        for index, cluster in enumerate(state.clusters):
            steps = list(self.count(cluster))
            if not (steps and self.rules.prompt):
                steps += self.produce(cluster, state)
                steps += [step for g in range(self.rules.groups) for step in self.consume(cluster, g)]
            for changed, ticket, added in steps:
                done = state.done
                if added is not None:
                    done = (*done[:added], done[added] + 1, *done[added + 1 :])
                clusters = (*state.clusters[:index], changed, *state.clusters[index + 1 :])
                yield State(clusters, state.ticket + ticket, done)

    def produce(self, c: Cluster, state: State) -> Iterator[tuple[Cluster, int, int | None]]:
        if not c.taken:
            yield c._replace(taken=(state.ticket,)), 1, None
        elif c.loading:
            tile, rules = self.tile(c, c.published - 1), self.rules
            assert tile is not None
            inputs = tile.needs is None or state.done[tile.needs[0]] >= tile.needs[1]
            stages = sum(self.stages(c, i) for i in range(c.published))
            if c.loaded == stages:
                yield c._replace(loading=False), 0, None
            elif inputs and c.loaded - min(group.released for group in c.groups) < rules.ring:
                yield c._replace(loaded=c.loaded + 1), 0, None
        elif c.published < len(c.taken):
            used = c.published - SLOTS  # the tile whose slot it takes
            if used >= 0 and (self.held(c, used) or any(self.reads(group) <= used for group in c.groups)):
                return
            if self.tile(c, c.published) is None:
                yield c._replace(published=c.published + 1), 0, None
            else:
                more = c._replace(published=c.published + 1, loading=True, taken=(*c.taken, state.ticket))
                yield more, 1, None

    def stages(self, c: Cluster, index: int) -> int:
        tile = self.tile(c, index)
        return self.rules.depth if tile is not None and tile.loads else 0

    @staticmethod
    def reads(group: Group) -> int:
        """Tiles that the group has read, and whose slots it has given back."""
        return group.tile + (group.at not in ("look", "report for a tile", "read"))

    def held(self, c: Cluster, index: int) -> bool:
        return c.seen <= index if self.rules.hold_slot else c.published <= index

    def count(self, c: Cluster) -> Iterator[tuple[Cluster, int, int | None]]:
        if c.seen >= c.published or (tile := self.tile(c, c.seen)) is None:
            return
        if tile.adds is None:
            yield c._replace(seen=c.seen + 1), 0, None
            return
        barriers = self.rules.written_barriers
        which, use = c.counted % barriers, c.counted // barriers
        for group in c.groups:
            phases = (group.reports - which + barriers - 1) // barriers  # completed, of this barrier
            if phases % 2 == use % 2:  # a wait on a parity knows no more than this
                return
        yield c._replace(seen=c.seen + 1, counted=c.counted + 1), 0, tile.adds

    def consume(self, c: Cluster, g: int) -> Iterator[tuple[Cluster, int, int | None]]:
        after = self.step(c, c.groups[g])
        if after is not None:
            yield c._replace(groups=(*c.groups[:g], after, *c.groups[g + 1 :])), 0, None

    def step(self, c: Cluster, group: Group) -> Group | None:
        """The group's next step; None: it waits, or has ended."""
        rules, at = self.rules, group.at
        if at.startswith("report"):
            reported = group._replace(reports=group.reports + group.unreported, unreported=False)
            after = {"report for a tile": "read", "report for a stage": "stage", "report": "multiplied",
                     "report in between": "stage", "report and end": "ended"}[at]  # fmt: skip
            return reported._replace(at=after)
        if at == "look":
            wait = c.published <= group.tile and rules.report_unless_published
            return group._replace(at="report for a tile" if wait else "read")
        if at == "read":
            if c.published <= group.tile:
                return None
            tile = self.tile(c, group.tile)
            if tile is None:
                return group._replace(at="report and end")
            if not tile.loads:
                return group._replace(at="look", tile=group.tile + 1)
            return group._replace(at="look at the stage", stage=0)
        before = sum(self.stages(c, i) for i in range(min(group.tile, len(c.taken))))
        if at == "look at the stage":
            wait = c.loaded <= before and rules.report_unless_loaded
            return group._replace(at="report for a stage" if wait else "stage")
        if at == "stage":
            if group.stage == rules.depth:
                return group._replace(at="report" if rules.depth <= rules.ring else "multiplied")
            if c.loaded <= before + group.stage:
                return None
            # A stage is given back when the next one is multiplied, then comes the report in the middle of a tile.
            middle = group.stage == rules.ring
            consumed = group._replace(stage=group.stage + 1, released=max(group.released, before + group.stage))
            return consumed._replace(at="report in between" if middle else "stage")
        if at == "multiplied":  # and written, as the epilogue waits for nobody
            tile = self.tile(c, group.tile)
            assert tile is not None
            unreported = group.unreported or tile.adds is not None
            last = before + rules.depth
            return group._replace(at="look", tile=group.tile + 1, released=last, unreported=unreported)
        return None

    def deadlocks(self) -> int:
        """How many states have no next one although tiles are left; every state that can be reached is looked at."""
        expected = [sum(tile.adds == counter for tile in self.tiles) for counter in range(len(self.tiles))]
        seen, left, stuck = {self.start}, [self.start], 0
        while left:
            state = left.pop()
            following = list(self.next(state))
            ended = all(group.at == "ended" for cluster in state.clusters for group in cluster.groups)
            if not following and not (ended and list(state.done) == expected):
                stuck += 1
            for other in following:
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return stuck


def _experts(count: int, lag: int, *, wgrads: int = 0) -> list[Tile]:
    """FC1 and FC2 of experts of one tile each, FC2 ``lag`` experts behind; then tiles that are not counted."""
    tiles = []
    for step in range(count + lag):
        if step < count:
            tiles.append(Tile(adds=step))
        if step >= lag:
            tiles.append(Tile(adds=count + step - lag, needs=(step - lag, 1)))
    return tiles + [Tile(loads=False), Tile(needs=(count - 1, 1))][:wgrads]


ORDERS = {
    "one expert": _experts(1, 1),
    "two experts": _experts(2, 1),
    "lag 1": _experts(3, 1),
    "lag 2": _experts(3, 2),
    "idle experts' weight gradients": [*_experts(1, 1), Tile(loads=False), Tile(loads=False), Tile(adds=2)],
    "weight gradients": _experts(2, 1, wgrads=2),
}


KERNEL = Rules()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_one_cluster_never_stops(order: str, groups: int) -> None:
    assert Model(ORDERS[order], 1, replace(KERNEL, groups=groups)).deadlocks() == 0


@pytest.mark.parametrize("order", ["one expert", "two experts", "idle experts' weight gradients"])
def test_two_clusters_never_stop(order: str) -> None:
    assert Model(ORDERS[order], 2, replace(KERNEL, depth=1)).deadlocks() == 0


def test_a_report_before_the_first_stage_is_needed() -> None:
    """FC2 waits for the FC1 tile that the same cluster has just computed."""
    assert Model(ORDERS["one expert"], 1, replace(KERNEL, report_unless_loaded=False)).deadlocks() > 0


def test_a_report_before_the_next_tile_is_needed() -> None:
    """Tiles without a main loop report nothing, and the slot of the last one with a result is not free before."""
    silent = replace(KERNEL, report_unless_published=False)
    assert Model(ORDERS["idle experts' weight gradients"], 1, silent).deadlocks() > 0
    assert Model(ORDERS["lag 1"], 1, silent).deadlocks() == 0, "main loops report"


def test_a_slot_has_to_be_kept_until_its_tile_is_counted() -> None:
    """Else a group gets any number of tiles ahead of the counting warp, which waits for a phase that has gone by."""
    assert Model(_experts(5, 5), 1, replace(KERNEL, hold_slot=False)).deadlocks() > 0


@pytest.mark.parametrize("groups", [1, 2])
def test_one_barrier_would_bear_no_late_counting_warp(groups: int) -> None:
    """It may find two reports where it waits for the first: by its parity, the phase has then not ended."""
    assert Model(ORDERS["lag 1"], 1, Rules(groups=groups, written_barriers=1)).deadlocks() > 0


@pytest.mark.parametrize(("depth", "ring"), [(1, 2), (2, 2), (3, 2), (4, 2), (5, 3)])
def test_one_barrier_would_bear_no_groups_a_whole_tile_apart(depth: int, ring: int) -> None:
    """With ``depth <= 2 * ring`` one group may report twice before the other has reported once."""
    one, order = Rules(depth=depth, ring=ring, groups=2, written_barriers=1, prompt=True), ORDERS["lag 2"]
    assert Model(order, 1, one).deadlocks() > 0
    assert Model(order, 1, replace(one, depth=2 * ring + 1)).deadlocks() == 0
    assert Model(order, 1, replace(one, written_barriers=2, prompt=False)).deadlocks() == 0
