"""Tables of the addresses that weight gradients go to, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mok_megatron.backends.abi import BOX_ROWS, TENSOR_MAP_BYTES, Library
from mok_megatron.backends.base import WeightGrads
from mok_megatron.backends.device_tables import DeviceTables
from mok_megatron.backends.streams import Calling
from mok_megatron.config import MoeShape

GRAD_TYPES = {torch.float32: 0, torch.bfloat16: 1}
ALIGNMENT = 16
"""Bytes; the kernels write so many at once."""


class GradTargets(NamedTuple):
    """Where a call's weight gradients go, as device addresses.

    Attributes:
        w1, w2: addresses of the gradients ``[e]``; None: all frozen.
        w1_maps, w2_maps: tensor maps of them ``[e]`` where they are fp32, else None.
        type: ``GradType``.
        accumulate: whether they are added to.
    """

    w1: int | None
    w2: int | None
    w1_maps: int | None
    w2_maps: int | None
    type: int
    accumulate: bool


class GradTables:
    """Gradient addresses -> their table on ``device``.

    It begins with ``int64 [2 * e]``, w1 then w2, 0 where a weight is frozen. For fp32, tensor maps ``[2 * e]`` follow,
    aligned as the copy engine wants them.
    """

    def __init__(self, library: Library, shape: MoeShape, device: torch.device) -> None:
        self._library, self._shape, self._device = library, shape, device
        self._maps_begin = -(-2 * 8 * shape.experts_per_rank // TENSOR_MAP_BYTES) * TENSOR_MAP_BYTES
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
            return GradTargets(None, None, None, None, 0, grads.accumulate)
        mapped = torch.float32 in types
        type_ = GRAD_TYPES[types.pop()]
        w1 = [0 if grad is None else grad.data_ptr() for grad in grads.w1]
        w2 = [0 if grad is None else grad.data_ptr() for grad in grads.w2]

        def table() -> Tensor:
            shape = self._shape
            self._check("w1", grads.w1, (2 * shape.intermediate, shape.hidden), calling.layer)
            self._check("w2", grads.w2, (shape.hidden, shape.intermediate), calling.layer)
            addresses = torch.tensor([*w1, *w2], dtype=torch.int64)
            return self._with_maps(addresses, w1, w2) if mapped else addresses

        first = self._tables.of((type_, *w1, *w2), table, calling)
        maps = first + self._maps_begin
        return GradTargets(
            w1=first if any(w1) else None,
            w2=first + 8 * len(w1) if any(w2) else None,
            w1_maps=maps if mapped else None,
            w2_maps=maps + TENSOR_MAP_BYTES * len(w1) if mapped else None,
            type=type_,
            accumulate=grads.accumulate,
        )

    def clear(self) -> None:
        """Forget all tables."""
        self._tables.clear()

    def _with_maps(self, addresses: Tensor, w1: list[int], w2: list[int]) -> Tensor:
        shape, begin = self._shape, self._maps_begin
        table = torch.zeros(begin + TENSOR_MAP_BYTES * len(addresses), dtype=torch.uint8)
        table[: addresses.nbytes] = addresses.view(torch.uint8)
        encode, start = self._library.encode_matrices, table.data_ptr() + begin
        encode(start, w1, bytes_=4, rows=2 * shape.intermediate, columns=shape.hidden, box_rows=BOX_ROWS)
        start += TENSOR_MAP_BYTES * len(w1)
        encode(start, w2, bytes_=4, rows=shape.hidden, columns=shape.intermediate, box_rows=BOX_ROWS)
        return table

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
