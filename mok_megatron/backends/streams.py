"""Where on the device a call is made. A call asks once: each answer costs microseconds."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Calling(NamedTuple):
    """A call of a layer.

    Attributes:
        layer: its number, for messages.
        stream: what the call launches goes there.
        captured: the stream's work goes into a graph.
    """

    layer: int
    stream: torch.cuda.Stream
    captured: bool

    @classmethod
    def on(cls, device: torch.device, layer: int) -> Calling:
        """A call of ``layer`` on the current stream of ``device``, which need not be the current device."""
        if torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return cls(layer, torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing())
        return cls(layer, torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing())
