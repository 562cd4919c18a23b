"""Invariants of the performance model."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.config import MoeShape
from mok_megatron.floors import dispatch_crossings, layer_floors, nvlink_bytes, ranks_per_token, routed_flops
from mok_megatron.hardware import gpu
from mok_megatron.simulator import (
    Epilogues,
    Machine,
    Policy,
    Traffic,
    build_traffic,
    named_routing,
    sample_routing,
    simulate,
)
from mok_megatron.simulator.dependencies import run_interleaved
from mok_megatron.simulator.traffic import ROUTINGS
from mok_megatron.tile_order import BLOCK_ROWS, TileOrder

H200 = Machine.from_gpu(gpu("h200"))
IDEAL: dict[str, Any] = {
    **dict.fromkeys(("launch_s", "schedule_s", "schedule_per_route_s", "contention", "hbm_contention"), 0.0),
    "sustained": 1.0,
    "epilogues": Epilogues(fc1=0.0, fc2=0.0, act_grad=0.0, wgrad=0.0),
}
"""A machine that does nothing but multiply and move rows."""
POLICIES = [
    Policy(),
    Policy(combine="push"),
    Policy(combine="push", pull_order="rotated", dedup=False),
    Policy(token_order="token"),
    Policy(copy_layout="dedicated", comm_sms=16),
    Policy(copy_layout="dedicated", comm_sms=8, combine="push", combine_per_rank=True),
]


def shape_of(ranks: int, local: int, top_k: int, hidden: int = 512, width: int = 384) -> MoeShape:
    return MoeShape(hidden=hidden, intermediate=width, num_experts=ranks * local, top_k=top_k, ep_size=ranks)


@st.composite
def cases(draw: st.DrawFn) -> tuple[MoeShape, int, float, int]:
    ranks, local = draw(st.sampled_from([1, 2, 3, 8])), draw(st.integers(1, 5))
    top_k = draw(st.integers(1, min(8, ranks * local)))
    tokens = draw(st.sampled_from([1, 100, 700]))
    return shape_of(ranks, local, top_k), tokens, draw(st.sampled_from([0.0, 0.7, 3.0])), draw(st.integers(0, 99))


@settings(max_examples=60, deadline=None)
@given(case=cases(), policy=st.sampled_from(POLICIES), direction=st.sampled_from(["fwd", "bwd"]))
def test_never_below_the_floors(case: Any, policy: Policy, direction: Any) -> None:
    shape, tokens, imbalance, seed = case
    traffic = build_traffic(shape, sample_routing(shape, tokens, imbalance=imbalance, seed=seed))
    fastest = H200.with_(**IDEAL, latency_s=0.0)
    for machine in (fastest, H200.with_(jitter=0.1, skew_s=1e-5)):
        outcome = simulate(machine, policy, traffic, direction)
        assert outcome.total_s >= outcome.floors.bound * (1 - 1e-9)
        assert outcome.total_s >= outcome.compute_s >= 0


@settings(max_examples=60, deadline=None)
@given(case=cases(), policy=st.sampled_from(POLICIES), direction=st.sampled_from(["fwd", "bwd"]))
def test_more_bandwidth_never_hurts(case: Any, policy: Policy, direction: Any) -> None:
    shape, tokens, imbalance, seed = case
    traffic = build_traffic(shape, sample_routing(shape, tokens, imbalance=imbalance, seed=seed))
    times = [
        simulate(
            H200.with_(nvlink=H200.nvlink * f, copy_per_sm=H200.copy_per_sm * f), policy, traffic, direction
        ).total_s
        for f in (0.1, 0.5, 1.0, 3.0)
    ]
    # Requests of several ranks are served in the order in which they come up, which a faster link can change.
    for slower, faster in itertools.pairwise(times):
        assert faster <= slower * 1.01


@settings(max_examples=150, deadline=None)
@given(
    row_blocks=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    fc1=st.integers(1, 5),
    fc2=st.integers(1, 5),
    lag=st.integers(1, 6),
    workers=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_interleaving_deadlocks(
    row_blocks: list[int], fc1: int, fc2: int, lag: int, workers: int, seed: int
) -> None:
    rng = random.Random(seed)
    order = TileOrder(row_blocks, fc1_columns=fc1, fc2_columns=fc2, lag=lag)
    arrival = list(range(sum(row_blocks)))
    rng.shuffle(arrival)
    steps = run_interleaved(order, workers, arrival, rng)
    assert steps == len(arrival) + 2 * order.num_tickets


def test_a_wrong_order_is_found_to_deadlock() -> None:
    class Backwards(TileOrder):
        def tile(self, ticket: int) -> Any:
            return super().tile(self.num_tickets - 1 - ticket)

    order = Backwards([2, 2], fc1_columns=2, fc2_columns=2, lag=1)
    with pytest.raises(RuntimeError, match=r"deadlock: 2 of 2 workers wait \(first for Tile"):
        run_interleaved(order, 2, range(4), random.Random(0))


def test_traffic_counts_every_route_once() -> None:
    shape = shape_of(4, 3, 4)
    experts = sample_routing(shape, 333, imbalance=1.0, seed=1)
    assert (np.diff(experts, axis=2) > 0).all()
    traffic = build_traffic(shape, experts)
    assert sum(rows for block in traffic.block_sources for _, rows, _ in block) == experts.size
    assert all(sum(rows for _, rows, _ in block) <= BLOCK_ROWS for block in traffic.block_sources)
    crossings = sum(c for block in traffic.block_sources for _, _, c in block)
    assert crossings == sum(len(set(row // 3)) for row in experts.reshape(-1, 4))


def test_expected_crossings_match_sampling() -> None:
    shape = shape_of(8, 32, 8)
    experts = sample_routing(shape, 2000, seed=3)
    distinct = np.mean([len(set(row)) for row in (experts // 32).reshape(-1, 8).tolist()])
    assert ranks_per_token(shape) == pytest.approx(distinct, rel=0.01)
    assert dispatch_crossings(shape) == pytest.approx(distinct * 7 / 8, rel=0.01)
    assert dispatch_crossings(shape, per_route=True) == 7.0


def test_simulated_nvlink_floor_matches_the_closed_form() -> None:
    shape = shape_of(8, 4, 8, hidden=1024)
    traffic = build_traffic(shape, sample_routing(shape, 4096))
    expected = sum(nvlink_bytes(shape, 4096, "fwd")) / H200.nvlink
    assert simulate(H200, Policy(), traffic).floors.nvlink_s == pytest.approx(expected, rel=0.05)


def test_backward_is_no_faster_than_hbm_moves_weight_gradients() -> None:
    shape = shape_of(1, 64, 1)
    outcome = simulate(H200.with_(hbm=1e9), Policy(), build_traffic(shape, sample_routing(shape, 64)), "bwd")
    weights = 64 * 3 * 512 * 384
    assert outcome.total_s == pytest.approx(weights * (2 + 8) / 1e9)  # bf16 read, fp32 sums read and written


def packed(ranks: int, tokens: int, hidden: int, width: int) -> Traffic:
    """Every expert gets the same number of rows, whole blocks of them."""
    shape = shape_of(ranks, 2, 2, hidden=hidden, width=width)
    first = np.arange(ranks * tokens) % shape.num_experts
    experts = np.sort(np.stack([first, (first + 1) % shape.num_experts], axis=1), axis=1)
    return build_traffic(shape, experts.reshape(ranks, tokens, 2))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_packed_rows_compute_at_the_floor(direction: Any) -> None:
    traffic = packed(1, 132 * 128, 1024, 1024)  # whole waves of 66 clusters: nothing is lost but start and copy
    ideal = H200.with_(**IDEAL, local_copy=1e18)
    outcome = simulate(ideal, Policy(), traffic, direction)
    assert outcome.floors.limit == "FLOP"
    # Backward ends in 96 large weight gradient tiles on 66 clusters: the second wave is not full.
    assert 1.0 <= outcome.compute_s / outcome.floors.flop_s < (1.02 if direction == "fwd" else 1.25)


@pytest.mark.parametrize("policy", [Policy(), Policy(combine="push")])
def test_a_rank_that_holds_everything_is_bound_by_its_link(policy: Policy) -> None:
    shape = shape_of(8, 2, 2, hidden=4096, width=8)
    experts = np.broadcast_to(np.array([0, 1]), (8, 512, 2)).copy()
    links_only = H200.with_(**IDEAL, gemm_flops=1e21, latency_s=0.0, local_copy=1e18)
    outcome = simulate(links_only, policy, build_traffic(shape, experts))
    sent = 7 * 512 * 2 * 4096 * 2  # the peers' 512 tokens go back to them, one row for each of two experts
    assert outcome.floors.limit == "NVLink"
    assert outcome.floors.nvlink_s == pytest.approx(sent / H200.nvlink)
    assert outcome.total_s >= outcome.floors.nvlink_s


def test_copy_rates_are_the_measured_ones() -> None:
    rates = [Policy(copy_layout="dedicated", comm_sms=sms).copy_rate(H200) for sms in (4, 8, 16)]
    assert rates == pytest.approx([176e9, 332e9, 332e9])
    assert Policy(comm_sms=66).copy_rate(H200) == pytest.approx(66 * 44e9 * 2 / 32)


def test_named_routings_are_what_they_say() -> None:
    shape = shape_of(4, 8, 4)
    for name in ROUTINGS:
        experts = named_routing(name, shape, 500)
        assert experts.shape == (4, 500, 4)
        assert (np.diff(experts, axis=2) > 0).all()
    assert (named_routing("single-hot", shape, 500)[:, :, 0] == 0).all()
    remote = named_routing("all-remote", shape, 500) // 8
    assert all((remote[rank] != rank).all() for rank in range(4))
    busiest = np.bincount(named_routing("zipf", shape, 500).reshape(-1)).max()
    assert busiest > 2 * np.bincount(named_routing("uniform", shape, 500).reshape(-1)).max()


def test_under_the_power_limit_tiles_take_longer() -> None:
    traffic = build_traffic(shape := shape_of(1, 4, 2, hidden=4096, width=4096), sample_routing(shape, 8192))
    never, late, always = (
        simulate(H200.with_(**{**IDEAL, "sustained": 0.5}, burst_s=burst), Policy(), traffic).compute_s
        for burst in (1.0, 1e-3, 0.0)
    )
    assert always == pytest.approx(2 * never, rel=0.01)
    assert late == pytest.approx(1e-3 + 2 * (never - 1e-3), rel=0.1)


def test_push_hides_the_combine_that_pull_leaves_at_the_end() -> None:
    shape = MoeShape(hidden=7168, intermediate=2048, num_experts=64, top_k=8, ep_size=2)
    traffic = build_traffic(shape, sample_routing(shape, 4096))
    pull, push = (simulate(H200, Policy(combine=combine), traffic) for combine in ("pull", "push"))
    assert push.tail_s < 0.3 * pull.tail_s
    assert push.total_s < pull.total_s


def test_prediction_names_itself_and_its_basis() -> None:
    shape = shape_of(2, 4, 2)
    traffic = build_traffic(shape, sample_routing(shape, 256))
    text = simulate(Machine.from_gpu(gpu("gb300")), Policy(), traffic).describe()
    assert text.startswith("predicted fwd")
    assert "not a measurement: not measured on GB300 NVL72" in text


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: H200.with_(nvlink=0.0), "nvlink must be positive and finite, got 0.0"),
        (lambda: H200.with_(sustained=1.1), "sustained must be above 0 and at most 1, got 1.1"),
        (lambda: H200.with_(backward_share=0.0), "backward_share must be positive and finite, got 0.0"),
        (lambda: Epilogues(wgrad=-1.0), "epilogue wgrad must be finite and >= 0, got -1.0"),
        (lambda: named_routing("hot", shape_of(1, 2, 1), 4), "unknown routing 'hot'; known are uniform, zipf"),
        (lambda: H200.with_(jitter=-1.0), "jitter must be finite and >= 0, got -1.0"),
        (lambda: Policy(comm_sms=133).copy_sms(H200), "comm_sms=133 is out of range: H200 SXM has 132 SMs"),
        (lambda: Policy(copy_warps=0), "copy_warps must be 1 to 32, got 0"),
        (lambda: sample_routing(shape_of(1, 2, 1), 4, imbalance=-1), "imbalance must be >= 0, got -1"),
        (lambda: layer_floors(shape_of(1, 2, 1), -1, "fwd", gpu("h200")), "tokens must be a finite number >= 0"),
        (lambda: gpu("h300"), "unknown GPU 'h300'; known GPUs are h100, h200, b200, gb200, gb300"),
    ],
)
def test_bad_values_are_named(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_routed_flops_are_the_three_matrices() -> None:
    assert routed_flops(shape_of(1, 4, 2), 10, "fwd") == 2 * 10 * 2 * 3 * 512 * 384
    assert routed_flops(shape_of(1, 4, 2), 10, "bwd") == 2 * routed_flops(shape_of(1, 4, 2), 10, "fwd")
