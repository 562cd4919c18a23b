"""Tables of the addresses that weight gradients go to, on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from mok_megatron.backends.base import WeightGrads

GRAD_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_KEPT = 1024
_Addresses = tuple[int, ...]


class GradTables:
    """A cache from gradient addresses to tables ``int64 [e]`` on ``device``, 0 where a weight is frozen."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: OrderedDict[_Addresses, tuple[Tensor, Tensor]] = OrderedDict()

    def of(self, grads: Sequence[Tensor | None]) -> int | None:
        """Address of the table of ``grads``; None when every weight is frozen."""
        addresses = tuple([0 if grad is None else grad.data_ptr() for grad in grads])
        if not any(addresses):
            return None
        found = self._tables.get(addresses)
        if found is None:
            host = torch.tensor(addresses, dtype=torch.int64).pin_memory()
            found = (host.to(self._device, non_blocking=True), host)  # a graph may replay the copy: both stay
            self._tables[addresses] = found
            if len(self._tables) > _KEPT and not torch.cuda.is_current_stream_capturing():
                self._tables.popitem(last=False)
        return found[0].data_ptr()

    def clear(self) -> None:
        """Forget all tables."""
        self._tables.clear()


def grad_type_of(grads: WeightGrads, w1_size: tuple[int, int], w2_size: tuple[int, int], layer: int) -> int:
    """``GradType`` of the call's gradients. Raises ValueError for sinks that the kernel cannot write."""
    types = set()
    for name, sinks, size in (("w1", grads.w1, w1_size), ("w2", grads.w2, w2_size)):
        for index, sink in enumerate(sinks):
            if sink is None:
                continue
            types.add(sink.dtype)
            if sink.shape != size or not sink.is_contiguous() or sink.data_ptr() % 8:
                raise ValueError(
                    f"layer {layer}: the gradient of {name}[{index}] must be contiguous {list(size)} and 8-byte "
                    f"aligned, got {list(sink.shape)} with strides {sink.stride()} at {sink.data_ptr():#x}"
                )
    if len(types) > 1 or not types <= GRAD_TYPES.keys():
        names = ", ".join(sorted(str(dtype) for dtype in types))
        raise ValueError(
            f"layer {layer}: weight gradients must be all float32 or all bfloat16, got {names}: accumulate all of "
            f"them into main_grad of one dtype"
        )
    return GRAD_TYPES[types.pop()] if types else 0
