"""Stand-ins for the GPU and the kernel library, for tests of what the host does around launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mok_megatron.backends import failures, streams
from mok_megatron.config import MoeShape

SHAPE = MoeShape(hidden=128, intermediate=64, num_experts=2, top_k=1)
CPU = torch.device("cpu")


class _Stream:
    def __init__(self, number: int, said: list[str]) -> None:
        self.cuda_stream, self._said = number, said

    def record_event(self) -> str:
        return f"event of {self.cuda_stream}"

    def wait_event(self, event: str) -> None:
        self._said.append(f"{self.cuda_stream} waits for {event}")

    def wait_stream(self, other: _Stream) -> None:
        self._said.append(f"{self.cuda_stream} waits for {other.cuda_stream}")


class FakeGpu:
    """Stands in for ``torch.cuda``. The test chooses stream, device and capture; ``said`` is what happened."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.streams = [_Stream(number, self.said) for number in range(3)]
        self.stream, self.capturing, self.current = self.streams[0], False, 0

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self.current = self.current, torch.device(device).index or 0
        yield
        self.current = before


class FakeLibrary:
    """Records launches, copies of their parameters, and the matrices that tensor maps were asked for."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.launched: list[tuple[type, int, int]] = []
        self.params: list[Any] = []
        self.encoded: list[tuple[int, list[int], dict[str, int]]] = []

    def launch(self, params: Any, stream: int) -> None:
        self.launched.append((type(params), self._gpu.current, stream))
        self.params.append(type(params).from_buffer_copy(params))

    def encode_matrices(self, maps: int, matrices: list[int], **sizes: int) -> None:
        self.encoded.append((maps, matrices, sizes))


def bf16(*size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Let ``torch.cuda`` be a FakeGpu for a test."""
    gpu = FakeGpu()
    for name, function in {
        "current_stream": lambda _device: gpu.stream,
        "is_current_stream_capturing": lambda: gpu.capturing,
        "current_device": lambda: gpu.current,
        "device": gpu.device,
        "synchronize": lambda _device: gpu.said.append("synchronized"),
        "get_device_capability": lambda _device: (9, 0),
        "get_device_properties": lambda _device: SimpleNamespace(multi_processor_count=132),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(streams, "_handle_of_current_stream", lambda _index: gpu.stream.cuda_stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _t, s: gpu.said.append(f"kept for {s.cuda_stream}"))
    monkeypatch.setattr(failures, "_thread", "none is started")
    monkeypatch.setattr(failures, "_watched", [])
    return gpu
