"""W virtual ranks of the CUDA backend on one GPU, each on a stream of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

# Ranks wait for each other, so no stream may queue behind another; CUDA reads this when it starts.
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"

import torch
from torch import Tensor

from mok_megatron import memory
from mok_megatron.backends.base import Saved, WeightGrads
from mok_megatron.backends.cuda import CudaBackend, cuda_unavailable_reason
from mok_megatron.backends.workspace import Workspace
from mok_megatron.config import Activation, MoeShape, MokConfig
from mok_megatron.schedule import Schedule
from tests.layer_run import PLAIN, Inputs, make_inputs
from tests.reference_math import Result
from tests.routing_cases import RoutingCase

DEVICE = torch.device("cuda", 0)
CANARY = 0xA5

HIDDEN, INTERMEDIATE = 320, 192
"""Multiples of 64 but not of the tiles' 128 and 256 columns, so every tile kind has a ragged edge."""

DATA_BUFFERS = ("row_source", "slot_dst_rank", "slot_dst_row", "weights", "d_weight_parts", "y_slots", "x", "replay_x")
DATA_SCRATCH = ("h", "x_rows", "block_counts", "route_base", "token_order", "row_weights", "d_gate_up", "partials")
"""Buffers that hold no state between calls, so a call must not read what an earlier one left there."""


@dataclass(frozen=True)
class RankOutput:
    """What one rank's forward gave."""

    y: Tensor
    schedule: Schedule
    saved: Saved | None


class VirtualRanks:
    """All ranks of a layer in this process. ``tokens`` are the largest numbers per rank."""

    def __init__(
        self,
        *,
        hidden: int,
        intermediate: int,
        num_experts: int,
        top_k: int,
        tokens: Sequence[int],
        activation: Activation = PLAIN,
        ring_rows: int | None = None,
        **options: object,
    ) -> None:
        self.tokens = tuple(tokens)
        shape = MoeShape(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=num_experts,
            top_k=top_k,
            ep_size=len(self.tokens),
            activation=activation,
        )
        reason = cuda_unavailable_reason(DEVICE, shape, torch.bfloat16)
        assert reason is None, reason
        max_tokens = max(self.tokens)
        rows = max(memory.worst_case_rows(shape, max_tokens), 128) if ring_rows is None else ring_rows
        config = MokConfig(time_limit_s=20.0, ring_rows=rows, **options)  # type: ignore[arg-type]
        self.shape = shape
        self.backends = CudaBackend.virtual_ranks(shape, config, DEVICE, max_tokens=max_tokens)
        self.streams = [torch.cuda.Stream() for _ in self.backends]
        # A kernel of torch that is loaded at its first launch could wait for ranks that wait for it.
        torch.cuda._sleep(1)
        for dtype in (torch.bfloat16, torch.float32, torch.int32):
            torch.empty(8, dtype=dtype, device=DEVICE).contiguous()

    def spaces(self) -> list[Workspace]:
        """The workspaces, in rank order."""
        return [backend.workspace for backend in self.backends if backend.workspace is not None]

    def poison(self) -> None:
        """NaN (all bits set) into every buffer that carries nothing from call to call, canaries behind every buffer."""
        for space in self.spaces():
            for memory_bytes, buffers, data in (
                (space.symmetric_bytes, space.sizes.symmetric_buffers(), DATA_BUFFERS),
                (space.scratch_bytes, space.sizes.scratch_buffers(), DATA_SCRATCH),
            ):
                for buffer, (first, last) in _spans(buffers):
                    if buffer.name in data:
                        memory_bytes[first : first + buffer.bytes] = 0xFF
                    memory_bytes[first + buffer.bytes : last] = CANARY

    def check_canaries(self) -> None:
        """Assert that nothing was written behind any buffer."""
        for space in self.spaces():
            for memory_bytes, buffers in (
                (space.symmetric_bytes, space.sizes.symmetric_buffers()),
                (space.scratch_bytes, space.sizes.scratch_buffers()),
            ):
                for buffer, (first, last) in _spans(buffers):
                    guard = memory_bytes[first + buffer.bytes : last]
                    assert bool((guard == CANARY).all()), f"rank {space.rank}: written behind {buffer.name}"

    def forward(
        self,
        x: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        w1: Tensor,
        w2: Tensor,
        *,
        save: bool = True,
        delays: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
    ) -> list[RankOutput]:
        """Every rank's share of the global batch ``x [sum T, H]``; ``delays`` are cycles each rank's stream sleeps."""
        counts, local = list(tokens or self.tokens), self.shape.experts_per_rank
        parts = [list(tensor.split(counts)) for tensor in (x, probs, routing_map)]
        weights = [
            (list(w1[rank * local : (rank + 1) * local]), list(w2[rank * local : (rank + 1) * local]))
            for rank in range(len(counts))
        ]
        for backend, (first, second) in zip(self.backends, weights, strict=True):
            backend.prepare(first, second)
        outputs: list[RankOutput] = []
        torch.cuda.synchronize()
        for rank, backend in enumerate(self.backends):
            with torch.cuda.stream(self.streams[rank]):
                if delays is not None:
                    torch.cuda._sleep(delays[rank])
                schedule = backend.build_schedule(parts[0][rank], parts[1][rank], parts[2][rank], layer=1)
                y, saved = backend.forward(parts[0][rank], schedule, *weights[rank], save=save, layer=1)
            outputs.append(RankOutput(y, schedule, saved))
        torch.cuda.synchronize()
        return outputs

    def backward(
        self,
        dy: Tensor,
        outputs: Sequence[RankOutput],
        w1: Tensor,
        w2: Tensor,
        dw1: Sequence[Tensor | None],
        dw2: Sequence[Tensor | None],
        *,
        accumulate: bool,
        needs_dx: bool = True,
        delays: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """``dx [sum T, H]`` (empty unless ``needs_dx``) and dense ``dprobs [sum T, E]``; sinks by expert."""
        local, counts = self.shape.experts_per_rank, [output.y.shape[0] for output in outputs]
        parts = dy.split(counts)
        jobs = []
        for rank, backend in enumerate(self.backends):
            held = slice(rank * local, (rank + 1) * local)
            grads = WeightGrads(w1=list(dw1[held]), w2=list(dw2[held]), accumulate=accumulate)
            backend.prepare(list(w1[held]), list(w2[held]), grads)
            dprobs = torch.full((counts[rank], self.shape.num_experts), float("nan"), device=DEVICE)
            jobs.append((backend, list(w1[held]), list(w2[held]), grads, dprobs))
        dx = []
        torch.cuda.synchronize()
        for rank, (backend, first, second, grads, dprobs) in enumerate(jobs):
            saved = outputs[rank].saved
            assert saved is not None
            with torch.cuda.stream(self.streams[rank]):
                if delays is not None:
                    torch.cuda._sleep(delays[rank])
                dx.append(
                    backend.backward(
                        parts[rank], saved, first, second, grads, needs_dx=needs_dx, dprobs=dprobs, layer=1
                    )
                )
        torch.cuda.synchronize()
        of_all = [rows for rows in dx if rows is not None]
        return torch.cat(of_all) if of_all else torch.empty(0), torch.cat([job[-1] for job in jobs])

    def close(self) -> None:
        """Free the workspaces."""
        for backend in self.backends:
            backend.close()


def forward_backward(
    backend: CudaBackend,
    x: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    dy: Tensor,
    w1: list[Tensor],
    w2: list[Tensor],
    grads: Sequence[list[Tensor]],
) -> list[Tensor]:
    """One call of one rank, gradients into ``grads``: y, dx, dprobs ``[T, E]``, dW1 and dW2 of each expert."""
    schedule = backend.build_schedule(x, probs, routing_map, layer=1)
    y, saved = backend.forward(x, schedule, w1, w2, save=True, layer=1)
    assert saved is not None
    sinks = WeightGrads(w1=grads[0], w2=grads[1], accumulate=False)
    dprobs = torch.empty_like(probs)
    dx = backend.backward(dy, saved, w1, w2, sinks, needs_dx=True, dprobs=dprobs, layer=1)
    assert dx is not None
    return [y, dx, dprobs, *grads[0], *grads[1]]


def inputs_of(
    case: RoutingCase,
    activation: Activation = PLAIN,
    *,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    seed: int | None = None,
) -> Inputs:
    """bf16 inputs on the CPU; the seed is the case's own unless given."""
    return make_inputs(
        case,
        dtype=torch.bfloat16,
        hidden=hidden,
        intermediate=intermediate,
        seed=len(case.name) if seed is None else seed,
        activation=activation,
    )


def ranks_of(case: RoutingCase, inputs: Inputs, **options: object) -> VirtualRanks:
    """The ranks of a case."""
    return VirtualRanks(
        hidden=inputs.x.shape[1],
        intermediate=inputs.w2.shape[2],
        num_experts=case.num_experts,
        top_k=case.top_k,
        tokens=case.tokens,
        activation=inputs.activation,
        **options,  # type: ignore[arg-type]
    )


def run_layer(
    ranks: VirtualRanks,
    inputs: Inputs,
    *,
    dtype: torch.dtype = torch.float32,
    accumulate: bool = False,
    poison: bool = True,
    delays: list[int] | None = None,
    offset: int = 0,
) -> Result:
    """Forward and backward; with ``accumulate`` the sinks hold 1 before, which is taken off again in fp64.

    ``poison``: neither lives on what was in the workspace, nor writes past its parts. Sinks begin ``offset`` elements
    behind the beginning of their memory.
    """
    x, probs, routing_map, w1, w2, dy = (
        t.to(DEVICE) for t in (inputs.x, inputs.probs, inputs.routing_map, inputs.w1, inputs.w2, inputs.dy)
    )
    if poison:
        ranks.poison()
    outputs = ranks.forward(x, probs, routing_map, w1, w2, delays=delays)
    if poison:
        ranks.check_canaries()
        ranks.poison()
    before = 1.0 if accumulate else float("nan")
    dw1, dw2 = (
        torch.full((offset + w.numel(),), before, dtype=dtype, device=DEVICE)[offset:].view(w.shape) for w in (w1, w2)
    )
    dx, dprobs = ranks.backward(dy, outputs, w1, w2, dw1.unbind(), dw2.unbind(), accumulate=accumulate, delays=delays)
    if poison:
        ranks.check_canaries()
    y = torch.cat([output.y for output in outputs])
    was = 1.0 if accumulate else 0.0
    return Result(*(t.cpu() for t in (y, dx, dprobs, dw1.double() - was, dw2.double() - was)))


def _spans(buffers: tuple[memory.Buffer, ...]) -> list[tuple[memory.Buffer, tuple[int, int]]]:
    offsets, end = memory.placed(buffers)
    starts = list(offsets.values())
    return [(buffer, span) for buffer, span in zip(buffers, zip(starts, [*starts[1:], end], strict=True), strict=True)]
