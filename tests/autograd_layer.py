"""A layer with its own parameters behind ``apply_experts``, for the tests of the autograd function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok_megatron.autograd import ExpertParams, apply_experts
from mok_megatron.config import Activation
from tests.layer_run import PLAIN, Inputs, make_backend, make_inputs
from tests.routing_cases import CASES, RoutingCase


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
