"""Rounding noise: what bf16 may do to a MoE layer, done to ``alltoall`` itself.

A layer that is right in bf16 gives each output, and each gradient of its input, to about one unit in the last place.
Two such layers train alike at first, then not at all: a token whose experts are nearly tied goes to another one, and
training amplifies it. How soon and how far is a matter of the model. So a run with this noise is what a run with
another right layer is compared with.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

RELATIVE = 2.0**-8
"""One unit in the last place of a bf16 number near a power of two: its 8 bits, the leading one included."""


class _Noise(torch.autograd.Function):
    """``x [...]`` of which every element, and every element of the gradient, is off by one part in 256, up or down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: torch.Generator) -> Tensor:
        ctx.generator = generator
        return _off(x, generator)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _off(grad, ctx.generator), None


def _off(x: Tensor, generator: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, x.shape, generator=generator, device=x.device) * 2 - 1
    return (x.float() * (1 + RELATIVE * signs)).to(x.dtype)


def add_noise(seed: int) -> None:
    """Every MoE layer's input and output, and the gradients of both, are off by that much from now on."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    forward = MoELayer.forward
    generators: dict[torch.device, torch.Generator] = {}  # Megatron's own random numbers stay what they are

    @functools.wraps(forward)
    def noisy(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        device = hidden_states.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        generator = generators[device]
        output, bias = forward(layer, _Noise.apply(hidden_states, generator), *args, **kwargs)
        return _Noise.apply(output, generator), bias

    MoELayer.forward = noisy
