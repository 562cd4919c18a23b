"""One layer call on a global batch: inputs for a routing case, the run of one rank, eager torch, and error measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.autograd import ExpertParams, apply_experts
from mok_megatron.backends.base import Backend
from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.config import Activation, MoeShape, MokConfig
from tests.reference_math import Result, moe_layer
from tests.routing_cases import RoutingCase

PLAIN = Activation()
QUANTITIES = ("y", "dx", "dprobs", "dw1", "dw2")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tokens of all ranks in rank order, and all experts: unit-scale x and dy, weights of scale 1/sqrt(fan-in)."""

    x: Tensor
    probs: Tensor
    routing_map: Tensor
    w1: Tensor
    w2: Tensor
    dy: Tensor
    top_k: int
    activation: Activation


def make_inputs(
    case: RoutingCase,
    *,
    dtype: torch.dtype,
    hidden: int = 64,
    intermediate: int = 48,
    seed: int = 0,
    activation: Activation = PLAIN,
) -> Inputs:
    """``x``, ``dy [sum T, H]``, ``w1 [E, 2I, H]``, ``w2 [E, H, I]`` of ``dtype``; probs fp32 (fp64 for fp64)."""
    probs, routing_map = case.generate(seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    tokens, experts = probs.shape
    return Inputs(
        x=normal(tokens, hidden).to(dtype),
        probs=probs.to(torch.float64 if dtype == torch.float64 else torch.float32),
        routing_map=routing_map,
        w1=(normal(experts, 2 * intermediate, hidden) / hidden**0.5).to(dtype),
        w2=(normal(experts, hidden, intermediate) / intermediate**0.5).to(dtype),
        dy=normal(tokens, hidden).to(dtype),
        top_k=case.top_k,
        activation=activation,
    )


def shape_of(inputs: Inputs, ranks: int = 1) -> MoeShape:
    """The layer that the inputs are for, on ``ranks`` ranks."""
    experts, hidden, intermediate = inputs.w2.shape
    return MoeShape(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=experts,
        top_k=inputs.top_k,
        ep_size=ranks,
        activation=inputs.activation,
    )


def of_rank(rank: int, tokens: Sequence[int], experts: int) -> tuple[slice, slice]:
    """The rank's part of all tokens, given how many each rank has, and of all experts."""
    first, local = sum(tokens[:rank]), experts // len(tokens)
    return slice(first, first + tokens[rank]), slice(rank * local, (rank + 1) * local)


def make_backend(inputs: Inputs, group: dist.ProcessGroup | None = None, config: MokConfig | None = None) -> Backend:
    """The reference backend for ``inputs`` in ``group`` (None: one rank)."""
    shape = shape_of(inputs, 1 if group is None else group.size())
    return ReferenceBackend(shape, config or MokConfig(), group, inputs.x.device, inputs.x.dtype)


def run_layer(inputs: Inputs, backend: Backend, tokens: tuple[int, ...], rank: int = 0) -> Result:
    """Forward and backward of ``rank``'s tokens and experts through ``apply_experts``, with autograd's gradients."""
    mine, held = of_rank(rank, tokens, len(inputs.w1))
    x, probs = (tensor[mine].clone().requires_grad_() for tensor in (inputs.x, inputs.probs))
    w1 = [torch.nn.Parameter(w.clone()) for w in inputs.w1[held]]
    w2 = [torch.nn.Parameter(w.clone()) for w in inputs.w2[held]]
    y = apply_experts(
        backend,
        x,
        probs,
        inputs.routing_map[mine],
        ExpertParams(tuple(w1), len(w1)),
        ExpertParams(tuple(w2), len(w2)),
        layer=1,
        fuse_grad_accumulation=False,
    )
    leaves = (x, probs, *w1, *w2)
    dx, dprobs, *dw = torch.autograd.grad(y, leaves, inputs.dy[mine])
    return Result(y.detach(), dx, dprobs, torch.stack(dw[: len(w1)]), torch.stack(dw[len(w1) :]))


def join_ranks(results: list[Result]) -> Result:
    """The whole batch and all experts from the ranks' results: every quantity is concatenated in rank order."""
    return Result(*(torch.cat([getattr(result, name) for result in results]) for name in QUANTITIES))


def exact(inputs: Inputs) -> Result:
    """fp64 result for the same (already rounded) inputs."""
    i, act = inputs, inputs.activation
    return moe_layer(i.x, i.probs, i.routing_map, i.w1, i.w2, i.dy, clamp=act.clamp, offset=act.linear_offset)


def eager(inputs: Inputs) -> Result:
    """What plain torch gives in the inputs' dtype: a loop over experts, probs applied in fp32, autograd."""
    x, probs, w1, w2 = (t.clone().requires_grad_() for t in (inputs.x, inputs.probs, inputs.w1, inputs.w2))
    act, y = inputs.activation, torch.zeros_like(inputs.x)
    for e in range(w1.shape[0]):
        tokens = inputs.routing_map[:, e].nonzero()[:, 0]
        gate, up = (x[tokens] @ w1[e].T).chunk(2, dim=1)
        if act.clamp is not None:
            gate, up = gate.clamp(max=act.clamp), up.clamp(-act.clamp, act.clamp)
        hidden = torch.nn.functional.silu(gate) * (up + act.linear_offset) * probs[tokens, e, None]
        y = y.index_add(0, tokens, hidden.to(x.dtype) @ w2[e].T)
    return Result(y.detach(), *torch.autograd.grad(y, (x, probs, w1, w2), inputs.dy))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; the plain norm where that is 0. NaN counts as infinite."""
    error, scale = (actual.double() - expected.double()).norm(), expected.double().norm()
    value = float(error / scale) if scale > 0 else float(error)
    return value if value == value else float("inf")


def assert_errs_at_most_twice_eager(actual: Result, inputs: Inputs) -> None:
    """Every quantity within twice eager torch's own relative error, both against fp64."""
    expected, plain = exact(inputs), eager(inputs)
    for name in QUANTITIES:
        error = relative_error(getattr(actual, name), getattr(expected, name))
        allowed = 2 * relative_error(getattr(plain, name), getattr(expected, name))
        assert error <= allowed, f"{name}: relative error {error:.3g}, twice eager torch's is {allowed:.3g}"


def assert_same_bits(actual: Result, expected: Result, what: object) -> None:
    """Every quantity equal in every bit of value (NaN never equals)."""
    for name in QUANTITIES:
        a, b = getattr(actual, name), getattr(expected, name)
        assert a.dtype == b.dtype and torch.equal(a, b), f"{what}: {name} differs, {relative_error(a, b):.3g} relative"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """All uninitialised torch memory is NaN (the largest integer for integers), so an unwritten value shows."""
    torch.use_deterministic_algorithms(True)
    try:
        if not bool(torch.empty(7).isnan().all()):
            raise AssertionError("uninitialised memory is not filled: poisoning has no effect")
        yield
    finally:
        torch.use_deterministic_algorithms(False)
