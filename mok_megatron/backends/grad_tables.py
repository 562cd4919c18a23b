"""Tables of the addresses that weight gradients go to, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mok_megatron.backends.base import WeightGrads
from mok_megatron.backends.device_tables import DeviceTables
from mok_megatron.backends.streams import Calling
from mok_megatron.config import MoeShape

GRAD_TYPES = {torch.float32: 0, torch.bfloat16: 1}
ALIGNMENT = 16
"""Bytes; the kernels write so many at once."""


class GradTargets(NamedTuple):
    """Where a call's weight gradients go: tables ``[e]`` (None: all frozen), their ``GradType``, whether to add."""

    w1: int | None
    w2: int | None
    type: int
    accumulate: bool


class GradTables:
    """Gradient addresses -> table ``int64 [2 * e]`` on ``device``, w1 then w2, 0 where a weight is frozen."""

    def __init__(self, shape: MoeShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._tables = DeviceTables(device)

    def of(self, grads: WeightGrads, calling: Calling) -> GradTargets:
        """Tables of ``grads``. Raises ValueError for gradients that the kernel cannot write.

        Dtypes are looked at in every call, since memory is used again with another one; all else when an address is
        new.
        """
        sinks = [grad for grad in (*grads.w1, *grads.w2) if grad is not None]
        types = {grad.dtype for grad in sinks}
        if len(types) > 1 or not types <= GRAD_TYPES.keys():
            names = ", ".join(sorted(str(dtype) for dtype in types))
            raise ValueError(
                f"layer {calling.layer}: weight gradients must be all float32 or all bfloat16, got {names}: "
                f"accumulate all of them into main_grad of one dtype"
            )
        if not types:
            return GradTargets(None, None, 0, grads.accumulate)
        type_ = GRAD_TYPES[types.pop()]
        w1 = [0 if grad is None else grad.data_ptr() for grad in grads.w1]
        w2 = [0 if grad is None else grad.data_ptr() for grad in grads.w2]

        def table() -> Tensor:
            shape = self._shape
            self._check("w1", grads.w1, (2 * shape.intermediate, shape.hidden), calling.layer)
            self._check("w2", grads.w2, (shape.hidden, shape.intermediate), calling.layer)
            return torch.tensor([*w1, *w2], dtype=torch.int64)

        first = self._tables.of((type_, *w1, *w2), table, calling)
        return GradTargets(
            first if any(w1) else None, first + 8 * len(w1) if any(w2) else None, type_, grads.accumulate
        )

    def clear(self) -> None:
        """Forget all tables."""
        self._tables.clear()

    def _check(self, name: str, sinks: Sequence[Tensor | None], size: tuple[int, int], layer: int) -> None:
        if len(sinks) != self._shape.experts_per_rank:
            raise ValueError(
                f"layer {layer}: {name} has {len(sinks)} gradients, the rank holds {self._shape.experts_per_rank} "
                f"experts"
            )
        for index, sink in enumerate(sinks):
            if sink is None:
                continue
            fits = sink.shape == size and sink.device == self._device
            if not fits or not sink.is_contiguous() or sink.data_ptr() % ALIGNMENT:
                raise ValueError(
                    f"layer {layer}: the gradient of {name}[{index}] must be contiguous {list(size)} on "
                    f"{self._device} and {ALIGNMENT}-byte aligned, got {list(sink.shape)} on {sink.device} with "
                    f"strides {sink.stride()} at {sink.data_ptr():#x}"
                )
