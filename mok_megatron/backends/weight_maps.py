"""Tensor maps of the expert weights by the parameters' addresses: weights are used where Megatron keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mok_megatron.backends.abi import BOX_ROWS, TENSOR_MAP_BYTES, WEIGHT_BOX_ROWS, Library
from mok_megatron.backends.device_tables import Addresses, DeviceTables
from mok_megatron.backends.streams import Calling
from mok_megatron.config import MoeShape


class Maps(NamedTuple):
    """Device addresses of the maps of w1 and w2 for each direction, ``[e]`` each."""

    w1_forward: int
    w2_forward: int
    w1_backward: int
    w2_backward: int


class WeightMaps:
    """Weight addresses -> tensor maps on ``device``."""

    def __init__(self, library: Library, shape: MoeShape, device: torch.device) -> None:
        self._library, self._shape, self._device = library, shape, device
        self._part = shape.experts_per_rank * TENSOR_MAP_BYTES
        self._tables = DeviceTables(device)

    def of(self, w1: Sequence[Tensor], w2: Sequence[Tensor], calling: Calling) -> Maps:
        """Maps of ``w1[i] [2I, H]`` and ``w2[i] [H, I]`` where they are now. Raises ValueError for other tensors."""
        addresses = (*map(Tensor.data_ptr, w1), *map(Tensor.data_ptr, w2))

        def encoded() -> Tensor:
            self._check(w1, w2, calling.layer)
            return self._encode(addresses)

        first, part = self._tables.of(addresses, encoded, calling), self._part
        return Maps(first, first + part, first + 2 * part, first + 3 * part)

    def clear(self) -> None:
        """Forget all maps."""
        self._tables.clear()

    def _encode(self, addresses: Addresses) -> Tensor:
        """``uint8 [4 * e * 128]`` in host memory, in the order of ``Maps``."""
        count, hidden, inner = self._shape.experts_per_rank, self._shape.hidden, self._shape.intermediate
        host = torch.empty(4 * self._part, dtype=torch.uint8)
        w1, w2 = list(addresses[:count]), list(addresses[count:])
        encode, start, part = self._library.encode_matrices, host.data_ptr(), self._part
        encode(start, w1, parts=2, rows=inner, columns=hidden, box_rows=WEIGHT_BOX_ROWS)
        encode(start + part, w2, rows=hidden, columns=inner, box_rows=WEIGHT_BOX_ROWS)
        encode(start + 2 * part, w1, rows=2 * inner, columns=hidden, box_rows=BOX_ROWS)
        encode(start + 3 * part, w2, rows=hidden, columns=inner, box_rows=BOX_ROWS)
        return host

    def _check(self, w1: Sequence[Tensor], w2: Sequence[Tensor], layer: int) -> None:
        shape = self._shape
        for name, weights, size in (
            ("w1", w1, (2 * shape.intermediate, shape.hidden)),
            ("w2", w2, (shape.hidden, shape.intermediate)),
        ):
            if len(weights) != shape.experts_per_rank:
                raise ValueError(
                    f"layer {layer}: {name} has {len(weights)} experts, the rank holds {shape.experts_per_rank}"
                )
            for index, weight in enumerate(weights):
                check_operand(f"{name}[{index}]", weight, size, self._device, layer)


def check_operand(name: str, tensor: Tensor, size: tuple[int, ...], device: torch.device, layer: int) -> None:
    """Raise ValueError for a tensor that is not the layer's, or that the copy engine cannot read."""
    if tensor.shape != size or tensor.dtype != torch.bfloat16 or tensor.device != device:
        raise ValueError(
            f"layer {layer}: {name} must be {list(size)} torch.bfloat16 on {device}, "
            f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
    if not tensor.is_contiguous() or tensor.data_ptr() % 16:
        raise ValueError(
            f"layer {layer}: {name} must be contiguous and 16-byte aligned, "
            f"got strides {tensor.stride()} at address {tensor.data_ptr():#x}"
        )
