"""Properties of the schedule that every builder must have, and the refusal of routings that do not fit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mok_megatron.config import MoeShape
from mok_megatron.schedule import Schedule, build_schedule, compact, validate_routing
from tests.routing_cases import CASES, map_from_indices

SHAPE = MoeShape(hidden=16, intermediate=8, num_experts=4, top_k=2)


@dataclass(frozen=True)
class Routing:
    """``rows[s][t]``: the experts of token t of rank s, ascending."""

    num_experts: int
    top_k: int
    block_rows: int
    rows: list[list[list[int]]]

    def tables(self) -> list[Tensor]:
        padded = [[row + [-1] * (self.top_k - len(row)) for row in rank] for rank in self.rows]
        return [torch.tensor(rank, dtype=torch.int32).view(len(rank), self.top_k) for rank in padded]

    def schedules(self) -> list[Schedule]:
        tables = self.tables()
        weights = [torch.rand(table.shape) for table in tables]
        sizes: dict[str, Any] = {"num_experts": self.num_experts, "block_rows": self.block_rows}
        return [build_schedule(tables, weights[rank], rank=rank, **sizes) for rank in range(len(tables))]

    def routes(self) -> set[tuple[int, int, int]]:
        """(expert, source rank, slot) of every route."""
        return {
            (expert, rank, token * self.top_k + k)
            for rank, tokens in enumerate(self.rows)
            for token, row in enumerate(tokens)
            for k, expert in enumerate(row)
        }


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    world, local = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    experts = world * local
    top_k = draw(st.integers(1, min(experts, 4)))
    row = st.sets(st.integers(0, experts - 1), max_size=top_k).map(sorted)
    tokens = st.lists(row, max_size=9)
    return Routing(experts, top_k, draw(st.sampled_from([1, 2, 4, 32])), [draw(tokens) for _ in range(world)])


def _rows_by_expert(schedules: list[Schedule]) -> list[list[tuple[int, int]]]:
    """(source rank, slot) of every row of every expert in row order, padding rows as (-1, -1)."""
    groups = []
    for schedule in schedules:
        bounds = schedule.expert_first_row.tolist()
        rows = list(zip(schedule.row_src_rank.tolist(), schedule.row_src_slot.tolist(), strict=True))
        assert bounds[0] == 0 and bounds[-1] == len(rows)
        groups += [rows[first:last] for first, last in pairwise(bounds)]
    return groups


@given(routings())
@settings(max_examples=150, deadline=None)
def test_every_route_has_one_row_in_order_and_padding_is_marked(routing: Routing) -> None:
    groups = _rows_by_expert(routing.schedules())
    assert len(groups) == routing.num_experts
    found = []
    for expert, rows in enumerate(groups):
        real = [row for row in rows if row != (-1, -1)]
        assert real == sorted(real), "rows of an expert are in (source rank, token) order"
        assert rows == real + [(-1, -1)] * (len(rows) - len(real)), "padding closes the group"
        assert len(rows) % routing.block_rows == 0 and len(rows) - len(real) < routing.block_rows
        found += [(expert, *row) for row in real]
    assert len(found) == len(set(found))
    assert set(found) == routing.routes()


@given(routings())
@settings(max_examples=150, deadline=None)
def test_both_sides_agree(routing: Routing) -> None:
    schedules = routing.schedules()
    for source, schedule in enumerate(schedules):
        dst_rank, dst_row = schedule.slot_dst_rank.flatten().tolist(), schedule.slot_dst_row.flatten().tolist()
        for slot, expert in enumerate(schedule.experts.flatten().tolist()):
            if expert < 0:
                assert (dst_rank[slot], dst_row[slot]) == (-1, -1)
                continue
            there = schedules[dst_rank[slot]]
            row = dst_row[slot]
            assert (int(there.row_src_rank[row]), int(there.row_src_slot[row])) == (source, slot)
            local = expert - dst_rank[slot] * (routing.num_experts // len(schedules))
            assert there.expert_first_row[local] <= row < there.expert_first_row[local + 1]


@given(routings())
@settings(max_examples=100, deadline=None)
def test_rows_of_an_expert_do_not_depend_on_the_number_of_ranks(routing: Routing) -> None:
    """The same tokens on one rank give every expert the same tokens in the same rows of its group."""
    first_slot = [0]
    for rank in routing.rows:
        first_slot.append(first_slot[-1] + len(rank) * routing.top_k)
    tokens = [row for rank in routing.rows for row in rank]
    one = Routing(routing.num_experts, routing.top_k, routing.block_rows, [tokens])
    spread = [
        [-1 if rank < 0 else first_slot[rank] + slot for rank, slot in rows]
        for rows in _rows_by_expert(routing.schedules())
    ]
    assert spread == [[slot for _, slot in rows] for rows in _rows_by_expert(one.schedules())]


@given(routings())
@settings(max_examples=50, deadline=None)
def test_tables_are_int32_and_contiguous(routing: Routing) -> None:
    for schedule in routing.schedules():
        for name, table in schedule._asdict().items():
            if name not in ("weights", "block_rows"):
                assert table.dtype == torch.int32 and table.is_contiguous(), name


def test_worked_example() -> None:
    """The example in the module's docstring."""
    routing_map = torch.tensor([[1, 0], [1, 1], [0, 1]]).bool()
    experts, weights = compact(routing_map * 0.5, routing_map, 2)
    schedule = build_schedule([experts], weights, rank=0, num_experts=2, block_rows=4)
    assert experts.tolist() == [[0, -1], [0, 1], [1, -1]]
    assert weights.tolist() == [[0.5, 0], [0.5, 0.5], [0.5, 0]]
    assert schedule.row_src_slot.tolist() == [0, 2, -1, -1, 3, 4, -1, -1]
    assert schedule.row_src_rank.tolist() == [0, 0, -1, -1, 0, 0, -1, -1]
    assert schedule.expert_first_row.tolist() == [0, 4, 8]
    assert schedule.slot_dst_row.tolist() == [[0, -1], [1, 4], [5, -1]]
    assert schedule.slot_dst_rank.tolist() == [[0, -1], [0, 0], [0, -1]]


@pytest.mark.parametrize("name", CASES)
def test_compact_keeps_map_and_probs(name: str) -> None:
    case = CASES[name]
    probs, routing_map = case.generate(seed=5)
    experts, weights = compact(probs.masked_fill(~routing_map, float("nan")), routing_map, case.top_k)
    assert experts.shape == weights.shape == (sum(case.tokens), case.top_k)
    assert experts.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(map_from_indices(experts.long(), case.num_experts), routing_map)
    present = experts >= 0
    assert torch.equal(weights[present], probs.gather(1, experts.clamp(min=0).long())[present])
    assert not weights[~present].any()
    assert (present.int().diff(dim=1) <= 0).all(), "absent ones are last"
    ascending = experts.diff(dim=1) > 0
    assert (ascending | ~present[:, 1:]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_compact_converts_the_probs_dtype(dtype: torch.dtype) -> None:
    probs, routing_map = CASES["uniform"].generate(seed=0)
    _, weights = compact(probs.to(dtype), routing_map, 2)
    assert weights.dtype == torch.float32
    assert torch.equal(weights.sum(1), (probs.to(dtype).float() * routing_map).sum(1))


def test_a_repeated_id_counts_once() -> None:
    routing_map = map_from_indices(torch.tensor([[3, 3], [2, -1]]), 4)
    experts, weights = compact(torch.ones(2, 4) * 0.25, routing_map, 2)
    assert experts.tolist() == [[3, -1], [2, -1]]
    assert weights.tolist() == [[0.25, 0], [0.25, 0]]


def _routing(tokens: int = 3) -> dict[str, Tensor]:
    probs = torch.zeros(tokens, SHAPE.num_experts)
    probs[:, 1:3] = 0.5
    return {"probs": probs, "routing_map": probs > 0, "x": torch.zeros(tokens, SHAPE.hidden)}


def _with_prob(value: float) -> Tensor:
    probs = _routing()["probs"].clone()
    probs[2, 1] = value
    return probs


REFUSED = {
    "hidden size of x": ({"x": torch.zeros(3, 15)}, "x must be [tokens, hidden=16], got [3, 15]"),
    "dimensions of x": ({"x": torch.zeros(3, 1, 16)}, "x must be [tokens, hidden=16], got [3, 1, 16]"),
    "tokens of x": ({"x": torch.zeros(4, 16)}, "probs must be [tokens=4, experts=4] as x and the layer"),
    "experts of probs": ({"probs": torch.zeros(3, 8)}, "probs must be [tokens=3, experts=4]"),
    "dimensions of probs": ({"probs": torch.zeros(12)}, "got [12]"),
    "tokens of routing_map": ({"routing_map": torch.zeros(2, 4) > 0}, "routing_map must be [tokens=3, experts=4]"),
    "integer map": ({"routing_map": torch.ones(3, 4).int()}, "routing_map must be bool, got torch.int32"),
    "probs in fp16": ({"probs": torch.zeros(3, 4).half()}, "or float64, got torch.float16"),
    "device of probs": ({"probs": torch.zeros(3, 4, device="meta")}, "probs is on meta but x is on cpu"),
    "device of the map": ({"routing_map": torch.ones(3, 4, device="meta").bool()}, "map is on meta but x is on cpu"),
    "NaN": ({"probs": _with_prob(float("nan"))}, "probs[2, 1] = nan is routed but not a finite number >= 0"),
    "infinite": ({"probs": _with_prob(float("inf"))}, "probs[2, 1] = inf is routed"),
    "negative": ({"probs": _with_prob(-0.5)}, "probs[2, 1] = -0.5 is routed but not a finite number >= 0"),
    "too many experts": ({"routing_map": torch.tensor([[0, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]]).bool()},
                         "routes token 1 to 3 experts, more than top_k=2"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_bad_routing_is_refused_with_its_values(what: str) -> None:
    change, message = REFUSED[what]
    arguments = _routing() | change
    with pytest.raises(ValueError, match=re.escape(message)):
        validate_routing(arguments["probs"], arguments["routing_map"], SHAPE, x=arguments["x"])


def test_good_routings_pass_and_unrouted_values_do_not_matter() -> None:
    for tokens in (0, 1, 3):
        arguments = _routing(tokens)
        validate_routing(arguments["probs"], arguments["routing_map"], SHAPE, x=arguments["x"])
    good = _routing()
    good["probs"][:, 0] = float("nan")
    validate_routing(good["probs"], good["routing_map"], SHAPE, x=good["x"])


def test_values_are_not_read_off_the_cpu() -> None:
    """A meta tensor has no values: reading one, as a device synchronisation would, raises."""
    meta = {name: tensor.to("meta") for name, tensor in _routing().items()}
    validate_routing(meta["probs"], meta["routing_map"], SHAPE, x=meta["x"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank 2 is not one of the 2 ranks"),
        ({"num_experts": 7}, "num_experts=7 is not divisible by the 2 ranks"),
        ({"block_rows": 0}, "block_rows must be >= 1, got 0"),
        ({"weights": torch.zeros(2, 2)}, "weights [2, 2] and experts [3, 2] of rank 0 differ in shape"),
    ],
)
def test_tables_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"weights": torch.zeros(3, 2), "rank": 0, "num_experts": 4, "block_rows": 4} | change
    tables = [torch.full((3, 2), -1, dtype=torch.int32)] * 2
    with pytest.raises(ValueError, match=re.escape(message)):
        build_schedule(tables, arguments.pop("weights"), **arguments)
