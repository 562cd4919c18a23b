"""The CUDA backward against fp64 and bit against bit; W virtual ranks on one GPU, and through autograd."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mok_megatron import memory
from mok_megatron.autograd import ExpertParams, apply_experts
from mok_megatron.backends.base import WeightGrads
from mok_megatron.config import Activation
from tests.layer_run import Inputs, assert_errs_at_most_twice_eager, assert_same_bits, poisoned_memory, relative_error
from tests.reference_math import Result
from tests.routing_cases import CASES, RoutingCase
from tests.virtual_ranks import DEVICE, VirtualRanks, inputs_of, ranks_of, run_layer

pytestmark = pytest.mark.gpu

_MORE = [
    RoutingCase(name="w8_uniform", tokens=(33, 1, 0, 65, 17, 128, 2, 64), num_experts=16, top_k=4),
    RoutingCase(name="w1_tokens_1023", tokens=(1023,), num_experts=12, top_k=3),
]
ALL = {**CASES, **{case.name: case for case in _MORE}}
EVERY_OTHER = [
    name for name in ALL if not name.startswith("tokens_") or name in ("tokens_1", "tokens_17", "tokens_129")
]


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.mark.parametrize("name", EVERY_OTHER)
def test_all_gradients_against_fp64(name: str) -> None:
    case = ALL[name]
    inputs = inputs_of(case)
    ranks = ranks_of(case, inputs)
    assert_errs_at_most_twice_eager(run_layer(ranks, inputs), inputs)
    ranks.close()


@pytest.mark.parametrize("sizes", [(64, 64), (256, 256), (512, 128), (576, 320), (64, 576)], ids=str)
def test_sizes(sizes: tuple[int, int]) -> None:
    """Also where tiles reach past the end of a matrix; to fp32 gradients the new gradient is added to the bit."""
    case = RoutingCase(name="sizes", tokens=(300, 213), num_experts=6, top_k=3)
    inputs = inputs_of(case, hidden=sizes[0], intermediate=sizes[1])
    ranks = ranks_of(case, inputs)
    result, added = run_layer(ranks, inputs), run_layer(ranks, inputs, accumulate=True)
    assert_errs_at_most_twice_eager(result, inputs)
    for name in ("dw1", "dw2"):
        assert torch.equal((getattr(added, name) + 1).float(), 1 + getattr(result, name).float()), name
    ranks.close()


def test_clamp_and_offset() -> None:
    case = CASES["k8_of_16"]
    inputs = inputs_of(case, Activation(clamp=0.5, linear_offset=1.0))
    ranks = ranks_of(case, inputs)
    assert_errs_at_most_twice_eager(run_layer(ranks, inputs), inputs)
    ranks.close()


@pytest.mark.parametrize("weights", ["zero", "negative"])
def test_router_weights_that_cannot_be_divided_by(weights: str) -> None:
    case = CASES["uniform"]
    inputs = inputs_of(case)
    probs = torch.where(torch.arange(256)[:, None] % 3 == 0, 0.0 if weights == "zero" else -inputs.probs, inputs.probs)
    inputs = replace(inputs, probs=probs)
    ranks = ranks_of(case, inputs)
    assert_errs_at_most_twice_eager(run_layer(ranks, inputs), inputs)
    ranks.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_where_weight_gradients_go(dtype: torch.dtype, accumulate: bool) -> None:
    """fp32 sums are exact to fp32, bf16 ones rounded once; experts without rows give exactly 0, or add nothing."""
    case = RoutingCase(
        name="sinks", tokens=(200, 100), num_experts=8, top_k=2, pick=CASES["half_of_each_rank_empty"].pick
    )
    inputs = inputs_of(case)
    ranks = ranks_of(case, inputs)
    wanted, got = run_layer(ranks, inputs), run_layer(ranks, inputs, dtype=dtype, accumulate=accumulate)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8
    for name in ("dw1", "dw2"):
        target, value = getattr(wanted, name), getattr(got, name)
        if accumulate:
            target, value = target + 1, value + 1
        assert relative_error(value, target) <= tolerance, name
        empty = (inputs.routing_map.sum(0) == 0).nonzero()[:, 0]
        assert empty.numel() > 0
        assert bool((getattr(got, name)[empty] == 0).all())
    ranks.close()


def test_gradients_that_begin_at_any_16_bytes() -> None:
    case = CASES["uniform"]
    inputs = inputs_of(case)
    ranks = ranks_of(case, inputs)
    for accumulate in (False, True):
        expected = run_layer(ranks, inputs, accumulate=accumulate)
        assert_same_bits(run_layer(ranks, inputs, accumulate=accumulate, offset=4), expected, accumulate)
    ranks.close()


@pytest.mark.parametrize(
    "activation", [Activation(), Activation(clamp=0.5, linear_offset=1.0)], ids=["plain", "clamped"]
)
@pytest.mark.parametrize("where", ["x", "dy"])
def test_what_is_no_number_stays_so_and_with_its_token(where: str, activation: Activation) -> None:
    case, token = CASES["uniform"], 5
    inputs = inputs_of(case, activation)
    bad = getattr(inputs, where).clone()
    bad[token] = float("nan" if where == "x" else "inf")
    ranks = ranks_of(case, inputs)
    clean, found = run_layer(ranks, inputs), run_layer(ranks, replace(inputs, **{where: bad}))
    routed = inputs.routing_map[token]
    for name in ("y", "dx", "dprobs"):
        clean_rows, rows = getattr(clean, name), getattr(found, name)
        others = torch.arange(len(rows)) != token
        assert torch.equal(rows[others], clean_rows[others]), name
        hit = rows[token][routed] if name == "dprobs" else rows[token]
        assert not bool(hit.isfinite().any()) or (name, where) == ("y", "dy"), name
    for name in ("dw1", "dw2"):
        clean_grads, grads = getattr(clean, name), getattr(found, name)
        assert torch.equal(grads[~routed], clean_grads[~routed]), name
        assert not bool(grads[routed].isfinite().all(dim=(1, 2)).any()), name
    ranks.close()


def test_two_microbatches_add_up_in_either_order() -> None:
    case = CASES["uniform"]
    a, b = inputs_of(case), inputs_of(case, seed=77)
    b = replace(b, w1=a.w1, w2=a.w2)
    ranks = ranks_of(case, a)
    weights = (a.w1.to(DEVICE), a.w2.to(DEVICE))
    alone = [run_layer(ranks, inputs) for inputs in (a, b)]
    for order in ((0, 1), (1, 0)):
        outputs = [
            ranks.forward(i.x.to(DEVICE), i.probs.to(DEVICE), i.routing_map.to(DEVICE), *weights) for i in (a, b)
        ]
        dw1, dw2 = (torch.zeros(w.shape, device=DEVICE) for w in weights)
        for which in order:
            dy = (a, b)[which].dy.to(DEVICE)
            dx, _ = ranks.backward(dy, outputs[which], *weights, dw1.unbind(), dw2.unbind(), accumulate=True)
            assert torch.equal(dx.cpu(), alone[which].dx), order
        assert relative_error(dw1.cpu(), alone[0].dw1 + alone[1].dw1) < 1e-6
        assert relative_error(dw2.cpu(), alone[0].dw2 + alone[1].dw2) < 1e-6
    ranks.close()


def test_frozen_weights_and_no_dx() -> None:
    case = CASES["uniform"]
    inputs = inputs_of(case)
    ranks = ranks_of(case, inputs)
    expected = run_layer(ranks, inputs)
    x, probs, routing_map = (t.to(DEVICE) for t in (inputs.x, inputs.probs, inputs.routing_map))
    w1, w2, dy = (t.to(DEVICE) for t in (inputs.w1, inputs.w2, inputs.dy))
    outputs = ranks.forward(x, probs, routing_map, w1, w2)
    for frozen1, frozen2 in (({0, 5}, set()), (set(), set(range(8))), (set(range(8)), set(range(8)))):
        dw1 = [None if e in frozen1 else torch.empty_like(w1[e], dtype=torch.float32) for e in range(8)]
        dw2 = [None if e in frozen2 else torch.empty_like(w2[e], dtype=torch.float32) for e in range(8)]
        for needs_dx in (True, False):
            dx, dprobs = ranks.backward(dy, outputs, w1, w2, dw1, dw2, accumulate=False, needs_dx=needs_dx)
            assert torch.equal(dprobs.cpu(), expected.dprobs)
            assert not needs_dx or torch.equal(dx.cpu(), expected.dx)
            for sinks, wanted in ((dw1, expected.dw1), (dw2, expected.dw2)):
                assert all(g is None or torch.equal(g.double().cpu(), w) for g, w in zip(sinks, wanted, strict=True))
    ranks.close()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_same_bits_for_any_number_of_ranks_and_options(world: int) -> None:
    tokens, experts = 512, 32
    whole = RoutingCase(name="ranks", tokens=(tokens,), num_experts=experts, top_k=6)
    inputs = inputs_of(whole)
    alone = ranks_of(whole, inputs)
    expected = run_layer(alone, inputs)
    alone.close()
    split = RoutingCase(name="ranks", tokens=(tokens // world,) * world, num_experts=experts, top_k=6)
    for options in ({}, {"comm_sms": 1}, {"comm_sms": 6}, {"recompute": True}, {"save_x": False}):
        ranks = ranks_of(split, inputs, **options)
        assert_same_bits(run_layer(ranks, inputs), expected, options)
        ranks.close()


def test_same_bits_in_every_run_whatever_the_timing() -> None:
    case = RoutingCase(name="timing", tokens=(257, 64, 129, 200), num_experts=16, top_k=4)
    inputs = inputs_of(case)
    ranks = ranks_of(case, inputs)
    first, rng = run_layer(ranks, inputs), random.Random(0)
    for _ in range(50):
        delays = [rng.randrange(0, 200_000) for _ in case.tokens]
        assert_same_bits(run_layer(ranks, inputs, poison=False, delays=delays), first, delays)
    ranks.close()


def _layer(tokens: int = 192) -> tuple[VirtualRanks, Inputs]:
    case = RoutingCase(name="layer", tokens=(tokens,), num_experts=8, top_k=2)
    inputs = inputs_of(case)
    return ranks_of(case, inputs), inputs


def _parameters(inputs: Inputs) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    w1 = [torch.nn.Parameter(w.to(DEVICE).clone()) for w in inputs.w1]
    w2 = [torch.nn.Parameter(w.to(DEVICE).clone()) for w in inputs.w2]
    return w1, w2


def _through_autograd(ranks: VirtualRanks, inputs: Inputs, *, fuse: bool) -> tuple[Tensor, ...]:
    w1, w2 = _parameters(inputs)
    if fuse:
        for weight in (*w1, *w2):
            weight.main_grad = torch.zeros(weight.shape, device=DEVICE)  # type: ignore[attr-defined]
    x, probs = (t.to(DEVICE).requires_grad_() for t in (inputs.x, inputs.probs))
    y = apply_experts(
        ranks.backends[0],
        x,
        probs,
        inputs.routing_map.to(DEVICE),
        ExpertParams(tuple(w1), 8),
        ExpertParams(tuple(w2), 8),
        layer=1,
        fuse_grad_accumulation=fuse,
    )
    kept = y.detach().clone()
    y.backward(inputs.dy.to(DEVICE))
    name = "main_grad" if fuse else "grad"
    if fuse:
        assert all(weight.grad_added_to_main_grad for weight in (*w1, *w2))  # type: ignore[attr-defined]
    dw = [torch.stack([getattr(weight, name) for weight in weights]) for weights in (w1, w2)]
    assert x.grad is not None and probs.grad is not None
    return tuple(t.cpu() for t in (kept, x.grad, probs.grad, *dw))


@pytest.mark.parametrize("fuse", [False, True])
def test_through_autograd(fuse: bool) -> None:
    ranks, inputs = _layer()
    assert_errs_at_most_twice_eager(Result(*_through_autograd(ranks, inputs, fuse=fuse)), inputs)
    ranks.close()


@pytest.mark.parametrize("fuse", [False, True])
def test_graph_replay_of_forward_and_backward(fuse: bool) -> None:
    """Captured once, replayed 100 times with new x, probs, routing and dy; equal to eager in every bit.

    ``main_grad`` moves before the capture, so that the tables of its addresses are made in it.
    """
    torch.use_deterministic_algorithms(False)
    ranks, inputs = _layer()
    w1, w2 = _parameters(inputs)
    params = (ExpertParams(tuple(w1), 8), ExpertParams(tuple(w2), 8))
    x, probs = (t.to(DEVICE).requires_grad_() for t in (inputs.x, inputs.probs))
    routing_map, dy = inputs.routing_map.to(DEVICE), inputs.dy.to(DEVICE)
    sums: list[Tensor] = []

    def move_main_grad() -> None:
        sums[:] = [torch.zeros(weight.shape, device=DEVICE) for weight in (*w1, *w2)]
        for weight, total in zip((*w1, *w2), sums, strict=True):
            weight.main_grad = total  # type: ignore[attr-defined]

    def call() -> tuple[Tensor, ...]:
        for total in sums:
            total.zero_()
        y = apply_experts(ranks.backends[0], x, probs, routing_map, *params, layer=1, fuse_grad_accumulation=fuse)
        grads = torch.autograd.grad(y, (x, probs, *w1, *w2), dy)
        return (y.detach(), *(grads[:2] if fuse else grads), *sums)

    if fuse:
        move_main_grad()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    if fuse:
        move_main_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    case = RoutingCase(name="layer", tokens=(192,), num_experts=8, top_k=2)
    for seed in range(100):
        new = inputs_of(case, seed=100 + seed)
        with torch.no_grad():
            for target, source in ((x, new.x), (probs, new.probs), (routing_map, new.routing_map), (dy, new.dy)):
                target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in captured]
        if seed % 10 == 0:
            assert all(torch.equal(a, b) for a, b in zip(replayed, call(), strict=True)), f"replay {seed}"
    ranks.close()


def test_no_host_synchronisation() -> None:
    torch.use_deterministic_algorithms(False)
    ranks, inputs = _layer()
    _through_autograd(ranks, inputs, fuse=True)
    backend = ranks.backends[0]
    w1, w2 = _parameters(inputs)
    for weight in (*w1, *w2):
        weight.main_grad = torch.zeros(weight.shape, device=DEVICE)  # type: ignore[attr-defined]
    first, second = (ExpertParams(tuple(w), 8) for w in (w1, w2))
    sinks = [[weight.main_grad for weight in weights] for weights in (w1, w2)]  # type: ignore[attr-defined]
    backend.prepare(first.matrices(), second.matrices(), WeightGrads(w1=sinks[0], w2=sinks[1], accumulate=True))
    x, probs = (t.to(DEVICE).requires_grad_() for t in (inputs.x, inputs.probs))
    routing_map, dy = inputs.routing_map.to(DEVICE), inputs.dy.to(DEVICE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = apply_experts(backend, x, probs, routing_map, first, second, layer=1, fuse_grad_accumulation=True)
        y.backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ranks.close()


def test_no_growth_over_many_calls() -> None:
    torch.use_deterministic_algorithms(False)
    ranks, inputs = _layer()
    for _ in range(3):
        _through_autograd(ranks, inputs, fuse=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    x, probs, routing_map, w1, w2 = (
        t.to(DEVICE) for t in (inputs.x, inputs.probs, inputs.routing_map, inputs.w1, inputs.w2)
    )
    first, second = list(w1), list(w2)
    backend = ranks.backends[0]
    for _ in range(1000):
        schedule = backend.build_schedule(x, probs, routing_map, layer=1)
        backend.forward(x, schedule, first, second, save=False, layer=1)
    del x, probs, routing_map, w1, w2, first, second, schedule
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    ranks.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_probabilities_have_their_dtype(dtype: torch.dtype) -> None:
    """Rounded once from the fp32 sum, 0 off-route; tokens without a route have a row of zeros."""
    torch.use_deterministic_algorithms(False)
    ranks, inputs = _layer()
    routing_map = inputs.routing_map.clone()
    routing_map[::7] = False
    inputs = replace(inputs, probs=(inputs.probs * routing_map).to(dtype).float(), routing_map=routing_map)
    backend = ranks.backends[0]
    w1, w2 = list(inputs.w1.to(DEVICE)), list(inputs.w2.to(DEVICE))
    x, probs, routes, dy = (t.to(DEVICE) for t in (inputs.x, inputs.probs, inputs.routing_map, inputs.dy))
    grads = WeightGrads(w1=[None] * 8, w2=[None] * 8, accumulate=False)
    found = []
    for kind in (torch.float32, dtype):
        dprobs = torch.full(probs.shape, float("nan"), dtype=kind, device=DEVICE)
        schedule = backend.build_schedule(x, probs.to(kind), routes, layer=1)
        saved = backend.forward(x, schedule, w1, w2, save=True, layer=1)[1]
        assert saved is not None
        backend.backward(dy, saved, w1, w2, grads, needs_dx=False, dprobs=dprobs, layer=1)
        found.append(dprobs)
    assert torch.equal(found[1], found[0].to(dtype))
    assert bool((found[0][~routes] == 0).all()) and bool((found[0][routes] != 0).any())
    ranks.close()


@pytest.mark.parametrize("options", [{}, {"save_x": False}, {"recompute": True}, {"ring_rows": 1024}], ids=str)
def test_memory_is_what_the_formulas_say(options: dict[str, object]) -> None:
    """``memory.saved_bytes`` is kept from forward to backward; beyond that both make nothing but their results."""
    torch.use_deterministic_algorithms(False)
    tokens = 2048
    case = RoutingCase(name="memory", tokens=(tokens,), num_experts=8, top_k=2)
    inputs = inputs_of(case, hidden=1024, intermediate=512)
    ranks = ranks_of(case, inputs, **options)
    backend = ranks.backends[0]
    x, probs, routing_map, dy = (t.to(DEVICE) for t in (inputs.x, inputs.probs, inputs.routing_map, inputs.dy))
    w1, w2 = list(inputs.w1.to(DEVICE)), list(inputs.w2.to(DEVICE))
    grads = WeightGrads(w1=[torch.empty_like(w) for w in w1], w2=[torch.empty_like(w) for w in w2], accumulate=False)
    config, dprobs = backend.config, torch.empty_like(probs)
    kept = memory.saved_bytes(
        backend.shape, tokens, backend.sizes(tokens).ring_rows, recompute=config.recompute, save_x=config.save_x
    )
    kept -= x.numel() * x.element_size()  # the caller's own
    result = x.numel() * x.element_size()

    def run() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        schedule = backend.build_schedule(x, probs, routing_map, layer=1)
        y, saved = backend.forward(x, schedule, w1, w2, save=True, layer=1)
        forward_peak = torch.cuda.max_memory_allocated() - before
        del y, schedule
        between = torch.cuda.memory_allocated() - before
        assert saved is not None
        torch.cuda.reset_peak_memory_stats()
        backend.backward(dy, saved, w1, w2, grads, needs_dx=True, dprobs=dprobs, layer=1)
        return forward_peak, between, torch.cuda.max_memory_allocated() - before

    run()  # tables of addresses
    forward_peak, between, backward_peak = run()
    rounding = 16 * 512
    assert kept <= between <= kept + rounding
    assert kept + result <= forward_peak <= kept + result + rounding
    assert kept + result <= backward_peak <= kept + result + rounding
    ranks.close()
