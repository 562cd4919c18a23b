"""The layer as a chain of torch operations: sort, NCCL all-to-all, grouped GEMMs, all-to-all, weighted sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from mok_megatron.config import Activation

from .implementations import Gradients, Implementation
from .inputs import Case
from .reference import swiglu

_grouped_mm = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks: ``sent[r]`` of them to rank r, ``received[r]`` from it; back the same way in backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _exchange(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, ctx.sent, ctx.received, ctx.group), None, None, None


def _exchange(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def grouped_experts(rows: Tensor, ends: Tensor, w1: Tensor, w2: Tensor, activation: Activation) -> Tensor:
    """``rows [R, H]`` sorted by expert, ``ends [e]`` int32 the end of each expert's rows -> outputs ``[R, H]``."""
    assert _grouped_mm is not None
    gate, up = _grouped_mm(rows, w1.transpose(1, 2), offs=ends).chunk(2, dim=1)
    return _grouped_mm(swiglu(gate, up, activation), w2.transpose(1, 2), offs=ends)


class EagerLayer:
    """See ``Layer``."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._sets = [
            tuple(tensor.detach().requires_grad_() for tensor in (copy.x, case.weights, copy.w1, copy.w2))
            for copy in case.copies
        ]

    def forward(self, index: int) -> Tensor:
        """See ``Layer.forward``."""
        x, weights, w1, w2 = self._sets[index]
        case, shape = self._case, self._case.shape
        flat = case.experts.flatten()
        order = torch.argsort(flat, stable=True)
        tokens = order // shape.top_k
        counts = torch.bincount(flat, minlength=shape.num_experts)
        rows = self._experts(x[tokens], counts, w1, w2)
        rows = rows * weights.flatten()[order].to(rows.dtype)[:, None]
        return torch.zeros_like(x).index_add(0, tokens, rows)

    def _experts(self, rows: Tensor, counts: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        """Outputs of ``rows``, which are sorted by expert, on whichever ranks the experts are."""
        shape, group = self._case.shape, self._case.ranks.group
        if group is None:
            return grouped_experts(rows, counts.cumsum(0).to(torch.int32), w1, w2, shape.activation)
        local = shape.experts_per_rank
        sent_counts = counts.view(-1, local)
        counts_here = torch.empty_like(sent_counts)
        dist.all_to_all_single(counts_here, sent_counts, group=group)
        sent, received = sent_counts.sum(1).tolist(), counts_here.sum(1).tolist()
        rows = _AllToAll.apply(rows, received, sent, group)
        # From (source rank, expert) order to (expert, source rank), and back.
        expert = torch.arange(local, device=rows.device).repeat(len(sent)).repeat_interleave(counts_here.flatten())
        order = torch.argsort(expert, stable=True)
        ends = counts_here.sum(0).cumsum(0).to(torch.int32)
        out = grouped_experts(rows[order], ends, w1, w2, shape.activation)
        return _AllToAll.apply(out[torch.argsort(order)], sent, received, group)

    def clear_gradients(self, index: int) -> None:
        """See ``Layer``."""
        for leaf in self._sets[index]:
            leaf.grad = None

    def gradients(self, index: int, expert: int) -> Gradients:
        """See ``Layer``."""
        dx, dprobs, dw1, dw2 = (leaf.grad for leaf in self._sets[index])
        assert dx is not None and dprobs is not None and dw1 is not None and dw2 is not None
        return Gradients(dx=dx, dprobs=dprobs, dw1=dw1[expert], dw2=dw2[expert])

    def schedule(self, index: int) -> object:
        """It has none."""
        return None

    def workspace_bytes(self) -> int:
        """It has none."""
        return 0

    def uncounted_bytes(self) -> int:
        """See ``Layer``; NCCL's own buffers are left out."""
        return 0

    def close(self) -> None:
        """See ``Layer``."""
        self._sets.clear()


def _unavailable(case: Case) -> str | None:
    return None if _grouped_mm is not None else f"torch {torch.__version__} has no grouped_mm"


IMPLEMENTATIONS = (Implementation(name="eager", build=EagerLayer, unavailable=_unavailable),)
