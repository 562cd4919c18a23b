"""What an implementation must give before it is timed: fp32 results for a sample of tokens and for one expert.

The sample's y, dx and dprobs need all experts but few tokens, the expert's weight gradients all tokens but one expert,
so both are cheap, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mok_megatron.config import Activation

from .implementations import Layer
from .inputs import Case

SAMPLE = 64
Y_LIMIT, GRAD_LIMIT = 1e-2, 2e-2
"""Largest error of a row over its norm, or over the rows' root mean square where that is larger. Rounding in
bf16 gives some 5e-3 (each rounding 1e-3), a token with one of eight experts wrong 0.1 and more."""


class WrongResultError(Exception):
    """An implementation's result is not the layer's; the message has the tensor, its error and the limit."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """fp32 results on this rank; all but y are None without backward.

    ``y``, ``dx [n, H]`` and ``dprobs [n, K]`` belong to ``sample [n]``, ``dw1 [2I, H]`` and ``dw2 [H, I]`` to local
    ``expert``.
    """

    sample: Tensor
    y: Tensor
    expert: int
    dx: Tensor | None = None
    dprobs: Tensor | None = None
    dw1: Tensor | None = None
    dw2: Tensor | None = None


def compute_reference(case: Case, *, backward: bool) -> Reference:
    """Reference of ``case``. Collective over its ranks."""
    with torch.no_grad():
        count, first = min(SAMPLE, case.tokens), case.ranks.rank
        sample = torch.linspace(0, case.tokens - 1, count, device=case.experts.device).round().long()
        y, dx, dprobs = _tokens(case, sample, backward)
        mine = slice(first * count, (first + 1) * count)
        expert = case.shape.experts_per_rank // 2
        if not backward:
            return Reference(sample=sample, y=y[mine], expert=expert)
        dw1, dw2 = _expert_weights(case, expert)
        dprobs = dprobs[mine].gather(1, case.experts[sample])
        return Reference(sample=sample, y=y[mine], expert=expert, dx=dx[mine], dprobs=dprobs, dw1=dw1, dw2=dw2)


def check(layer: Layer, case: Case, reference: Reference, *, saves: bool, backward: bool) -> float:
    """Run ``layer`` on every set of tensors; returns the error of y. Raises WrongResultError."""
    worst = 0.0
    for index in range(len(case.copies)):
        layer.clear_gradients(index)
        with torch.set_grad_enabled(saves or backward):
            y = layer.forward(index)
        worst = max(worst, _require("y", y.detach()[reference.sample], reference.y, Y_LIMIT))
        if not backward:
            continue
        y.backward(case.copies[index].dy.view(y.shape))
        grads = layer.gradients(index, reference.expert)
        pairs: Mapping[str, tuple[Tensor, Tensor | None]] = {
            "dx": (grads.dx[reference.sample], reference.dx),
            "dprobs": (grads.dprobs[reference.sample], reference.dprobs),
            "dw1": (grads.dw1, reference.dw1),
            "dw2": (grads.dw2, reference.dw2),
        }
        for name, (actual, expected) in pairs.items():
            assert expected is not None
            _require(name, actual, expected, GRAD_LIMIT)
        layer.clear_gradients(index)
    return worst


def _require(name: str, actual: Tensor, expected: Tensor, limit: float) -> float:
    if actual.shape != expected.shape:
        raise WrongResultError(f"{name} has shape {list(actual.shape)}, expected {list(expected.shape)}")
    error, size = (actual.float() - expected).norm(dim=1), expected.norm(dim=1)
    scale = size.clamp(min=float(size.square().mean().sqrt()))
    relative = float(torch.where(error == 0, 0.0, error / scale).max())
    if not relative <= limit:
        raise WrongResultError(f"{name} differs from the fp32 reference by {relative:.2e} in a row, limit {limit:.0e}")
    return relative


def _tokens(case: Case, sample: Tensor, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx ``[W n, H]`` and dprobs ``[W n, E]`` of all ranks' samples."""
    data, ranks = case.copies[0], case.ranks
    x, dy = ranks.gather(data.x[sample]).float(), ranks.gather(data.dy[sample]).float()
    probs = ranks.gather(case.dense_routing()[0][sample])
    y, dx, dprobs = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(probs)
    for local in range(case.shape.experts_per_rank):
        column = case.first_expert + local
        tokens = probs[:, column].nonzero()[:, 0]
        if tokens.numel() == 0:
            continue
        with torch.enable_grad():
            rows, p = x[tokens].requires_grad_(), probs[tokens, column].requires_grad_()
            out = _expert(rows, p, data.w1[local].float(), data.w2[local].float(), case.shape.activation)
        y[tokens] += out.detach()
        if backward:
            d_rows, d_p = torch.autograd.grad(out, (rows, p), dy[tokens])
            dx[tokens] += d_rows
            dprobs[tokens, column] = d_p
    return ranks.reduce(y), ranks.reduce(dx), ranks.reduce(dprobs)


def _expert_weights(case: Case, local: int) -> tuple[Tensor, Tensor]:
    """dw1 ``[2I, H]``, dw2 ``[H, I]`` of one local expert, from the tokens of all ranks."""
    data, ranks = case.copies[0], case.ranks
    x, dy = ranks.gather(data.x), ranks.gather(data.dy)
    probs = ranks.gather(case.dense_routing()[0])[:, case.first_expert + local]
    tokens = probs.nonzero()[:, 0]
    with torch.enable_grad():
        w1, w2 = data.w1[local].float().requires_grad_(), data.w2[local].float().requires_grad_()
        out = _expert(x[tokens].float(), probs[tokens], w1, w2, case.shape.activation)
    dw1, dw2 = torch.autograd.grad(out, (w1, w2), dy[tokens].float())
    return dw1, dw2


def _expert(x: Tensor, p: Tensor, w1: Tensor, w2: Tensor, activation: Activation) -> Tensor:
    gate, up = (x @ w1.T).chunk(2, dim=1)
    return p[:, None] * (swiglu(gate, up, activation) @ w2.T)


def swiglu(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """The activation in plain torch operations, differentiable."""
    if activation.clamp is not None:
        gate, up = gate.clamp(max=activation.clamp), up.clamp(-activation.clamp, activation.clamp)
    return functional.silu(gate) * (up + activation.linear_offset if activation.linear_offset else up)
