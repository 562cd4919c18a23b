"""Slots, stages and reports of the megakernel's warps (kernels/moe/kernel.cuh) as a state machine, over all timings.

Of each cluster the model has both CTAs' producers (the first one takes tickets and publishes tiles into two slots),
counting warps and consumers, and the barriers between them, which are waited for by parity. A step is what a warp does
from one wait to the next; of a consumer, every arrival is a step. Every order of steps is tried, up to states that were
seen before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, NamedTuple

SLOTS = 2
ARRIVAL = 4
"""What an arrival adds to a barrier; one that expects loads adds 1 less for each, which comes with the load."""


@dataclass(frozen=True)
class Tile:
    """A tile of the cluster; ``needs``: tickets of tiles that are counted before it can be loaded."""

    needs: tuple[int, ...] = ()
    own: bool = False  # needs its own CTA's parts of them only: in a tall tile, each has a row block
    counted: int = 2  # CTAs whose part is; the second one's may lie past the last column
    loads: bool = True  # multiplies at all
    inputs: bool = False  # its epilogue reads stages, too, behind those of the product


@dataclass(frozen=True)
class Rules:
    """What the warps do; the defaults are the kernel's, but that they assume nothing about timing."""

    depth: int = 5  # stages of a product
    ring: int = 2  # stages in shared memory
    inputs: int = 2  # stages of an epilogue
    ctas: int = 2  # 1: both do the same
    groups: int = 1
    warps: int = 1  # per group; the first one reports and gives stages back
    report_unless_loaded: bool = True  # before the first stage of a tile that is not here yet
    report_unless_published: bool = True  # before waiting for a tile
    report_when_idle: bool = True  # in a tile without a product
    hold_slot: bool = True  # the counting warp gives a slot back when the tile is counted, not when it is read
    written_barriers: int = 2  # per group, used in turn
    skip_together: bool = True  # stages that a group does not read are given back when all its warps have seen all
    arm_first: bool = False  # CTA 0 arms the barrier of a slot before it waits for the slot
    late_tiles: bool = False  # what is published lands at any time; else at once
    prompt: bool = False  # the counting warps see a report before anything else happens


class Op(NamedTuple):
    """``value``: earlier uses of the barrier (wait, report), what it gets (add), or parts of tiles (need, count).

    A report is made once; a wait that cannot pass makes its ``report`` first.
    """

    does: Literal["wait", "need", "add", "report", "count", "take"]
    barrier: int = -1
    value: int = 0
    report: Op | None = None


class Cluster(NamedTuple):
    taken: tuple[int, ...]  # tickets
    at: tuple[int, ...]  # each warp's next op
    sums: tuple[int, ...]  # what each barrier has got


class State(NamedTuple):
    clusters: tuple[Cluster, ...]
    ticket: int
    counted: int  # parts of tiles, as bits


class Barriers:
    """Those of a cluster, by name, CTA and number. A phase ends when its barrier has got another period."""

    def __init__(self, rules: Rules) -> None:
        self.index: dict[tuple[str | int, ...], int] = {}
        self.periods: list[int] = []
        for cta in range(rules.ctas):
            for slot in range(rules.ring):
                self._add("full", cta, slot, arrivals=1)
                self._add("empty", cta, slot, arrivals=rules.ctas * rules.groups)
            for group in range(rules.groups):
                self._add("met", cta, group, arrivals=rules.warps)
                for turn in range(rules.written_barriers):
                    self._add("written", cta, group, turn, arrivals=1)
            for slot in range(SLOTS):
                self._add("tile full", cta, slot, arrivals=1)
                self._add("tile sent", cta, slot, arrivals=1)
        for slot in range(SLOTS):
            readers = rules.ctas * (rules.groups * rules.warps + 1) + rules.ctas - 1
            self._add("tile empty", slot, arrivals=readers)

    def _add(self, *name: str | int, arrivals: int) -> None:
        self.index[name] = len(self.periods)
        self.periods.append(ARRIVAL * arrivals)

    def wait(self, *name: str | int, use: int, report: Op | None = None) -> Op:
        return Op("wait", self.index[name], use, report)

    def report(self, *name: str | int, use: int) -> Op:
        return Op("report", self.index[name], use)

    def arrive(self, *name: str | int, loads: int = 0) -> Op:
        return Op("add", self.index[name], ARRIVAL - loads)

    def load(self, *name: str | int) -> Op:
        return Op("add", self.index[name], 1)


class Consumer:
    """A warp of a warpgroup."""

    def __init__(self, on: Barriers, rules: Rules, cta: int, group: int, warp: int) -> None:
        self.on, self.rules, self.cta, self.group, self.warp = on, rules, cta, group, warp
        self.stage = self.meetings = self.written = 0
        self.report: list[Op] = []  # of the last tile

    def wait(self, report: Op | None = None) -> Op:
        use, slot = divmod(self.stage, self.rules.ring)
        self.stage += 1
        return self.on.wait("full", self.cta, slot, use=use, report=report)

    def release(self, stage: int) -> Iterator[Op]:
        """Either CTA's loads may write into the other one's stage."""
        if self.warp == 0:
            yield from (self.on.arrive("empty", cta, stage % self.rules.ring) for cta in range(self.rules.ctas))

    def meet(self) -> Iterator[Op]:
        """At a named barrier, or in a product, which the group's warps multiply as one."""
        if self.rules.warps > 1:
            yield self.on.arrive("met", self.cta, self.group)
            yield self.on.wait("met", self.cta, self.group, use=self.meetings)
            self.meetings += 1

    def first(self, reports: bool) -> Op | None:
        """The report that comes before a wait."""
        return self.report[0] if self.report and reports else None

    def use(self, stages: int, report: Op | None = None) -> Iterator[Op]:
        """A stage is given back when the next one is in use; the last one is left."""
        for i in range(stages):
            yield self.wait(report if i == 0 else None)
            yield from self.meet()
            if i > 0:
                yield from self.release(self.stage - 2)
            if i == self.rules.ring:
                yield from self.report  # in the middle of a product

    def multiply(self) -> Iterator[Op]:
        yield from self.use(self.rules.depth, self.first(self.rules.report_unless_loaded))
        if self.rules.depth <= self.rules.ring:
            yield from self.report
        yield from self.release(self.stage - 1)

    def read_inputs(self) -> Iterator[Op]:
        yield from self.use(self.rules.inputs)
        yield from self.meet()
        yield from self.release(self.stage - 1)

    def skip_inputs(self) -> Iterator[Op]:
        first, together = self.stage, self.rules.skip_together
        for stage in range(first, first + self.rules.inputs):
            yield self.wait()
            yield from [] if together else self.release(stage)
        if together:
            yield from self.meet()
            for stage in range(first, first + self.rules.inputs):
                yield from self.release(stage)

    def run(self, tiles: Iterator[tuple[int, int, Tile | None]]) -> Iterator[Op]:
        for slot, use, tile in tiles:
            report = self.first(self.rules.report_unless_published)
            yield self.on.wait("tile full", self.cta, slot, use=use, report=report)
            yield self.on.arrive("tile empty", slot)
            if tile is None:
                yield from self.report
            elif not tile.loads:
                yield from self.report if self.rules.report_when_idle else []
            else:
                counted = self.cta < tile.counted
                yield from self.multiply()
                if tile.inputs:
                    yield from self.read_inputs() if counted else self.skip_inputs()
                if counted and self.warp == 0:
                    before, turn = divmod(self.written, self.rules.written_barriers)
                    self.report = [self.on.report("written", self.cta, self.group, turn, use=before)]
                    self.written += 1


class Warps:
    """What a cluster's warps do, as far as its tickets tell: counting warps, producers, consumers."""

    def __init__(self, tiles: Sequence[Tile], rules: Rules) -> None:
        self.tiles, self.rules, self.on, self.ctas = list(tiles), rules, Barriers(rules), range(rules.ctas)
        groups = [(cta, group) for cta in self.ctas for group in range(rules.groups)]
        programs = [
            *(partial(self.count, cta) for cta in self.ctas),
            *(partial(self.produce, cta) for cta in self.ctas),
            *(partial(self.consume, cta, group, warp) for cta, group in groups for warp in range(rules.warps)),
            *(partial(self.land, cta) for cta in self.ctas if rules.late_tiles),
        ]
        self.number = len(programs)
        self.ops = cache(lambda tickets: [list(program(tickets)) for program in programs])

    def read(self, tickets: tuple[int, ...]) -> Iterator[tuple[int, int, Tile | None]]:
        """Slots, their earlier uses, and tiles; None: stop."""
        for number, ticket in enumerate(tickets):
            yield number % SLOTS, number // SLOTS, self.tiles[ticket] if ticket < len(self.tiles) else None

    def part(self, ticket: int, cta: int) -> int:
        return 1 << ticket * self.rules.ctas + cta

    def needed(self, tile: Tile, cta: int) -> int:
        parts = [(ticket, c) for ticket in tile.needs for c in ([cta] if tile.own else self.ctas)]
        return sum(self.part(ticket, c) for ticket, c in parts if c < self.tiles[ticket].counted)

    def produce(self, cta: int, tickets: tuple[int, ...]) -> Iterator[Op]:
        on, rules, stage = self.on, self.rules, 0
        if cta == 0:
            yield Op("take")
        for slot, use, tile in self.read(tickets):
            arm = on.arrive("tile full", cta, slot, loads=1)
            if cta == 0:
                empty = on.wait("tile empty", slot, use=use - 1)
                yield from [arm, empty] if rules.arm_first else [empty, arm]
                for other in self.ctas:
                    yield on.arrive("tile sent", other, slot) if rules.late_tiles else on.load("tile full", other, slot)
            else:
                yield arm
                yield on.wait("tile full", cta, slot, use=use)
                yield on.arrive("tile empty", slot)
            if tile is None:
                return
            if cta == 0:
                yield Op("take")
            if not tile.loads:
                continue
            yield Op("need", value=self.needed(tile, cta))
            for i in range(rules.depth + rules.inputs * tile.inputs):
                to = self.ctas if i < rules.depth else [cta]  # half of what both multiply, or what its epilogue reads
                before, at = divmod(stage, rules.ring)
                yield on.wait("empty", cta, at, use=before - 1)
                yield on.arrive("full", cta, at, loads=len(to))
                yield from (on.load("full", other, at) for other in to)
                stage += 1

    def land(self, cta: int, tickets: tuple[int, ...]) -> Iterator[Op]:
        """The way of what CTA 0 has published to this CTA."""
        for slot, use, _ in self.read(tickets):
            yield self.on.wait("tile sent", cta, slot, use=use)
            yield self.on.load("tile full", cta, slot)

    def count(self, cta: int, tickets: tuple[int, ...]) -> Iterator[Op]:
        on, rules, counted = self.on, self.rules, 0
        for ticket, (slot, use, tile) in zip(tickets, self.read(tickets), strict=True):
            yield on.wait("tile full", cta, slot, use=use)
            yield from [] if rules.hold_slot else [on.arrive("tile empty", slot)]
            if tile is not None and cta < tile.counted:
                before, turn = divmod(counted, rules.written_barriers)
                yield from (on.wait("written", cta, group, turn, use=before) for group in range(rules.groups))
                yield Op("count", value=self.part(ticket, cta))
                counted += 1
            yield from [on.arrive("tile empty", slot)] if rules.hold_slot else []

    def consume(self, cta: int, group: int, warp: int, tickets: tuple[int, ...]) -> Iterator[Op]:
        return Consumer(self.on, self.rules, cta, group, warp).run(self.read(tickets))


class Model:
    def __init__(self, tiles: Sequence[Tile], clusters: int, rules: Rules) -> None:
        self.rules, self.stop, self.warps = rules, len(tiles), Warps(tiles, rules)
        self.periods = self.warps.on.periods
        start = Cluster((), (0,) * self.warps.number, (0,) * len(self.periods))
        self.start = State((start,) * clusters, 0, 0)

    def phases(self, op: Op, sums: Sequence[int]) -> int:
        """How many of the barrier's have ended."""
        return sums[op.barrier] // self.periods[op.barrier]

    def step(self, state: State, index: int, warp: int) -> State | None:
        """A warp's next step; None: it waits, or has ended."""
        taken, at, sums = state.clusters[index]
        ops, pc = self.warps.ops(taken)[warp], at[warp]
        if pc == len(ops) or (ops[pc].does == "need" and ops[pc].value & ~state.counted):
            return None
        ticket, counted, arrived, wait = state.ticket, state.counted, False, ops[pc]
        if wait.does == "wait":
            phases = self.phases(wait, sums)
            if phases % 2 == wait.value % 2:  # a parity knows no more than this
                report = wait.report
                if report is None or self.phases(report, sums) > report.value:
                    return None
                sums = _add(sums, report.barrier, ARRIVAL)
                return self._changed(state, index, Cluster(taken, at, sums), ticket, counted)
            assert phases == wait.value + 1, "passed by a later phase"
        pc += wait.does in ("wait", "need")
        while pc < len(ops) and (op := ops[pc]).does not in ("wait", "need"):
            if op.does == "add" or (op.does == "report" and self.phases(op, sums) == op.value):
                if arrived and warp >= 2 * self.rules.ctas:
                    break  # a consumer may have given a stage back and not have reported yet
                arrived = True
                expected = ARRIVAL - op.value  # loads; none of them can be left over from the phase before
                whole = op.does == "add" and op.value > 1 and self.periods[op.barrier] == ARRIVAL
                assert not whole or sums[op.barrier] % ARRIVAL <= expected, "armed twice in a phase"
                sums = _add(sums, op.barrier, op.value if op.does == "add" else ARRIVAL)
            elif op.does == "count":
                counted |= op.value
            elif op.does == "take":
                taken, ticket = (*taken, ticket), ticket + 1
                ops = self.warps.ops(taken)[warp]
            pc += 1
        at = (*at[:warp], pc, *at[warp + 1 :])
        return self._changed(state, index, Cluster(taken, at, sums), ticket, counted)

    @staticmethod
    def _changed(state: State, index: int, cluster: Cluster, ticket: int, counted: int) -> State:
        """Clusters do not differ, so their order does not matter."""
        clusters = (*state.clusters[:index], cluster, *state.clusters[index + 1 :])
        return State(tuple(sorted(clusters)) if len(clusters) > 1 else clusters, ticket, counted)

    def next(self, state: State) -> Iterator[State]:
        for index in range(len(state.clusters)):
            found = False
            for warp in range(self.warps.number):
                if warp == self.rules.ctas and found and self.rules.prompt:
                    break
                after = self.step(state, index, warp)
                if after is not None:
                    found = True
                    yield after

    def ended(self, state: State) -> bool:
        return all(
            cluster.taken
            and cluster.taken[-1] >= self.stop
            and list(cluster.at) == [len(ops) for ops in self.warps.ops(cluster.taken)]
            for cluster in state.clusters
        )

    def stops(self) -> bool:
        """Whether a state can be reached that has no next one although warps have not ended."""
        seen, left = {self.start}, [self.start]
        while left:
            state = left.pop()
            following = list(self.next(state))
            if not following and not self.ended(state):
                return True
            for other in following:
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        return False


def _add(sums: tuple[int, ...], barrier: int, value: int) -> tuple[int, ...]:
    return (*sums[:barrier], sums[barrier] + value, *sums[barrier + 1 :])
