"""Tables of the addresses that weight gradients go to, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mok_megatron.backends.base import WeightGrads
from mok_megatron.backends.device_tables import DeviceTables

GRAD_TYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True)
class GradTargets:
    """Where a call's weight gradients go: tables ``[e]`` (None: all frozen), their ``GradType``, whether to add."""

    w1: int | None
    w2: int | None
    type: int
    accumulate: bool


class GradTables:
    """Gradient addresses -> tables ``int64 [e]`` on ``device``, 0 where a weight is frozen."""

    def __init__(self, device: torch.device) -> None:
        self._tables = DeviceTables(device)

    def of(self, grads: Sequence[Tensor | None]) -> int | None:
        """Address of the table of ``grads``; None when every weight is frozen."""
        addresses = tuple([0 if grad is None else grad.data_ptr() for grad in grads])
        if not any(addresses):
            return None
        return self._tables.of(addresses, lambda: torch.tensor(addresses, dtype=torch.int64))

    def clear(self) -> None:
        """Forget all tables."""
        self._tables.clear()


def grad_type_of(
    grads: WeightGrads, w1_size: tuple[int, int], w2_size: tuple[int, int], device: torch.device, layer: int
) -> int:
    """``GradType`` of the call's gradients. Raises ValueError for sinks that the kernel cannot write."""
    types = set()
    for name, sinks, size in (("w1", grads.w1, w1_size), ("w2", grads.w2, w2_size)):
        for index, sink in enumerate(sinks):
            if sink is None:
                continue
            types.add(sink.dtype)
            if sink.shape != size or sink.device != device or not sink.is_contiguous() or sink.data_ptr() % 8:
                raise ValueError(
                    f"layer {layer}: the gradient of {name}[{index}] must be contiguous {list(size)} on {device} and "
                    f"8-byte aligned, got {list(sink.shape)} on {sink.device} with strides {sink.stride()} at "
                    f"{sink.data_ptr():#x}"
                )
    if len(types) > 1 or not types <= GRAD_TYPES.keys():
        names = ", ".join(sorted(str(dtype) for dtype in types))
        raise ValueError(
            f"layer {layer}: weight gradients must be all float32 or all bfloat16, got {names}: accumulate all of "
            f"them into main_grad of one dtype"
        )
    return GRAD_TYPES[types.pop()] if types else 0
