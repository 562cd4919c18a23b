"""The memory that a CUDA backend works in: one allocation that peers see, and scratch that they do not.

``Workspace.local`` serves one rank alone or W *virtual* ranks of one GPU, all in ordinary device memory;
``Workspace.symmetric`` rendezvouses a real EP group over NVLink. The kernels see the same thing in each case: an array
of base addresses and one layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron import memory
from mok_megatron.backends import peer_memory
from mok_megatron.backends.abi import FailRecord, SymmetricLayout
from mok_megatron.config import MoeShape

_MOST_ROWS = 1 << 30
"""Pairs of row blocks have 22 bits (kernels/moe/tile_order.h)."""
_MOST_SLOTS = 1 << 31


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a workspace is made for; the same on every rank of a group.

    Raises ValueError where rows or slots exceed what the kernels' 32-bit tables can number.

    Attributes:
        replays: backward replays rows whatever the routing, because forward does not keep all that it needs.
    """

    shape: MoeShape
    max_tokens: int
    ring_rows: int
    replays: bool = False

    def __post_init__(self) -> None:
        rows, slots = self.max_rows, self.max_tokens * self.shape.top_k
        if rows >= _MOST_ROWS or slots >= _MOST_SLOTS:
            raise ValueError(
                f"{self.max_tokens} tokens per rank can make {rows} rows on one rank (limit {_MOST_ROWS}) and {slots} "
                f"slots (limit {_MOST_SLOTS}): use a smaller micro batch or more context parallelism"
            )

    @property
    def max_rows(self) -> int:
        """R, the most rows that a rank can hold."""
        return memory.most_rows(self.shape, self.max_tokens)

    def symmetric_buffers(self) -> tuple[memory.Buffer, ...]:
        """What peers read or write."""
        return memory.symmetric_buffers(self.shape, self.max_tokens)

    def scratch_buffers(self) -> tuple[memory.Buffer, ...]:
        """What only this rank's kernels touch."""
        return memory.scratch_buffers(self.shape, self.max_tokens, self.ring_rows, replays=self.replays)

    def layout(self) -> SymmetricLayout:
        """Offsets of the symmetric buffers."""
        offsets, end = memory.placed(self.symmetric_buffers())
        return SymmetricLayout(**offsets, bytes=end)


class Workspace:
    """One rank's buffers and the addresses of its peers'.

    Attributes:
        layout: offsets inside each rank's symmetric allocation.
        base: address of this rank's symmetric allocation.
        peers: int64 ``[W]`` on the device, base addresses by rank.
        scratch: addresses of the local buffers by name (memory.scratch_buffers).
        symmetric_bytes, scratch_bytes: the two allocations, uint8.
        record: int32 ``[8]`` in pinned memory: the kernels' ``FailRecord``.
    """

    def __init__(self, sizes: Sizes, rank: int, symmetric: Tensor, peers: list[int], keep: Any = None) -> None:
        device = symmetric.device
        self.sizes, self.rank, self.layout = sizes, rank, sizes.layout()
        self.base = peers[rank]
        self.peers = torch.tensor(peers, dtype=torch.int64).to(device)
        self._keep = keep
        self.symmetric_bytes = symmetric
        offsets, end = memory.placed(sizes.scratch_buffers())
        self.scratch_bytes = torch.zeros(end, dtype=torch.uint8, device=device)
        self.scratch = {name: self.scratch_bytes.data_ptr() + offset for name, offset in offsets.items()}
        self.record = torch.zeros(8, dtype=torch.int32).pin_memory()
        self._fail_record = FailRecord.from_address(self.record.data_ptr())

    @classmethod
    def local(cls, sizes: Sizes, device: torch.device) -> list[Workspace]:
        """All W ranks of the layer on one device: the only rank, or W virtual ones."""
        buffers = [
            torch.zeros(sizes.layout().bytes, dtype=torch.uint8, device=device) for _ in range(sizes.shape.ep_size)
        ]
        peers = [buffer.data_ptr() for buffer in buffers]
        return [cls(sizes, rank, buffer, peers) for rank, buffer in enumerate(buffers)]

    @classmethod
    def symmetric(cls, sizes: Sizes, group: dist.ProcessGroup, device: torch.device) -> Workspace:
        """This rank's part of a group's workspace. Collective; uses peer-mapped memory, never NVLink multicast.

        Raises RuntimeError, naming the ranks, when a peer's memory cannot be reached.
        """
        space = peer_memory.allocate(sizes.layout().bytes, group, device)
        return cls(sizes, group.rank(), space.buffer, space.addresses, keep=space.handle)

    def failure(self) -> FailRecord | None:
        """What a kernel reported, or None. Reads host memory only."""
        return FailRecord.from_buffer_copy(self._fail_record) if self._fail_record.code > 0 else None
