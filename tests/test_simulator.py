"""Invariants of the performance model, its calibration, and its error against measurements where there are any."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.config import MoeShape
from mok_megatron.floors import dispatch_crossings, layer_floors, nvlink_bytes, ranks_per_token, routed_flops
from mok_megatron.hardware import GPUS, gpu
from mok_megatron.simulator import (
    Machine,
    Measurement,
    Policy,
    Traffic,
    build_traffic,
    calibrate,
    load_measurements,
    predict,
    sample_routing,
    simulate,
)
from mok_megatron.simulator.dependencies import run_interleaved
from mok_megatron.tile_order import BLOCK_ROWS, TileOrder

H200 = Machine.from_gpu(gpu("h200"))
BENCHMARKS = Path(__file__).parent.parent / "docs" / "benchmarks"
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
    fastest = H200.with_(tile_overhead_s=0.0, start_s=0.0, latency_s=0.0, contention=0.0)
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


def packed(ranks: int, tokens: int, hidden: int, width: int) -> Traffic:
    """Every expert gets the same number of rows, whole blocks of them."""
    shape = shape_of(ranks, 2, 2, hidden=hidden, width=width)
    first = np.arange(ranks * tokens) % shape.num_experts
    experts = np.sort(np.stack([first, (first + 1) % shape.num_experts], axis=1), axis=1)
    return build_traffic(shape, experts.reshape(ranks, tokens, 2))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_packed_rows_compute_at_the_floor(direction: Any) -> None:
    traffic = packed(1, 132 * 128, 1024, 1024)  # whole waves of 66 clusters: nothing is lost but start and copy
    ideal = H200.with_(tile_overhead_s=0.0, start_s=0.0, contention=0.0, local_copy=1e18)
    outcome = simulate(ideal, Policy(), traffic, direction)
    assert outcome.floors.limit == "FLOP"
    # Backward ends in 96 large weight gradient tiles on 66 clusters: the second wave is not full.
    assert 1.0 <= outcome.compute_s / outcome.floors.flop_s < (1.02 if direction == "fwd" else 1.25)


@pytest.mark.parametrize("policy", [Policy(), Policy(combine="push")])
def test_a_rank_that_holds_everything_is_bound_by_its_link(policy: Policy) -> None:
    shape = shape_of(8, 2, 2, hidden=4096, width=8)
    experts = np.broadcast_to(np.array([0, 1]), (8, 512, 2)).copy()
    links_only = H200.with_(gemm_flops=1e21, tile_overhead_s=0.0, start_s=0.0, latency_s=0.0, local_copy=1e18)
    outcome = simulate(links_only, policy, build_traffic(shape, experts))
    sent = 7 * 512 * 2 * 4096 * 2  # the peers' 512 tokens go back to them, one row for each of two experts
    assert outcome.floors.limit == "NVLink"
    assert outcome.floors.nvlink_s == pytest.approx(sent / H200.nvlink)
    assert outcome.total_s >= outcome.floors.nvlink_s


def test_copy_rates_are_the_measured_ones() -> None:
    rates = [Policy(copy_layout="dedicated", comm_sms=sms).copy_rate(H200) for sms in (4, 8, 16)]
    assert rates == pytest.approx([176e9, 332e9, 332e9])
    assert Policy(comm_sms=66).copy_rate(H200) == pytest.approx(66 * 44e9 * 2 / 32)


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


def synthetic(tmp_path: Path, machine: Machine) -> Path:
    results = []
    for hidden, width, experts in ((7168, 2048, 32), (5120, 1536, 20), (2048, 768, 128)):
        shape = MoeShape(hidden=hidden, intermediate=width, num_experts=experts, top_k=8)
        for direction in ("fwd", "bwd"):
            traffic = build_traffic(shape, sample_routing(shape, 8192, seed=7))
            ms = simulate(machine, Policy(), traffic, direction).total_s * 1e3  # type: ignore[arg-type]
            results.append({"shape": [hidden, width], "T": 8192, "K": 8, "E": experts, "W": 1, "routing": "uniform",
                            "direction": direction, "ms": ms})  # fmt: skip
    results.append({"direction": "fwd+bwd", "ms": 1.0})
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "commit": "0", "date": "2026-01-01", "results": results}))
    return path


def test_calibration_recovers_a_machine_from_one_shape(tmp_path: Path) -> None:
    true = H200.with_(gemm_flops=610e12, bwd_gemm_flops=560e12)
    measured = load_measurements(synthetic(tmp_path, true))
    assert len(measured) == 6
    fitted = calibrate(H200, measured[:2])
    assert fitted.gemm_flops == pytest.approx(610e12, rel=0.01)
    assert fitted.bwd_gemm_flops == pytest.approx(560e12, rel=0.01)
    assert "calibrated on 2 timing(s)" in fitted.basis
    for m in measured[2:]:
        assert predict(fitted, m).total_s * 1e3 == pytest.approx(m.ms, rel=0.02)


def test_calibration_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"results": [{"direction": "fwd+bwd", "ms": 3}, {"direction": "fwd", "T": 1}]}')
    with pytest.raises(ValueError, match="no usable timing among 2 results"):
        load_measurements(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_measurements(path)
    shape = shape_of(1, 4, 2)
    with pytest.raises(ValueError, match="needs a timing with uniform routing; got 1 without"):
        calibrate(H200, [Measurement(shape=shape, tokens=64, direction="fwd", ms=1.0, routing="skewed")])


def measured_files() -> list[Path]:
    usable = []
    for path in sorted(BENCHMARKS.glob("*.json")):
        try:
            load_measurements(path)
        except ValueError:
            continue
        usable.append(path)
    return usable


def test_predicts_other_measured_shapes_within_ten_percent() -> None:
    files = measured_files()
    if not files:
        pytest.skip("no layer timing in docs/benchmarks/*.json yet: nothing to compare the prediction with")
    for path in files:
        document = json.loads(path.read_text(encoding="utf-8"))
        spec = next((g for name, g in GPUS.items() if name in str(document.get("gpu", "")).lower()), gpu("h200"))
        measured = [m for m in load_measurements(path) if m.routing == "uniform"]
        shapes = list(dict.fromkeys(m.shape for m in measured))
        fitted = calibrate(Machine.from_gpu(spec), [m for m in measured if m.shape in shapes[:2]])
        for m in measured:
            error = predict(fitted, m).total_s * 1e3 / m.ms - 1
            assert abs(error) < 0.10, f"{path.name}: {m} predicted {error:+.1%} off"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: H200.with_(nvlink=0.0), "nvlink must be positive and finite, got 0.0"),
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
