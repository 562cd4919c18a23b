"""What the peers share."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ..implementations import Gradients
from ..inputs import Case


class PeerLayer:
    """What the peers share: per set of tensors its leaves, x and the router weights first."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._sets: list[list[Tensor]] = []

    def clear_gradients(self, index: int) -> None:
        """See ``Layer``."""
        for tensor in self._sets[index]:
            tensor.grad = None

    def gradients(self, index: int, expert: int) -> Gradients:
        """See ``Layer``; for leaves x, router weights, w1 ``[e, 2I, H]``, w2 ``[e, H, I]``."""
        dx, dprobs, dw1, dw2 = (grad(tensor) for tensor in self._sets[index])
        return Gradients(dx=dx, dprobs=dprobs.view(self._case.experts.shape), dw1=dw1[expert], dw2=dw2[expert])

    def schedule(self, index: int) -> object:
        """Not a step of its own."""
        return None

    def workspace_bytes(self) -> int:
        """Unknown, and left out."""
        return 0

    def uncounted_bytes(self) -> int:
        """Unknown, and left out."""
        return 0

    def close(self) -> None:
        """See ``Layer``."""
        self._sets.clear()


def grad(tensor: Tensor) -> Tensor:
    """The gradient of a leaf that backward has reached."""
    assert tensor.grad is not None
    return tensor.grad


def leaf(tensor: Tensor) -> Tensor:
    """The same values as a leaf that wants a gradient."""
    return tensor.detach().requires_grad_()


def require_process_group() -> None:
    """Some peers need torch.distributed even for a single rank."""
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
