"""SonicMoE."""

from __future__ import annotations

import torch
from torch import Tensor

from ..inputs import Case
from .base import PeerLayer, leaf


class SonicLayer(PeerLayer):
    """SonicMoE (no expert parallelism), by its entry for routings that are made elsewhere."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs

        self._limit_tuning(case.shape.top_k)
        self._function, self._swiglu = moe_general_routing_inputs, ActivationType.SWIGLU
        tokens = torch.arange(case.tokens, device=case.ranks.device, dtype=torch.int32)
        self._tokens = tokens.repeat_interleave(case.shape.top_k)
        self._experts = case.experts.flatten().int()
        for copy in case.copies:
            self._sets.append([leaf(tensor) for tensor in (copy.x, case.weights.flatten(), copy.w1, copy.w2)])

    @staticmethod
    def _limit_tuning(top_k: int) -> None:
        """Let the sum over a token's rows try only blocks of all its rows: all 60 configurations take minutes."""
        import triton
        from sonicmoe.functional import reduction_over_k_gather

        rows = 1 << (top_k - 1).bit_length()
        reduction_over_k_gather.token_gather_sum_kernel.configs = [
            triton.Config({"BLOCK_H": columns, "BLOCK_K": rows}, num_warps=warps, num_stages=4)
            for columns in (512, 1024, 2048)
            for warps in (4, 8)
        ]

    def forward(self, index: int) -> Tensor:
        """See ``Layer.forward``."""
        x, weights, w1, w2 = self._sets[index]
        stream = torch.cuda.current_stream().cuda_stream
        first, second = w1.permute(1, 2, 0), w2.permute(1, 2, 0)
        experts = self._case.shape.num_experts
        y: Tensor = self._function(
            x,
            weights,
            self._tokens,
            self._experts,
            first,
            None,
            second,
            None,
            experts,
            stream,
            self._swiglu,
            is_inference_mode_enabled=False,  # where it is set, 0.1.2 passes None for a tensor and fails
            concat_layout=True,  # all gate rows, then all up rows
        )[0]
        return y
