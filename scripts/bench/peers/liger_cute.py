"""liger-cute."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ..implementations import Gradients
from ..inputs import Case
from ..shapes import named_shapes
from .base import PeerLayer, grad, leaf, require_process_group


class LigerCuteLayer(PeerLayer):
    """liger-cute's fused layer: separate gate and up weights, router weights in bf16.

    What its forward keeps for backward stays in its symmetric heap until that backward, and the heap has room for
    one: so forward alone is timed under no_grad, where the same kernel runs and its buffers are given back.
    """

    heap_bytes: ClassVar[int | None] = None
    """Device memory that its configuration took; once per process, and for the largest of the shapes."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from liger_kernel.ops.cute.ops.moe import moe_fused

        self._function = moe_fused
        require_process_group()
        if LigerCuteLayer.heap_bytes is None:
            before = _outside_torch()
            self._configure(case)
            LigerCuteLayer.heap_bytes = _outside_torch() - before
        self._experts = case.experts.int()
        for copy in case.copies:
            gate, up = (half.contiguous() for half in copy.w1.chunk(2, dim=1))
            tensors = (copy.x, case.weights.to(torch.bfloat16), gate, up, copy.w2)
            self._sets.append([leaf(tensor) for tensor in tensors])

    def _configure(self, case: Case) -> None:
        import liger_cute_kernels

        world = case.shape.ep_size
        shapes = named_shapes().values()
        config = liger_cute_kernels.MoEConfig(
            max_tokens=max(8192, case.tokens),
            hidden_size=max(shape.hidden for shape in shapes),
            num_experts=max(shape.on_ranks(world).num_experts for shape in shapes if shape.model_experts % world == 0),
            top_k=max(shape.top_k for shape in shapes),
            num_hosts=1,
            gpus_per_host=world,
            max_inflight=1,
        )
        liger_cute_kernels.configure(device=case.ranks.device, moe=config)

    def forward(self, index: int) -> Tensor:
        """See ``Layer.forward``."""
        x, weights, gate, up, down = self._sets[index]
        shape = self._case.shape
        y: Tensor = self._function(x, self._experts, weights, gate, up, down, shape.num_experts, shape.top_k, None)
        return y

    def gradients(self, index: int, expert: int) -> Gradients:
        """See ``Layer``."""
        dx, dprobs, gate, up, dw2 = (grad(tensor) for tensor in self._sets[index])
        return Gradients(dx=dx, dprobs=dprobs, dw1=torch.cat([gate[expert], up[expert]]), dw2=dw2[expert])

    def workspace_bytes(self) -> int:
        """Its symmetric heap, which holds what forward keeps too."""
        return self.heap_bytes or 0

    def uncounted_bytes(self) -> int:
        """The heap; less the split weights, which stand beside the case's own."""
        return self.workspace_bytes() - sum(copy.w1.numel() * copy.w1.element_size() for copy in self._case.copies)


def _outside_torch() -> int:
    """Bytes of the current device that are taken, but not by torch's allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
