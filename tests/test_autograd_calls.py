"""The autograd function: what is kept for how long, calls in flight and repeated, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mok_megatron.autograd import apply_experts
from mok_megatron.backends.base import Saved
from tests.autograd_layer import leaf, make_layer, spy_on, stacked
from tests.layer_run import exact, make_inputs, poisoned_memory, relative_error
from tests.routing_cases import CASES


@pytest.fixture(autouse=True)
def _poison() -> Any:
    with poisoned_memory():
        yield


def _kept_tensors(run: Callable[[], Any]) -> int:
    count = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return count


def test_nothing_is_kept_when_no_gradient_can_be_asked_for() -> None:
    layer = make_layer()
    seen = spy_on(layer, "forward")
    with torch.no_grad():
        assert _kept_tensors(lambda: layer(leaf(layer.inputs.x))) == 0
        assert layer(leaf(layer.inputs.x)).grad_fn is None
    for parameter in layer.parameters:
        parameter.requires_grad_(False)
    assert _kept_tensors(lambda: layer(layer.inputs.x)) == 0
    assert _kept_tensors(lambda: layer(leaf(layer.inputs.x))) > 0
    assert [options["save"] for _, options in seen] == [False, False, False, True]


def test_backward_frees_what_was_kept() -> None:
    """Everything goes through save_for_backward, so it dies with backward although y and its graph still live."""
    layer = make_layer()
    kept: list[weakref.ref[Tensor]] = []
    original = layer.backend.forward

    def spy(*args: Any, **options: Any) -> tuple[Tensor, Saved | None]:
        y, saved = original(*args, **options)
        assert saved is not None and saved.gate_up is not None and saved.x_rows is not None
        kept.extend(weakref.ref(tensor) for tensor in (saved.gate_up, saved.x_rows, saved.schedule.rows))
        return y, saved

    layer.backend.forward = spy  # type: ignore[method-assign]
    y = layer(leaf(layer.inputs.x))
    gc.collect()
    assert [tensor() is None for tensor in kept] == [False] * 3
    y.backward(layer.inputs.dy)
    gc.collect()
    assert [tensor() is None for tensor in kept] == [True] * 3
    assert y.grad_fn is not None


def test_saved_tensor_hooks_may_copy_every_tensor() -> None:
    """As offloading does: what comes back are other tensor objects, without the parameters' attributes."""
    layer = make_layer(dtype=torch.float32, fuse=True, main_grad=torch.float32)
    x = leaf(layer.inputs.x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone()):
        y = layer(x)
    y.backward(layer.inputs.dy)
    expected = exact(layer.inputs)
    assert x.grad is not None and relative_error(x.grad, expected.dx) < 1e-6
    assert relative_error(stacked(layer, "main_grad")[0], expected.dw1 + 1) < 1e-6
    assert all(p.grad_added_to_main_grad for p in layer.parameters)  # type: ignore[attr-defined]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(use_reentrant: bool) -> None:
    results = []
    for wrap in (False, True):
        layer = make_layer(dtype=torch.bfloat16, fuse=True, main_grad=torch.float32)
        x, probs = leaf(layer.inputs.x), leaf(layer.inputs.probs)
        y = checkpoint(layer, x, probs, use_reentrant=use_reentrant) if wrap else layer(x, probs)
        y.backward(layer.inputs.dy)
        results.append((y, x.grad, probs.grad, *stacked(layer, "main_grad")))
    for plain, again in zip(*results, strict=True):
        assert plain is not None and again is not None and torch.equal(plain, again)


def test_output_may_be_freed_before_backward() -> None:
    """Pipeline schedules drop the output's data and keep its graph."""
    layer = make_layer()
    x = leaf(layer.inputs.x)
    y = layer(x)
    y.data = torch.empty(1, dtype=y.dtype)
    torch.autograd.Variable._execution_engine.run_backward(
        (y,), (layer.inputs.dy,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
    assert x.grad is not None and relative_error(x.grad, exact(layer.inputs).dx) < 1e-12


@pytest.mark.parametrize("fuse", [False, True])
def test_one_layer_twice_in_one_graph(fuse: bool) -> None:
    """f(f(x)): both uses contribute to the weights' gradient, checked against plain autograd."""
    layer = make_layer(fuse=fuse, main_grad=torch.float64)
    x = leaf(layer.inputs.x)
    layer(layer(x)).backward(layer.inputs.dy)

    w1, w2, other = leaf(layer.inputs.w1), leaf(layer.inputs.w2), leaf(layer.inputs.x)

    def plain(rows: Tensor) -> Tensor:
        gate, up = torch.einsum("th,eih->tei", rows, w1).chunk(2, dim=2)
        return torch.einsum("tei,ehi,te->th", torch.nn.functional.silu(gate) * up, w2, layer.inputs.probs)

    plain(plain(other)).backward(layer.inputs.dy)
    assert x.grad is not None and other.grad is not None and relative_error(x.grad, other.grad) < 1e-12
    for actual, wanted in zip(stacked(layer, "main_grad" if fuse else "grad"), (w1.grad, w2.grad), strict=True):
        assert wanted is not None and relative_error(actual - int(fuse), wanted) < 1e-12


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_microbatches_in_flight_with_backward_in_any_order(order: tuple[int, ...]) -> None:
    """Three microbatches of other sizes and routings through one backend and one set of weights."""
    layer = make_layer(dtype=torch.float32, fuse=True, main_grad=torch.float32)
    names = ("w1_uniform", "w1_long", "tokens_17")
    batches = [make_inputs(CASES[name], dtype=torch.float32, hidden=16, intermediate=12, seed=9) for name in names]
    batches = [replace(batch, w1=layer.inputs.w1, w2=layer.inputs.w2) for batch in batches]
    expected = [exact(batch) for batch in batches]
    leaves = [leaf(batch.x) for batch in batches]
    outputs = [
        apply_experts(
            layer.backend, x, batch.probs, batch.routing_map, layer.w1, layer.w2, layer=1, fuse_grad_accumulation=True
        )
        for x, batch in zip(leaves, batches, strict=True)
    ]
    for number in order:
        outputs[number].backward(batches[number].dy)
        grad = leaves[number].grad
        assert grad is not None and relative_error(grad, expected[number].dx) < 1e-6
    for name, actual in zip(("dw1", "dw2"), stacked(layer, "main_grad"), strict=True):
        assert relative_error(actual - 1, sum(getattr(result, name) for result in expected)) < 1e-6


def test_weights_are_read_where_they_are_now() -> None:
    """The distributed optimizer points parameters at other storage; the old one may be anything afterwards."""
    layer = make_layer(dtype=torch.float32)
    x = leaf(layer.inputs.x)
    y = layer(x)
    for parameter in layer.parameters:
        old = parameter.data
        parameter.data = old.clone()
        old.fill_(float("nan"))
    y.backward(layer.inputs.dy)
    assert x.grad is not None and relative_error(x.grad, exact(layer.inputs).dx) < 1e-6


@pytest.mark.parametrize("changed", ["weight", "input"])
def test_a_change_in_place_before_backward_is_noticed(changed: str) -> None:
    layer = make_layer()
    x = leaf(layer.inputs.x)
    rows = x * 1
    y = layer(rows)
    with torch.no_grad():
        (layer.parameters[0] if changed == "weight" else rows).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(layer.inputs.dy)


def test_steps_of_an_optimizer_follow_plain_autograd() -> None:
    """Three steps of two microbatches: stale weights or gradients of an earlier step would show."""
    layer = make_layer(fuse=True, main_grad=torch.float64)
    weights = [leaf(layer.inputs.w1), leaf(layer.inputs.w2)]
    i = layer.inputs
    for step in range(3):
        for parameter in layer.parameters:
            parameter.main_grad.zero_()  # type: ignore[attr-defined]
            parameter.grad = None
        expected = [torch.zeros_like(w) for w in weights]
        for micro in range(2):
            x = i.x.roll(step * 2 + micro, 0)
            layer(leaf(x)).backward(i.dy)
            part = exact(replace(i, x=x, w1=weights[0].detach(), w2=weights[1].detach()))
            expected = [expected[0] + part.dw1, expected[1] + part.dw2]
        with torch.no_grad():
            for parameter in layer.parameters:
                parameter -= 0.1 * parameter.main_grad  # type: ignore[attr-defined]
            for weight, grad in zip(weights, expected, strict=True):
                weight -= 0.1 * grad
        for params, weight in zip((layer.w1, layer.w2), weights, strict=True):
            assert relative_error(torch.stack(params.matrices()), weight.detach()) < 1e-12


def test_backward_twice_needs_retain_graph_and_then_gives_the_same() -> None:
    layer = make_layer()
    x = leaf(layer.inputs.x)
    y = layer(x)
    (first,) = torch.autograd.grad(y, x, layer.inputs.dy, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, layer.inputs.dy)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, layer.inputs.dy)


def test_second_derivatives_are_refused() -> None:
    layer = make_layer()
    x = leaf(layer.inputs.x)
    with pytest.raises(RuntimeError, match=r"layer 3: the mok experts have no second derivative.*create_graph=True"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)


def test_bad_routing_is_refused_before_anything_runs() -> None:
    layer = make_layer()
    layer.backend.build_schedule = None  # type: ignore[assignment, method-assign]
    bad = layer.inputs.probs.clone()
    bad[layer.inputs.routing_map] = -1
    with pytest.raises(ValueError, match="not a finite number >= 0"):
        layer(layer.inputs.x, bad)


@pytest.mark.parametrize("weights", ["w1", "w2"])
def test_another_dtype_than_the_weights_is_refused_before_anything_runs(weights: str) -> None:
    layer = make_layer()
    layer.backend.build_schedule = None  # type: ignore[assignment, method-assign]
    params = getattr(layer, weights)
    for parameter in params.parameters:
        parameter.data = parameter.data.to(torch.bfloat16)
    with pytest.raises(ValueError, match=rf"layer 3: x is torch.float64 on cpu but {weights} is torch.bfloat16 on cpu"):
        layer(layer.inputs.x)
