"""The layer behind the router as one autograd function over plain tensors.

What is saved: the layer input, the schedule's tables and what the backend keeps, all through ``save_for_backward``, so
that saved-tensor hooks (checkpointing, offloading) see them and an input changed in place is noticed. The weights are
saved the same way, as Megatron's own linear layers do: a parameter whose ``.data`` was pointed at other storage between
forward and backward (the distributed optimizer does so) is read where it now is, and one that was modified in place
raises. ``main_grad`` and ``grad_added_to_main_grad`` are read from and set on the Parameter objects themselves, because
a saved-tensor hook may hand back another tensor for a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mok_megatron.backends.base import Backend, Saved, WeightGrads
from mok_megatron.schedule import Schedule, validate_routing


@dataclass(frozen=True)
class ExpertParams:
    """One weight of a rank's e experts, as the model's own parameters.

    ``parameters`` holds e matrices ``[out, in]``, or a single grouped tensor ``[e, out, in]`` or ``[e * out, in]``.
    Raises ValueError for other shapes.
    """

    parameters: tuple[Tensor, ...]
    num_experts: int

    def __post_init__(self) -> None:
        found = [list(parameter.shape) for parameter in self.parameters]
        if len(found) == 1 and self.num_experts > 1:
            shape = found[0]
            fits = (len(shape) == 3 and shape[0] == self.num_experts) or (
                len(shape) == 2 and shape[0] % self.num_experts == 0
            )
        else:
            fits = len(found) == self.num_experts and all(shape == found[0] for shape in found)
            fits = fits and (len(found[0]) == 2 or (self.num_experts == 1 and len(found[0]) == 3 and found[0][0] == 1))
        if not fits:
            raise ValueError(
                f"expected {self.num_experts} expert matrices [out, in], or one grouped parameter "
                f"[{self.num_experts}, out, in] or [{self.num_experts} * out, in], got shapes {found}"
            )

    def split(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views ``[out, in]`` per expert of ``tensors``, which have the parameters' shapes (weights, gradients)."""
        if len(tensors) == self.num_experts and tensors[0].dim() == 2:
            return list(tensors)
        # Transformer Engine's GroupedTensor has a storage of its own, which only its flat view gives.
        flat = tensors[0].view(-1)
        return list(flat.view(self.num_experts, -1, tensors[0].shape[-1]).unbind(0))

    def matrices(self) -> list[Tensor]:
        """The weights ``[out, in]`` per expert, detached."""
        return self.split([parameter.detach() for parameter in self.parameters])


def apply_experts(
    backend: Backend,
    x: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    w1: ExpertParams,
    w2: ExpertParams,
    *,
    layer: int,
    fuse_grad_accumulation: bool,
) -> Tensor:
    """``x [T, H]``, ``probs [T, E]``, ``routing_map [T, E]`` bool -> ``y [T, H]``; differentiable once.

    Gradients go to x, to probs (their dtype, 0 off-route) and to every weight that wants one. With
    ``fuse_grad_accumulation`` a weight that has a ``main_grad`` gets its gradient added there, its
    ``grad_added_to_main_grad`` set, and a placeholder returned to autograd; any other weight gets a real gradient.
    Nothing is kept when no gradient can be asked for. Raises ValueError, before anything was sent to other ranks, for a
    routing that does not fit and for an x of another dtype or device than the weights.
    """
    validate_routing(probs, routing_map, backend.shape, x=x)
    for name, params in (("w1", w1), ("w2", w2)):
        weight = params.parameters[0]
        if weight.dtype != x.dtype or weight.device != x.device:
            raise ValueError(
                f"layer {layer}: x is {x.dtype} on {x.device} but {name} is {weight.dtype} on {weight.device}"
            )
    x = x.contiguous()
    call = _Call(backend, w1, w2, layer, fuse_grad_accumulation)
    if torch.is_grad_enabled():
        inputs = (x, probs, *w1.parameters, *w2.parameters)
        if any(tensor.requires_grad for tensor in inputs):
            y: Tensor = _Experts.apply(call, routing_map, *inputs)
            return y
    return call.forward(x, probs, routing_map, w1.parameters, w2.parameters, save=False)[0]


@dataclass(slots=True)
class _Call:
    """What one call passes beside its differentiable inputs."""

    backend: Backend
    w1: ExpertParams
    w2: ExpertParams
    layer: int
    fuse: bool

    def forward(
        self,
        x: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        w1: Sequence[Tensor],
        w2: Sequence[Tensor],
        *,
        save: bool,
    ) -> tuple[Tensor, Saved | None]:
        """The backend's schedule and forward; ``w1`` and ``w2`` have the parameters' shapes."""
        backend, layer = self.backend, self.layer
        schedule = backend.build_schedule(x, probs, routing_map, layer=layer)
        return backend.forward(x, schedule, self.w1.split(w1), self.w2.split(w2), save=save, layer=layer)


class _Experts(torch.autograd.Function):
    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        """``Function.apply`` without its look at every argument for functorch, which the experts do not support.

        With the weights of 128 experts that look is a third of the host's time for a call.
        """
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]

    @staticmethod
    def forward(ctx: Any, call: _Call, routing_map: Tensor, x: Tensor, probs: Tensor, *weights: Tensor) -> Tensor:
        split = len(call.w1.parameters)
        y, saved = call.forward(x, probs, routing_map, weights[:split], weights[split:], save=True)
        if saved is None:
            raise AssertionError(f"backend {call.backend.name} kept nothing although save=True")
        *tables, block_rows = saved.schedule
        ctx.save_for_backward(saved.x, saved.gate_up, saved.x_rows, *tables, *weights)
        ctx.call, ctx.block_rows, ctx.probs_dtype = call, block_rows, probs.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"layer {call.layer}: the mok experts have no second derivative; call backward without "
                f"create_graph=True"
            )
        x, gate_up, x_rows, slots, route_weights, rows, expert_first_row, *weights = ctx.saved_tensors
        schedule = Schedule(slots, route_weights, rows, expert_first_row, ctx.block_rows)
        saved = Saved(schedule=schedule, x=x, gate_up=gate_up, x_rows=x_rows)

        _, _, needs_dx, needs_dprobs, *needs_weights = ctx.needs_input_grad
        split = len(call.w1.parameters)
        sinks = (
            _Sinks(call.w1.parameters, needs_weights[:split], call.fuse),
            _Sinks(call.w2.parameters, needs_weights[split:], call.fuse),
        )
        accumulate = any(part.fused for part in sinks)
        dprobs = None
        if needs_dprobs:
            dprobs = dy.new_empty(dy.shape[0], call.backend.shape.num_experts, dtype=ctx.probs_dtype)
        dx = call.backend.backward(
            dy.contiguous(),
            saved,
            call.w1.split(weights[:split]),
            call.w2.split(weights[split:]),
            WeightGrads(
                w1=_split_sinks(call.w1, sinks[0].open(zeros=accumulate)),
                w2=_split_sinks(call.w2, sinks[1].open(zeros=accumulate)),
                accumulate=accumulate,
            ),
            needs_dx=needs_dx,
            dprobs=dprobs,
            layer=call.layer,
        )
        return None, None, dx, dprobs, *sinks[0].returned(), *sinks[1].returned()


class _Sinks:
    """Where the gradients of one weight's parameters go: ``main_grad``, new gradients, or nowhere (None: frozen).

    Attributes:
        fused: a parameter's gradient goes into its ``main_grad``.
    """

    def __init__(self, parameters: Sequence[Tensor], needed: Sequence[bool], fuse: bool) -> None:
        self._parameters, self._needed = parameters, needed
        self._main_grads = [
            getattr(parameter, "main_grad", None) if fuse and need else None
            for parameter, need in zip(parameters, needed, strict=True)
        ]
        self.fused = any(main_grad is not None for main_grad in self._main_grads)
        self._tensors: list[Tensor | None] = []

    def open(self, *, zeros: bool) -> list[Tensor | None]:
        """What the backend writes to; new gradients are made here, and filled with ``zeros`` where it adds."""
        targets = enumerate(zip(self._needed, self._main_grads, strict=True))
        missing = [index for index, (need, main_grad) in targets if need and main_grad is None]
        self._tensors = list(self._main_grads)
        for index, new in zip(missing, self._make(len(missing), zeros=zeros), strict=True):
            self._tensors[index] = new
        return self._tensors

    def _make(self, count: int, *, zeros: bool) -> Sequence[Tensor]:
        """``count`` new gradients, views of one block: each from the allocator costs more time than all else here.

        Autograd keeps a view that nobody else holds as ``.grad`` without a copy, as it does a tensor of its own.
        """
        return _plain_like(self._parameters[0], count, zeros=zeros).unbind(0) if count else ()

    def returned(self) -> list[Tensor | None]:
        """Mark the fused parameters; what autograd gets for each: a gradient, a placeholder of its shape, or None.

        Nobody reads a placeholder, or only its zeros where Megatron asks for them, so they share memory: each with its
        own would be a second copy of the weights.
        """
        returned = list(self._tensors)
        shared: dict[bool, Tensor] = {}
        for index, (parameter, main_grad) in enumerate(zip(self._parameters, self._main_grads, strict=True)):
            if main_grad is None:
                continue
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            zeros = getattr(parameter, "zero_out_wgrad", False)
            placeholder = shared.get(zeros)
            if placeholder is None:
                placeholder = shared[zeros] = _plain_like(parameter, zeros=zeros)[0]
            returned[index] = placeholder.detach()  # another tensor for each, as autograd keeps them
        return returned


def _plain_like(parameter: Tensor, count: int = 1, *, zeros: bool) -> Tensor:
    """``[count, *parameter.shape]`` of the parameter's dtype, an ordinary tensor whatever the parameter is."""
    new = torch.zeros if zeros else torch.empty
    return new((count, *parameter.shape), dtype=parameter.dtype, device=parameter.device)


def _split_sinks(params: ExpertParams, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Per-expert views of the sinks; a frozen grouped parameter freezes all its experts."""
    if len(tensors) == params.num_experts and params.parameters[0].dim() == 2:
        return list(tensors)
    if tensors[0] is None:
        return [None] * params.num_experts
    return list(params.split([tensors[0].view(params.parameters[0].shape)]))
