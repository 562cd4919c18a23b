"""Where on the device a call is made. A call asks once: each answer takes time."""

from __future__ import annotations

from typing import NamedTuple

import torch

try:
    # Private, but what torch's own compiler calls: a number takes a tenth of the time of the Stream object around it.
    from torch._C import _cuda_getCurrentRawStream as _handle_of_current_stream
except ImportError:

    def _handle_of_current_stream(device: int) -> int:
        return torch.cuda.current_stream(device).cuda_stream


class Calling(NamedTuple):
    """A call of a layer.

    Attributes:
        layer: its number, for messages.
        stream: handle of the current stream of the layer's device; what the call launches goes there.
        captured: the stream's work goes into a graph.
        here: the layer's device is the current one.
    """

    layer: int
    stream: int
    captured: bool
    here: bool

    @classmethod
    def on(cls, device: torch.device, layer: int) -> Calling:
        """A call of ``layer`` on the current stream of ``device``, which need not be the current device."""
        index = device.index
        if torch.cuda.current_device() == index:
            return cls(layer, _handle_of_current_stream(index), torch.cuda.is_current_stream_capturing(), True)
        with torch.cuda.device(device):
            return cls(layer, _handle_of_current_stream(index), torch.cuda.is_current_stream_capturing(), False)
