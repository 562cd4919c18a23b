"""The layer's mathematics once more, in fp64, as a loop over tokens' experts: what every backend is compared with.

Written from the formula alone (y[t] = sum over routed e of p[t, e] * W2[e] act(W1[e] x[t])); it uses no code of the
package and differentiates nothing automatically.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Result:
    """fp64 results: ``y``, ``dx [T, H]``, ``dprobs [T, E]``, ``dw1 [E, 2I, H]``, ``dw2 [E, H, I]``."""

    y: Tensor
    dx: Tensor
    dprobs: Tensor
    dw1: Tensor
    dw2: Tensor


def moe_layer(
    x: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    w1: Tensor,
    w2: Tensor,
    dy: Tensor,
    *,
    clamp: float | None = None,
    offset: float = 0.0,
) -> Result:
    """Forward and backward of the whole layer (all ranks' tokens, all experts) from tensors of any float dtype."""
    x, probs, w1, w2, dy = (tensor.double() for tensor in (x, probs, w1, w2, dy))
    result = Result(*(torch.zeros_like(tensor) for tensor in (x, x, probs, w1, w2)))
    for e in range(w1.shape[0]):
        tokens = routing_map[:, e].nonzero()[:, 0]
        p = probs[tokens, e][:, None]
        inner = w1.shape[1] // 2
        gate, up = x[tokens] @ w1[e, :inner].T, x[tokens] @ w1[e, inner:].T
        limit = float("inf") if clamp is None else clamp
        g, u = gate.clip(max=limit), up.clip(-limit, limit)
        sig = 1 / (1 + torch.exp(-g))
        act = g * sig * (u + offset)
        out = act @ w2[e].T
        result.y[tokens] += p * out

        result.dprobs[tokens, e] = (dy[tokens] * out).sum(1)
        d_out = p * dy[tokens]
        result.dw2[e] = d_out.T @ act
        d_act = d_out @ w2[e]
        d_gate = d_act * (u + offset) * (sig + g * sig * (1 - sig)) * (gate <= limit)
        d_up = d_act * g * sig * (up.abs() <= limit)
        result.dw1[e] = torch.cat([d_gate.T @ x[tokens], d_up.T @ x[tokens]])
        result.dx[tokens] += d_gate @ w1[e, :inner] + d_up @ w1[e, inner:]
    return result
