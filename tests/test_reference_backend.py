"""The reference backend against fp64, against eager torch's own error, and bit against bit."""

from __future__ import annotations

import functools
import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mok_megatron.backends.base import WeightGrads
from mok_megatron.backends.movement import Mover
from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.config import Activation, MoeShape, MokConfig
from mok_megatron.schedule import build_schedule, compact
from tests.distributed import run_ranks
from tests.layer_run import (
    PLAIN,
    QUANTITIES,
    Inputs,
    assert_errs_at_most_twice_eager,
    assert_same_bits,
    eager,
    exact,
    join_ranks,
    make_backend,
    make_inputs,
    poisoned_memory,
    relative_error,
    run_layer,
)
from tests.reference_math import Result
from tests.routing_cases import CASES, cases_for

CLAMPED = Activation(clamp=0.4, linear_offset=0.5)
DTYPES = (torch.float32, torch.bfloat16)
VARIANTS = {
    "recompute": MokConfig(recompute=True),
    "no_saved_x": MokConfig(save_x=False),
    "recompute_no_saved_x": MokConfig(recompute=True, save_x=False),
}
RERUN = "dropped"
"""The two-rank case that also runs again with every variant and with ranks out of step."""

Key = tuple[str, torch.dtype, str]


@pytest.fixture(autouse=True)
def _one_thread_poisoned() -> Any:
    torch.set_num_threads(1)
    with poisoned_memory():
        yield


def _inputs(name: str, dtype: torch.dtype, activation: Activation = PLAIN) -> Inputs:
    return make_inputs(CASES[name], dtype=dtype, seed=len(name), activation=activation)


def _alone(inputs: Inputs, config: MokConfig | None = None) -> Result:
    """The whole batch on one rank."""
    return run_layer(inputs, make_backend(inputs, config=config), (inputs.x.shape[0],))


def _stagger(group: dist.ProcessGroup, seed: int) -> None:
    time.sleep(random.Random(seed * 100 + group.rank()).random() * 0.2)


def _run_all_cases(rank: int, world: int) -> dict[Key, Result]:
    group, results = dist.group.WORLD, {}
    assert group is not None
    with poisoned_memory():
        for case in cases_for(world):
            for dtype in DTYPES:
                inputs = _inputs(case.name, dtype)
                results[case.name, dtype, ""] = run_layer(inputs, make_backend(inputs, group), case.tokens, rank)
        if world == 2:
            tokens = CASES[RERUN].tokens
            for dtype in DTYPES:
                inputs = _inputs(RERUN, dtype)
                for name, config in VARIANTS.items():
                    backend = make_backend(inputs, group, config)
                    results[RERUN, dtype, name] = run_layer(inputs, backend, tokens, rank)
                _stagger(group, seed=1)
                results[RERUN, dtype, "again"] = run_layer(inputs, make_backend(inputs, group), tokens, rank)
    return results


@functools.cache
def _results_of(world: int) -> dict[Key, Result]:
    """Joined results of every case of one EP size, from one spawn; W=1 runs here."""
    if world == 1:
        return {(case.name, dtype, ""): _alone(_inputs(case.name, dtype)) for case in cases_for(1) for dtype in DTYPES}
    by_rank = run_ranks(world, _run_all_cases, timeout_s=300)
    return {key: join_ranks([results[key] for results in by_rank]) for key in by_rank[0]}


def _result(name: str, dtype: torch.dtype, variant: str = "") -> Result:
    return _results_of(CASES[name].world)[name, dtype, variant]


def _check_fp32(actual: Result, inputs: Inputs) -> None:
    expected = exact(inputs)
    for name in QUANTITIES:
        error = relative_error(getattr(actual, name), getattr(expected, name))
        assert error < 1e-6, f"{name}: relative error {error:.3g}"


@pytest.mark.parametrize("name", CASES)
def test_fp32_against_fp64(name: str) -> None:
    _check_fp32(_result(name, torch.float32), _inputs(name, torch.float32))


@pytest.mark.parametrize("name", CASES)
def test_bf16_within_twice_the_error_of_eager_torch(name: str) -> None:
    assert_errs_at_most_twice_eager(_result(name, torch.bfloat16), _inputs(name, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.world > 1])
def test_the_number_of_ranks_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    assert_same_bits(_result(name, dtype), _alone(_inputs(name, dtype)), f"W={CASES[name].world} against W=1")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", [*VARIANTS, "again"])
def test_options_and_timing_change_no_bit_on_two_ranks(variant: str, dtype: torch.dtype) -> None:
    assert_same_bits(_result(RERUN, dtype, variant), _result(RERUN, dtype), variant)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_options_change_no_bit_on_one_rank(variant: str, dtype: torch.dtype) -> None:
    inputs = _inputs("w1_e60_k4", dtype, CLAMPED)
    assert_same_bits(_alone(inputs, VARIANTS[variant]), _alone(inputs), variant)


def test_clamp_and_offset() -> None:
    """About 30 % of the gates and more of the ups lie beyond the limit, forward and backward."""
    inputs = _inputs("w1_uniform", torch.float32, CLAMPED)
    gate, up = torch.einsum("th,eih->tei", inputs.x, inputs.w1).chunk(2, dim=2)
    assert CLAMPED.clamp is not None
    assert 0.2 < (gate > CLAMPED.clamp).float().mean() < 0.5
    assert 0.2 < (up.abs() > CLAMPED.clamp).float().mean() < 0.8
    _check_fp32(_alone(inputs), inputs)
    rounded = _inputs("w1_uniform", torch.bfloat16, CLAMPED)
    assert_errs_at_most_twice_eager(_alone(rounded), rounded)


def test_limits_are_inclusive_as_in_torch_clamp() -> None:
    """A gate and an up exactly on the limit pass their gradient."""
    inputs = _inputs("w1_one_expert_in_all", torch.float64, Activation(clamp=0.5))
    x, w1 = torch.zeros_like(inputs.x), torch.zeros_like(inputs.w1)
    x[:, 0], w1[:, :, 0] = 1, 0.5
    inputs = replace(inputs, x=x, w1=w1)
    assert relative_error(_alone(inputs).dw1, eager(inputs).dw1) < 1e-12
    assert _alone(inputs).dw1.norm() > 0


@pytest.mark.parametrize("sign", [-1.0, 0.0])
def test_gradients_are_right_for_weights_that_are_not_positive(sign: float) -> None:
    """Below the validation any finite router weight has right gradients: nothing divides by it."""
    inputs = _inputs("w1_uniform", torch.float64)
    inputs = replace(inputs, probs=inputs.probs * sign)
    backend = make_backend(inputs)
    schedule = backend.build_schedule(inputs.x, inputs.probs, inputs.routing_map, layer=1)
    w1, w2 = list(inputs.w1), list(inputs.w2)
    _, saved = backend.forward(inputs.x, schedule, w1, w2, save=True, layer=1)
    assert saved is not None
    dw1, dw2 = torch.empty_like(inputs.w1), torch.empty_like(inputs.w2)
    sinks = WeightGrads(w1=list(dw1), w2=list(dw2), accumulate=False)
    dprobs = torch.full_like(inputs.probs, float("nan"))
    dx = backend.backward(inputs.dy, saved, w1, w2, sinks, needs_dx=True, dprobs=dprobs, layer=1)
    expected = exact(inputs)
    assert dx is not None
    assert relative_error(dx, expected.dx) < 1e-12
    assert relative_error(dw1, expected.dw1) < 1e-12
    assert relative_error(dw2, expected.dw2) < 1e-12
    assert relative_error(dprobs, expected.dprobs) < 1e-12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 48), (100, 36), (512, 256)])
def test_a_token_does_not_depend_on_the_others(dtype: torch.dtype, hidden: int, intermediate: int) -> None:
    """Other tokens get other values, routes and places; the kept tokens' y, dx and dprobs keep every bit."""
    case = CASES["w1_uniform"]
    sizes: dict[str, Any] = {"dtype": dtype, "hidden": hidden, "intermediate": intermediate}
    first, second = make_inputs(case, seed=1, **sizes), make_inputs(case, seed=2, **sizes)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3))
    kept, place = order[:20], order.flip(0)[:20]
    fields = {}
    for name in ("x", "probs", "routing_map", "dy"):
        mixed = getattr(second, name).clone()
        mixed[place] = getattr(first, name)[kept]
        fields[name] = mixed
    before, after = _alone(first), _alone(replace(first, **fields))
    for name in ("y", "dx", "dprobs"):
        assert torch.equal(getattr(before, name)[kept], getattr(after, name)[place]), name


@pytest.mark.parametrize("accumulate_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradients_accumulate_or_overwrite(accumulate_dtype: torch.dtype) -> None:
    inputs = _inputs("w1_one_row_each", torch.bfloat16)
    routing_map = inputs.routing_map.clone()
    routing_map[:, 4:] = False
    inputs = replace(inputs, routing_map=routing_map)
    backend = make_backend(inputs)
    w1, w2 = list(inputs.w1), list(inputs.w2)
    schedule = backend.build_schedule(inputs.x, inputs.probs, inputs.routing_map, layer=1)
    _, saved = backend.forward(inputs.x, schedule, w1, w2, save=True, layer=1)
    assert saved is not None

    def run(fill: float, accumulate: bool) -> list[torch.Tensor]:
        grads = [torch.full(w.shape, fill, dtype=accumulate_dtype) for w in (inputs.w1, inputs.w2)]
        sinks = WeightGrads(w1=list(grads[0]), w2=list(grads[1]), accumulate=accumulate)
        backend.backward(inputs.dy, saved, w1, w2, sinks, needs_dx=False, dprobs=None, layer=1)
        return grads

    for fresh, added in zip(run(float("nan"), False), run(0.5, True), strict=True):
        assert not fresh[4:].any(), "experts without tokens get exactly 0"
        assert (added[4:] == 0.5).all(), "experts without tokens add nothing"
        assert fresh[:4].abs().sum() > 0
        assert relative_error(added, fresh.float() + 0.5) < (1e-6 if accumulate_dtype == torch.float32 else 1e-2)


def test_weight_gradients_of_a_bf16_layer_are_summed_in_fp32() -> None:
    """Equal rows: 32 times the rows give 32 times the gradient, to fp32 precision; bf16 sums would drift."""

    def grads(tokens: int) -> list[torch.Tensor]:
        inputs = make_inputs(replace(CASES["w1_one_expert_in_all"], tokens=(32,)), dtype=torch.bfloat16)
        x, dy, probs, routing_map = (
            t[:1].repeat(tokens, 1) for t in (inputs.x, inputs.dy, inputs.probs, inputs.routing_map)
        )
        backend = make_backend(inputs)
        w1, w2 = list(inputs.w1), list(inputs.w2)
        schedule = backend.build_schedule(x, probs, routing_map, layer=1)
        _, saved = backend.forward(x, schedule, w1, w2, save=True, layer=1)
        assert saved is not None
        sinks = [torch.zeros(w.shape[1:]) for w in (inputs.w1, inputs.w2)]
        weight_grads = WeightGrads(w1=sinks[:1], w2=sinks[1:], accumulate=True)
        backend.backward(dy, saved, w1, w2, weight_grads, needs_dx=False, dprobs=None, layer=1)
        return sinks

    for few, many in zip(grads(32), grads(1024), strict=True):
        assert relative_error(many, 32 * few) < 1e-6


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combine_sums_in_fp32_by_ascending_expert_and_rounds_once(dtype: torch.dtype, weighted: bool) -> None:
    """K=8, bit for bit: an error that grows with K, or another order, would show."""
    case = replace(CASES["k8_of_16"], tokens=(65,))
    probs, routing_map = case.generate(seed=0)
    experts, weights = compact(probs, routing_map, case.top_k)
    schedule = build_schedule([experts], weights, rank=0, num_experts=case.num_experts, block_rows=32)
    rows = torch.randn(schedule.row_src_slot.numel(), 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    combined = Mover(schedule, None).combine(rows, weights if weighted else None, torch.float32)
    for token in range(65):
        total = torch.zeros(24)
        for k in range(case.top_k):
            row = rows[int(schedule.slot_dst_row[token, k])].float()
            total = total + (row * weights[token, k] if weighted else row)
        assert torch.equal(combined[token], total.to(dtype))


def test_nothing_is_kept_beyond_what_the_options_say() -> None:
    inputs = _inputs("w1_uniform", torch.float32)
    for config, kept in (
        (MokConfig(), (True, True)),
        (MokConfig(save_x=False), (True, False)),
        (MokConfig(recompute=True), (False, False)),
    ):
        backend = make_backend(inputs, config=config)
        schedule = backend.build_schedule(inputs.x, inputs.probs, inputs.routing_map, layer=1)
        _, saved = backend.forward(inputs.x, schedule, list(inputs.w1), list(inputs.w2), save=True, layer=1)
        assert saved is not None
        assert (saved.gate_up is not None, saved.x_rows is not None) == kept
        _, nothing = backend.forward(inputs.x, schedule, list(inputs.w1), list(inputs.w2), save=False, layer=1)
        assert nothing is None


def test_wrong_layers_are_refused() -> None:
    shape = MoeShape(hidden=64, intermediate=48, num_experts=8, top_k=2, ep_size=2)
    with pytest.raises(ValueError, match=r"has 1 rank.*ep_size=2"):
        ReferenceBackend(shape, MokConfig(), None, "cpu", torch.float32)
    with pytest.raises(ValueError, match=r"float32, bfloat16 and float64 layers, got torch.float16"):
        ReferenceBackend(replace(shape, ep_size=1), MokConfig(), None, "cpu", torch.float16)
    inputs = _inputs("w1_uniform", torch.float32)
    backend = make_backend(inputs)
    schedule = backend.build_schedule(inputs.x, inputs.probs, inputs.routing_map, layer=1)
    w1, w2 = list(inputs.w1), list(inputs.w2)
    with pytest.raises(ValueError, match=r"layer 7: w1 has 7 experts, the rank holds 8"):
        backend.forward(inputs.x, schedule, w1[1:], w2, save=False, layer=7)
    with pytest.raises(ValueError, match=r"layer 7: w2\[0\] must be \[64, 48\].*got \[48, 64\]"):
        backend.forward(inputs.x, schedule, w1, [w.T for w in w2], save=False, layer=7)
    with pytest.raises(ValueError, match=r"layer 7: x must be .*float32.*got .*bfloat16"):
        backend.forward(inputs.x.bfloat16(), schedule, w1, w2, save=False, layer=7)
