"""The autograd function: gradients, ``main_grad``, what is kept for how long, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mok_megatron.autograd import ExpertParams, apply_experts
from mok_megatron.backends.base import Saved
from mok_megatron.config import Activation
from tests.layer_run import PLAIN, Inputs, exact, make_backend, make_inputs, poisoned_memory, relative_error
from tests.routing_cases import CASES, RoutingCase


@pytest.fixture(autouse=True)
def _poison() -> Any:
    with poisoned_memory():
        yield


@dataclass
class Layer:
    """A layer with its own parameters, fed from ``inputs``."""

    inputs: Inputs
    w1: ExpertParams
    w2: ExpertParams
    fuse: bool = False

    def __post_init__(self) -> None:
        self.backend = make_backend(self.inputs)

    def __call__(self, x: Tensor, probs: Tensor | None = None) -> Tensor:
        probs = self.inputs.probs if probs is None else probs
        routing_map = self.inputs.routing_map
        fuse = self.fuse
        return apply_experts(
            self.backend, x, probs, routing_map, self.w1, self.w2, layer=3, fuse_grad_accumulation=fuse
        )

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.w1.parameters, *self.w2.parameters]


Grouping = Callable[[Tensor], tuple[Tensor, ...]]

GROUPINGS: dict[str, Grouping] = {
    "per_expert": lambda w: tuple(torch.nn.Parameter(expert.clone()) for expert in w),
    "grouped_3d": lambda w: (torch.nn.Parameter(w.clone()),),
    "grouped_2d": lambda w: (torch.nn.Parameter(w.flatten(0, 1).clone()),),
}


def make_layer(
    *,
    case: RoutingCase = CASES["w1_uniform"],
    dtype: torch.dtype = torch.float64,
    grouping: str = "per_expert",
    fuse: bool = False,
    main_grad: torch.dtype | None = None,
    seed: int = 0,
    activation: Activation = PLAIN,
    hidden: int = 16,
    intermediate: int = 12,
) -> Layer:
    """``main_grad`` gives every parameter a main_grad of that dtype filled with 1 and Megatron's flag, unset."""
    inputs = make_inputs(case, dtype=dtype, hidden=hidden, intermediate=intermediate, seed=seed, activation=activation)
    split = GROUPINGS[grouping]
    layer = Layer(
        inputs, ExpertParams(split(inputs.w1), case.num_experts), ExpertParams(split(inputs.w2), case.num_experts), fuse
    )
    if main_grad is not None:
        for parameter in layer.parameters:
            parameter.main_grad = torch.ones(parameter.shape, dtype=main_grad)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    return layer


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def stacked(layer: Layer, attribute: str) -> tuple[Tensor, Tensor]:
    """``[E, 2I, H]`` and ``[E, H, I]`` from each parameter's ``grad`` or ``main_grad``."""
    w1, w2 = ([getattr(p, attribute) for p in params.parameters] for params in (layer.w1, layer.w2))
    return torch.stack(layer.w1.split(w1)), torch.stack(layer.w2.split(w2))


def spy_on(layer: Layer, method: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Records the arguments of each call of a backend method from now on."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    original = getattr(layer.backend, method)

    def recorder(*arguments: Any, **options: Any) -> Any:
        seen.append((arguments, options))
        return original(*arguments, **options)

    setattr(layer.backend, method, recorder)
    return seen


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_real_gradients_without_main_grad(grouping: str) -> None:
    layer = make_layer(grouping=grouping)
    x, probs = leaf(layer.inputs.x), leaf(layer.inputs.probs)
    layer(x, probs).backward(layer.inputs.dy)
    expected, (dw1, dw2) = exact(layer.inputs), stacked(layer, "grad")
    assert x.grad is not None and probs.grad is not None
    for actual, wanted in (
        (x.grad, expected.dx), (probs.grad, expected.dprobs), (dw1, expected.dw1), (dw2, expected.dw2)
    ):  # fmt: skip
        assert relative_error(actual, wanted) < 1e-12


def test_finite_differences() -> None:
    """Autograd against central differences in fp64, through every differentiable input, with clamp and offset."""
    case = RoutingCase(name="tiny", tokens=(5,), num_experts=3)
    layer = make_layer(case=case, hidden=6, intermediate=4, activation=Activation(clamp=0.7, linear_offset=0.3))
    inputs, count = layer.inputs, case.num_experts

    def function(x: Tensor, probs: Tensor, *weights: Tensor) -> Tensor:
        w1, w2 = ExpertParams(weights[:count], count), ExpertParams(weights[count:], count)
        # Off-route probabilities are no inputs of the function; the mask keeps their differences at 0.
        return apply_experts(layer.backend, x, probs, inputs.routing_map, w1, w2, layer=1, fuse_grad_accumulation=False)

    leaves = (leaf(inputs.x), leaf(inputs.probs), *layer.parameters)
    # The routed probabilities are far from 0, so a step cannot make one negative, which validation would refuse.
    assert inputs.probs[inputs.routing_map].min() > 1e-3
    torch.autograd.gradcheck(function, leaves, eps=1e-6, atol=1e-6, rtol=1e-5, check_undefined_grad=False)


@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_probs_gradient_has_the_dtype_of_probs_and_is_zero_off_route(probs_dtype: torch.dtype) -> None:
    layer = make_layer(case=CASES["dropped"], dtype=torch.bfloat16)
    probs = leaf(layer.inputs.probs.to(probs_dtype))
    layer(layer.inputs.x, probs).backward(layer.inputs.dy)
    assert probs.grad is not None and probs.grad.dtype == probs_dtype
    assert not probs.grad[~layer.inputs.routing_map].any()
    assert relative_error(probs.grad, exact(layer.inputs).dprobs) < 2e-2


def test_rows_without_experts_are_zero_in_y_and_dx() -> None:
    layer = make_layer(case=CASES["quarter_masked"])
    empty = ~layer.inputs.routing_map.any(1)
    x = leaf(layer.inputs.x)
    y = layer(x)
    y.backward(layer.inputs.dy)
    assert empty.sum() == 32 and x.grad is not None
    assert not y[empty].any() and not x.grad[empty].any()
    assert (y[~empty].norm(dim=1) > 0).all() and (x.grad[~empty].norm(dim=1) > 0).all()


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("main_grad", [torch.float32, torch.bfloat16], ids=str)
def test_main_grad_is_added_to_and_flagged(grouping: str, main_grad: torch.dtype) -> None:
    layer = make_layer(dtype=torch.bfloat16, grouping=grouping, fuse=True, main_grad=main_grad)
    layer(leaf(layer.inputs.x)).backward(layer.inputs.dy)
    expected = exact(layer.inputs)
    for actual, wanted in zip(stacked(layer, "main_grad"), (expected.dw1, expected.dw2), strict=True):
        assert relative_error(actual, wanted + 1) < 1e-2
    for parameter in layer.parameters:
        assert parameter.grad_added_to_main_grad is True  # type: ignore[attr-defined]
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape


def test_main_grad_is_left_alone_unless_fusion_is_asked_for() -> None:
    layer = make_layer(dtype=torch.float32, fuse=False, main_grad=torch.float32)
    layer(leaf(layer.inputs.x)).backward(layer.inputs.dy)
    assert relative_error(stacked(layer, "grad")[0], exact(layer.inputs).dw1) < 1e-6
    for parameter in layer.parameters:
        assert (parameter.main_grad == 1).all()  # type: ignore[attr-defined]
        assert parameter.grad_added_to_main_grad is False  # type: ignore[attr-defined]


def test_placeholder_is_zero_where_megatron_asks_for_zeros() -> None:
    """A hook that adds .grad although the flag is set (zero_out_wgrad) must add nothing."""
    layer = make_layer(dtype=torch.float32, fuse=True, main_grad=torch.float32)
    for parameter in layer.parameters:
        parameter.zero_out_wgrad = True  # type: ignore[attr-defined]
    layer(leaf(layer.inputs.x)).backward(layer.inputs.dy)
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters)


def test_parameters_without_main_grad_beside_some_with_one() -> None:
    """w1 accumulates into main_grad while w2 (main_grad None or missing) gets real gradients."""
    layer = make_layer(dtype=torch.float32, fuse=True, main_grad=torch.float32)
    for number, parameter in enumerate(layer.w2.parameters):
        if number % 2:
            parameter.main_grad = None  # type: ignore[attr-defined]
        else:
            del parameter.main_grad  # type: ignore[attr-defined]
    layer(leaf(layer.inputs.x)).backward(layer.inputs.dy)
    expected = exact(layer.inputs)
    main = torch.stack([p.main_grad for p in layer.w1.parameters])  # type: ignore[attr-defined]
    assert relative_error(main, expected.dw1 + 1) < 1e-6
    assert relative_error(stacked(layer, "grad")[1], expected.dw2) < 1e-6
    assert not any(p.grad_added_to_main_grad for p in layer.w2.parameters)  # type: ignore[attr-defined]


def test_idle_experts_contribute_exactly_nothing() -> None:
    """All experts busy, then half of them empty: their gradients are exactly 0 and add nothing."""
    for fuse in (False, True):
        busy = make_layer(dtype=torch.bfloat16, fuse=fuse, main_grad=torch.float32)
        busy(leaf(busy.inputs.x)).backward(busy.inputs.dy)
        del busy
        layer = make_layer(
            case=CASES["half_of_each_rank_empty"], dtype=torch.bfloat16, fuse=fuse, main_grad=torch.float32
        )
        layer(leaf(layer.inputs.x)).backward(layer.inputs.dy)
        for grad in stacked(layer, "main_grad" if fuse else "grad"):
            idle = torch.cat([grad[:2], grad[6:]])
            assert (idle == (1 if fuse else 0)).all()
            assert (grad[2:6] != (1 if fuse else 0)).any()


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("frozen", ["w1", "w2", "both", "first expert"])
def test_frozen_weights(frozen: str, grouping: str, fuse: bool) -> None:
    """A frozen weight has no main_grad and gets no gradient; all other gradients stay right."""
    layer = make_layer(dtype=torch.float32, grouping=grouping, fuse=fuse, main_grad=torch.float32)
    parts = {"w1": layer.w1.parameters, "w2": layer.w2.parameters, "both": layer.parameters}
    stopped = parts.get(frozen, [layer.parameters[0]])
    for parameter in stopped:
        parameter.requires_grad_(False)
        del parameter.main_grad  # type: ignore[attr-defined]
    x = leaf(layer.inputs.x)
    layer(x).backward(layer.inputs.dy)
    expected = exact(layer.inputs)
    assert x.grad is not None and relative_error(x.grad, expected.dx) < 1e-6
    for params, total in ((layer.w1, expected.dw1), (layer.w2, expected.dw2)):
        for number, parameter in enumerate(params.parameters):
            if any(parameter is other for other in stopped):
                assert parameter.grad is None and not getattr(parameter, "main_grad", None)
                continue
            part = (total[number] if grouping == "per_expert" else total).reshape(parameter.shape)
            actual = parameter.main_grad - 1 if fuse else parameter.grad  # type: ignore[attr-defined]
            assert actual is not None and relative_error(actual, part) < 2e-6


def test_x_and_probs_without_gradient() -> None:
    layer = make_layer()
    layer(layer.inputs.x).backward(layer.inputs.dy)
    assert relative_error(stacked(layer, "grad")[0], exact(layer.inputs).dw1) < 1e-12


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
        kept.extend(weakref.ref(tensor) for tensor in (saved.gate_up, saved.x_rows, saved.schedule.row_src_slot))
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


@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided"])
def test_gradients_with_any_strides(kind: str) -> None:
    layer, plain = make_layer(), make_layer()
    dy = layer.inputs.dy
    if kind == "expanded":
        dy = dy[:1, :1].expand_as(dy)
    elif kind == "transposed":
        dy = dy.T.contiguous().T
    else:
        dy = torch.stack([dy, dy.new_full(dy.shape, float("nan"))], dim=2)[..., 0]
    assert not dy.is_contiguous()
    seen = spy_on(layer, "backward")
    x, x_plain = leaf(layer.inputs.x), leaf(layer.inputs.x)
    layer(x).backward(dy)
    assert [arguments[0].is_contiguous() for arguments, _ in seen] == [True], "backends get contiguous rows"
    plain(x_plain).backward(dy.contiguous())
    assert x.grad is not None and x_plain.grad is not None
    assert torch.equal(x.grad, x_plain.grad)
    assert torch.equal(stacked(layer, "grad")[1], stacked(plain, "grad")[1])


def test_input_with_any_strides() -> None:
    layer = make_layer()
    wide = torch.cat([layer.inputs.x, layer.inputs.x], dim=1).requires_grad_()
    seen = spy_on(layer, "forward")
    layer(wide[:, :16]).backward(layer.inputs.dy)
    assert [arguments[0].is_contiguous() for arguments, _ in seen] == [True], "backends get contiguous rows"
    assert wide.grad is not None
    assert relative_error(wide.grad[:, :16], exact(layer.inputs).dx) < 1e-12
    assert not wide.grad[:, 16:].any()


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


@pytest.mark.parametrize(
    ("shapes", "experts"),
    [([(4, 3)], 3), ([(4, 3), (4, 3)], 3), ([(4, 3), (4, 2)], 2), ([(2, 4, 3)], 3), ([(4,)], 1), ([], 2)],
)
def test_expert_params_refuse_other_layouts(shapes: list[tuple[int, ...]], experts: int) -> None:
    with pytest.raises(ValueError, match=rf"expected {experts} expert matrices .*got shapes \["):
        ExpertParams(tuple(torch.zeros(shape) for shape in shapes), experts)


@pytest.mark.parametrize("shape", [(4, 3), (1, 4, 3)])
def test_expert_params_of_one_expert(shape: tuple[int, ...]) -> None:
    (matrix,) = ExpertParams((torch.nn.Parameter(torch.zeros(shape)),), 1).matrices()
    assert matrix.shape == (4, 3) and not matrix.requires_grad
