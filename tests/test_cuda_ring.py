"""More rows than the buffers hold: every result has the same bits as with room for all, in any capacity."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.layer_run import Inputs, assert_errs_at_most_twice_eager, assert_same_bits, poisoned_memory
from tests.reference_math import Result
from tests.routing_cases import CASES, RoutingCase, all_to
from tests.virtual_ranks import DEVICE, VirtualRanks, forward_backward, inputs_of, ranks_of, run_layer

pytestmark = pytest.mark.gpu


SKEWED = {
    "one_expert": RoutingCase(name="one_expert", tokens=(700,), num_experts=6, top_k=1, pick=all_to(2)),
    "everybody_to_one": RoutingCase(
        name="everybody_to_one", tokens=(300, 211, 0, 257), num_experts=8, top_k=1, pick=all_to(5)
    ),
    "all_to_one_rank": RoutingCase(
        name="all_to_one_rank", tokens=(300, 211), num_experts=8, top_k=4, pick=all_to(4, 5, 6, 7)
    ),
    "uniform": RoutingCase(name="uniform_ring", tokens=(400, 333), num_experts=8, top_k=3),
    "one_rank": RoutingCase(name="one_rank_ring", tokens=(1023,), num_experts=12, top_k=3),
}
CAPACITIES = (128, 256, 384, 640, 1024, 2048, 1 << 15)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def _whole(case: RoutingCase, inputs: Inputs, dtype: torch.dtype = torch.float32) -> Result:
    ranks = ranks_of(case, inputs)
    result = run_layer(ranks, inputs, dtype=dtype)
    ranks.close()
    return result


@pytest.mark.parametrize("name", SKEWED)
def test_any_capacity_gives_the_same_bits(name: str) -> None:
    case = SKEWED[name]
    inputs = inputs_of(case)
    expected = _whole(case, inputs)
    assert min(CAPACITIES) < int(inputs.routing_map.sum()) // len(case.tokens)
    for capacity in CAPACITIES:
        for options in ({}, {"recompute": True}, {"save_x": False}, {"comm_sms": 2}):
            ranks = ranks_of(case, inputs, ring_rows=capacity, **options)
            assert_same_bits(run_layer(ranks, inputs), expected, (capacity, options))
            ranks.close()


@pytest.mark.parametrize("name", ["everybody_to_one", "uniform"])
def test_a_ring_against_fp64(name: str) -> None:
    case = SKEWED[name]
    inputs = inputs_of(case)
    ranks = ranks_of(case, inputs, ring_rows=256)
    assert_errs_at_most_twice_eager(run_layer(ranks, inputs), inputs)
    ranks.close()


def test_bf16_gradients_are_rounded_once() -> None:
    """An expert that passes the ring in pieces has its sum in fp32 until the last one."""
    case = SKEWED["one_expert"]
    inputs = inputs_of(case)
    expected = _whole(case, inputs, torch.bfloat16)
    ranks = ranks_of(case, inputs, ring_rows=256)
    assert_same_bits(run_layer(ranks, inputs, dtype=torch.bfloat16), expected, "bf16")
    ranks.close()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_any_number_of_ranks(world: int) -> None:
    tokens, experts = 512, 32
    whole = RoutingCase(name="ranks", tokens=(tokens,), num_experts=experts, top_k=6)
    inputs = inputs_of(whole)
    expected = _whole(whole, inputs)
    split = RoutingCase(name="ranks", tokens=(tokens // world,) * world, num_experts=experts, top_k=6)
    for capacity in (128, 384, 1152):
        ranks = ranks_of(split, inputs, ring_rows=capacity)
        assert_same_bits(run_layer(ranks, inputs), expected, capacity)
        ranks.close()


def test_whatever_the_timing() -> None:
    case = CASES["w4_all_to_rank2"]
    inputs = inputs_of(case)
    expected, rng = _whole(case, inputs), random.Random(1)
    for capacity in (128, 512):
        ranks = ranks_of(case, inputs, ring_rows=capacity)
        for _ in range(20):
            delays = [rng.randrange(0, 200_000) for _ in case.tokens]
            assert_same_bits(run_layer(ranks, inputs, delays=delays), expected, (capacity, delays))
        ranks.close()


def test_graph_replay_within_and_beyond_the_capacity() -> None:
    """One graph: routings that fit and routings that do not, in turn."""
    torch.use_deterministic_algorithms(False)
    case = RoutingCase(name="graph", tokens=(300,), num_experts=8, top_k=2)
    inputs = inputs_of(case)
    ranks = ranks_of(case, inputs, ring_rows=640)
    backend = ranks.backends[0]
    x, probs, routing_map, dy = (t.to(DEVICE) for t in (inputs.x, inputs.probs, inputs.routing_map, inputs.dy))
    w1, w2 = list(inputs.w1.to(DEVICE)), list(inputs.w2.to(DEVICE))
    grads = [[torch.empty_like(w, dtype=torch.float32) for w in weights] for weights in (w1, w2)]

    def call() -> list[Tensor]:
        return forward_backward(backend, x, probs, routing_map, dy, w1, w2, grads)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    few = RoutingCase(name="few", tokens=(300,), num_experts=8, top_k=2, pick=all_to(3, tokens=200))
    sizes = []
    for seed in range(12):
        new = inputs_of(few if seed % 2 else case, seed=200 + seed)
        for target, source in ((x, new.x), (probs, new.probs), (routing_map, new.routing_map), (dy, new.dy)):
            target.copy_(source)
        sizes.append(int(-(-new.routing_map.sum(0) // 128).sum() * 128))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, call(), strict=True)), f"replay {seed}"
    assert min(sizes) < 640 < max(sizes)
    ranks.close()


@pytest.mark.parametrize("frozen", ["none", "one", "first", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whatever_is_wanted_of_backward(frozen: str, dtype: torch.dtype) -> None:
    """Every expert is cut or empty; some have no gradient, gradients are added or new, dX is wanted or not."""
    case = SKEWED["all_to_one_rank"]
    inputs = inputs_of(case)
    without = {"none": set(), "one": {5}, "first": {4}, "all": set(range(8))}[frozen]
    x, probs, routing_map, w1, w2, dy = (
        t.to(DEVICE) for t in (inputs.x, inputs.probs, inputs.routing_map, inputs.w1, inputs.w2, inputs.dy)
    )

    def run(ranks: VirtualRanks, accumulate: bool, needs_dx: bool) -> list[Tensor]:
        outputs = ranks.forward(x, probs, routing_map, w1, w2)
        ranks.poison()
        fill = 1.0 if accumulate else float("nan")
        sinks = [
            [
                None if e in without and (frozen == "all" or w is w2) else torch.full_like(w[e], fill, dtype=dtype)
                for e in range(8)
            ]
            for w in (w1, w2)
        ]
        dx, dprobs = ranks.backward(dy, outputs, w1, w2, *sinks, accumulate=accumulate, needs_dx=needs_dx)
        ranks.check_canaries()
        return [dx, dprobs, *(sink for of_weight in sinks for sink in of_weight if sink is not None)]

    whole, ring = ranks_of(case, inputs), ranks_of(case, inputs, ring_rows=256)
    for accumulate in (False, True):
        for needs_dx in (True, False):
            expected, found = run(whole, accumulate, needs_dx), run(ring, accumulate, needs_dx)
            assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)), (accumulate, needs_dx)
    whole.close()
    ring.close()
