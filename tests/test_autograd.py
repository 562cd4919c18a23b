"""The autograd function: gradients, ``main_grad`` and frozen weights, for every grouping of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mok_megatron.autograd import ExpertParams, apply_experts
from mok_megatron.backends.base import WeightGrads
from mok_megatron.config import Activation
from tests.autograd_layer import GROUPINGS, leaf, make_layer, spy_on, stacked
from tests.layer_run import exact, poisoned_memory, relative_error
from tests.routing_cases import CASES, RoutingCase


@pytest.fixture(autouse=True)
def _poison() -> Any:
    with poisoned_memory():
        yield


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


def test_placeholders_of_a_shape_share_memory() -> None:
    """Together they would be as large as the weights."""
    layer = make_layer(dtype=torch.float32, fuse=True, main_grad=torch.float32)
    layer(leaf(layer.inputs.x)).backward(layer.inputs.dy)
    for params in (layer.w1, layer.w2):
        grads = [parameter.grad for parameter in params.parameters]
        assert len({id(grad) for grad in grads}) == len(grads) > 1
        assert len({grad.data_ptr() for grad in grads if grad is not None}) == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_new_gradients_are_one_allocation_that_autograd_takes_without_a_copy(frozen: bool) -> None:
    layer = make_layer(dtype=torch.bfloat16)
    layer.w1.parameters[2].requires_grad_(not frozen)
    original = layer.backend.backward
    written: list[int | None] = []

    def spy(dy: Tensor, saved: Any, w1: Any, w2: Any, grads: WeightGrads, **options: Any) -> Any:
        written.extend(None if sink is None else sink.data_ptr() for sink in (*grads.w1, *grads.w2))
        return original(dy, saved, w1, w2, grads, **options)

    layer.backend.backward = spy  # type: ignore[method-assign]
    layer(leaf(layer.inputs.x)).backward(layer.inputs.dy)
    assert [None if p.grad is None else p.grad.data_ptr() for p in layer.parameters] == written
    for params in (layer.w1, layer.w2):
        grads = [p.grad for p in params.parameters if p.grad is not None]
        addresses = [grad.data_ptr() - grads[0].data_ptr() for grad in grads]
        assert addresses == [2 * grad.numel() * i for i, grad in enumerate(grads)]


class _FlatViewOnly(torch.Tensor):
    """As Transformer Engine's GroupedTensor: no storage of its own, and a flat view as the only way to the values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> _FlatViewOnly:
        tensor: _FlatViewOnly = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].held)
        if func == torch.ops.aten.view.default and list(args[1]) in ([-1], [args[0].numel()]):
            return args[0].held.view(-1)
        raise NotImplementedError(f"{func} of a tensor that has a flat view only")


@pytest.mark.parametrize("fuse", [False, True])
def test_a_grouped_weight_that_only_has_a_flat_view(fuse: bool) -> None:
    found = []
    for wrap in (torch.nn.Parameter, lambda weight: torch.nn.Parameter(_FlatViewOnly(weight))):
        layer = make_layer(grouping="grouped_3d")
        weights = [wrap(params.parameters[0].detach()) for params in (layer.w1, layer.w2)]
        layer.w1, layer.w2 = (ExpertParams((weight,), layer.inputs.w1.shape[0]) for weight in weights)
        layer.fuse = fuse
        for weight in weights:
            weight.main_grad = torch.zeros(weight.shape, dtype=torch.float64)  # type: ignore[attr-defined]
        x = leaf(layer.inputs.x)
        y = layer(x)
        y.backward(layer.inputs.dy)
        gradients = [weight.main_grad if fuse else weight.grad for weight in weights]  # type: ignore[attr-defined]
        assert all(type(weight.grad) is Tensor and weight.grad.shape == weight.shape for weight in weights)
        found.append([y.detach(), x.grad, *gradients])
    assert all(torch.equal(plain, wrapped) for plain, wrapped in zip(*found, strict=True))
