"""DeepEP."""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs import Case
from ..torch_eager import grouped_experts
from .base import PeerLayer


class DeepEpLayer(PeerLayer):
    """DeepEP's dispatch and combine inside one node, grouped GEMMs of torch between them. Forward only."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        import deep_ep

        world, row_bytes = case.shape.ep_size, case.shape.hidden * 2
        configs = (deep_ep.Buffer.get_dispatch_config(world), deep_ep.Buffer.get_combine_config(world))
        size = max(config.get_nvl_buffer_size_hint(row_bytes, world) for config in configs)
        self._buffer = deep_ep.Buffer(case.ranks.group, size, 0)
        self._experts = case.experts.to(getattr(deep_ep, "topk_idx_t", torch.int64))

    def clear_gradients(self, index: int) -> None:
        """It makes none."""

    def forward(self, index: int) -> Tensor:
        """See ``Layer.forward``."""
        case, copy = self._case, self._case.copies[index]
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(self._experts, case.shape.num_experts)
        x, experts, weights, counts, handle, _ = self._buffer.dispatch(
            copy.x,
            topk_idx=self._experts,
            topk_weights=case.weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        token, slot = (experts >= 0).nonzero(as_tuple=True)
        order = torch.argsort(experts[token, slot], stable=True)
        token, slot = token[order], slot[order]
        ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)
        out = grouped_experts(x[token], ends, copy.w1, copy.w2, case.shape.activation)
        partial = torch.zeros_like(x).index_add_(0, token, out * weights[token, slot, None].to(out.dtype))
        y: Tensor = self._buffer.combine(partial, handle)[0]
        return y
