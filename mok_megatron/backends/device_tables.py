"""Small tables that the kernels read on the device, made on the host once for each set of addresses in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mok_megatron.backends.streams import Calling

KEPT = 1024
"""Tables kept: one per layer while its parameters stay where they are."""

Addresses = tuple[int, ...]


@dataclass(frozen=True)
class _Entry:
    addresses: Addresses
    device: Tensor
    address: int
    host: Tensor  # pinned; a graph may replay the copy
    ready: torch.cuda.Event | None  # the copy has run; None: it belongs to a graph, which runs it at every replay
    streams: set[int]  # that come after the copy


class DeviceTables:
    """A cache from addresses to tables on ``device``, safe under streams and graphs.

    The copy to the device runs on the stream of the first call; other streams wait for it once. A table that a graph
    may read is never given up. One that is made during a capture is filled by the graph's replays alone, so no other
    call gets it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries: OrderedDict[Addresses, _Entry] = OrderedDict()
        self._of_graphs: dict[int, _Entry] = {}

    def of(self, addresses: Addresses, make: Callable[[], Tensor], calling: Calling) -> int:
        """Address of the table of ``addresses``; ``make`` gives its content in host memory where it is new."""
        entry = self._entries.get(addresses)
        if calling.captured:
            entry = entry or self._copied(addresses, make(), calling)
            self._of_graphs[id(entry)] = entry
        elif entry is None:
            entry = self._entries[addresses] = self._copied(addresses, make(), calling)
            if len(self._entries) > KEPT:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(entry.addresses)  # the very object that is there: found without comparing
            if calling.stream not in entry.streams:
                self._order(entry, calling)
        return entry.address

    def clear(self) -> None:
        """Forget all tables; nothing may use them any more."""
        self._entries.clear()
        self._of_graphs.clear()

    def _copied(self, addresses: Addresses, content: Tensor, calling: Calling) -> _Entry:
        host = content.pin_memory()
        device = host.to(self._device, non_blocking=True)
        ready = None if calling.captured else torch.cuda.current_stream(self._device).record_event()
        return _Entry(addresses, device, device.data_ptr(), host, ready, {calling.stream})

    def _order(self, entry: _Entry, calling: Calling) -> None:
        """Let the call come after the copy, and the table's memory live until the call's stream is done with it."""
        if entry.ready is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(entry.ready)
        entry.device.record_stream(stream)
        entry.streams.add(calling.stream)
