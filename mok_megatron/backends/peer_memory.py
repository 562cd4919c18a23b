"""Device memory that the GPUs of an expert-parallel group read and write directly, over NVLink."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_SETTINGS = {
    # Torch would bind the memory to an NVLink multicast object: the kernels use none, and their number is limited.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # Ranks that see one GPU each all call it number 0, and torch would take them for one (preflight.py goes by bus id).
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""Torch's environment variables during our rendezvous; other uses of symmetric memory are left alone."""

_REMEDY = "an EP group must lie inside one NVLink domain; see `mok-megatron doctor`"


class PeerMemory(NamedTuple):
    """One rank's allocation and where those of the group are.

    Attributes:
        buffer: uint8 ``[bytes]`` of this rank, zero.
        addresses: of every rank's buffer, as this process sees them, in group order.
        handle: keeps the peers' memory mapped.
    """

    buffer: Tensor
    addresses: list[int]
    handle: Any


def allocate(size: int, group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
    """``size`` zero bytes on every rank of ``group``. Collective; every buffer is zero when it returns.

    Raises RuntimeError, naming the ranks, when a peer's memory cannot be reached.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    with torch.cuda.device(device):  # NCCL and torch's memory pool work on the current device
        buffer = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        try:
            with _settings():
                handle = symmetric_memory.rendezvous(buffer, group)
            bases = [int(pointer) for pointer in handle.buffer_ptrs]
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {group.rank()} of the expert-parallel group cannot map the memory of its peers: {error}. If "
                f"no peer has said why: {_REMEDY}. Torch also needs all ranks of a group to have made symmetric memory "
                f"equally often before, in whatever groups; else they miss each other"
            ) from error
        unreachable = [rank for rank, pointer in enumerate(bases) if pointer == 0]
        if unreachable or len(bases) != group.size():
            raise RuntimeError(
                f"rank {group.rank()} of the expert-parallel group cannot reach the memory of rank(s) {unreachable} "
                f"({len(bases)} of {group.size()} addresses): {_REMEDY}"
            )
        # The addresses are those of whole allocations, of which torch's pool may have given us a part.
        offsets = [0] * group.size()
        dist.all_gather_object(offsets, buffer.data_ptr() - bases[group.rank()], group=group)
        buffer.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group=group)  # nobody writes into a peer's buffer before it is zero
    return PeerMemory(buffer, [base + offset for base, offset in zip(bases, offsets, strict=True)], handle)


@contextmanager
def _settings() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
