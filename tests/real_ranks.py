"""This process as a rank of a group that shares memory, and virtual ranks beside it to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron import memory
from mok_megatron.backends.base import WeightGrads
from mok_megatron.backends.cuda import CudaBackend, cuda_unavailable_reason
from mok_megatron.config import MokConfig
from tests import virtual_ranks
from tests.layer_run import Inputs, of_rank, shape_of
from tests.reference_math import Result
from tests.routing_cases import RoutingCase
from tests.virtual_ranks import VirtualRanks, ranks_of

TIME_LIMIT_S = 20.0


def own_device() -> torch.device:
    """The GPU that is current."""
    return torch.device("cuda", torch.cuda.current_device())


class Parts(NamedTuple):
    """This rank's tokens, on its GPU, and the weights of its experts."""

    x: Tensor
    probs: Tensor
    routing_map: Tensor
    dy: Tensor
    w1: list[Tensor]
    w2: list[Tensor]


class RealRank(VirtualRanks):
    """This process's rank of the group; what it checks and poisons is its own memory only."""

    def __init__(
        self, case: RoutingCase, inputs: Inputs, group: dist.ProcessGroup | None = None, **options: Any
    ) -> None:
        self.group = group or dist.group.WORLD
        assert self.group is not None
        self.rank, self.tokens = self.group.rank(), case.tokens
        self.shape = shape_of(inputs, case.world)
        reason = cuda_unavailable_reason(own_device(), self.shape, torch.bfloat16)
        assert reason is None, reason
        rows = max(memory.worst_case_rows(self.shape, max(case.tokens)), 128)
        config = MokConfig(**{"time_limit_s": TIME_LIMIT_S, "ring_rows": rows, **options})
        self.backends = [CudaBackend.create(self.shape, config, self.group, own_device())]
        self.backends[0].reserve(max(case.tokens))

    def settle(self) -> None:
        """All ranks are done with everything so far."""
        torch.cuda.synchronize()
        dist.barrier(self.group)

    def parts(self, inputs: Inputs, tokens: Sequence[int] | None = None) -> Parts:
        """What is this rank's of a batch."""
        mine, held = of_rank(self.rank, tokens or self.tokens, len(inputs.w1))
        x, probs, routing_map, dy = (
            t[mine].to(own_device()) for t in (inputs.x, inputs.probs, inputs.routing_map, inputs.dy)
        )
        w1, w2 = (list(w[held].to(own_device())) for w in (inputs.w1, inputs.w2))
        return Parts(x, probs, routing_map, dy, w1, w2)

    def call(
        self,
        parts: Parts,
        *,
        poison: bool = True,
        accumulate: bool = False,
        delays: tuple[int, int] = (0, 0),
    ) -> Result:
        """Forward and backward, fp32 weight gradients; on the GPU. Cycles of delay before each of the two."""
        x, probs, routing_map, dy, w1, w2 = parts
        backend = self.backends[0]
        dw = [torch.full((len(w), *w[0].shape), 1.0 if accumulate else float("nan"), device=x.device) for w in (w1, w2)]
        grads = WeightGrads(w1=list(dw[0]), w2=list(dw[1]), accumulate=accumulate)
        if poison:
            self.settle()
            self.poison()
            self.settle()
        torch.cuda._sleep(delays[0])
        schedule = backend.build_schedule(x, probs, routing_map, layer=1)
        y, saved = backend.forward(x, schedule, w1, w2, save=True, layer=1)
        assert saved is not None
        torch.cuda._sleep(delays[1])
        dprobs = torch.full_like(probs, float("nan"))
        dx = backend.backward(dy, saved, w1, w2, grads, needs_dx=True, dprobs=dprobs, layer=1)
        assert dx is not None
        if poison:
            torch.cuda.synchronize()
            self.check_canaries()
        return Result(y, dx, dprobs, *dw)


def virtual(case: RoutingCase, inputs: Inputs, *, accumulate: bool = False, **options: Any) -> Result:
    """All ranks' results by virtual ranks on this rank's GPU."""
    virtual_ranks.DEVICE = own_device()
    x, probs, routing_map, w1, w2, dy = (
        t.to(own_device()) for t in (inputs.x, inputs.probs, inputs.routing_map, inputs.w1, inputs.w2, inputs.dy)
    )
    ranks = ranks_of(case, inputs, **options)
    outputs = ranks.forward(x, probs, routing_map, w1, w2)
    dw1, dw2 = (torch.full(w.shape, 1.0 if accumulate else float("nan"), device=own_device()) for w in (w1, w2))
    dx, dprobs = ranks.backward(dy, outputs, w1, w2, dw1.unbind(), dw2.unbind(), accumulate=accumulate)
    ranks.close()
    return Result(torch.cat([output.y for output in outputs]), dx, dprobs, dw1, dw2)


def share(whole: Result, tokens: Sequence[int], rank: int) -> Result:
    """The rank's tokens and experts of a result of all ranks."""
    mine, held = of_rank(rank, tokens, len(whole.dw1))
    return Result(whole.y[mine], whole.dx[mine], whole.dprobs[mine], whole.dw1[held], whole.dw2[held])
