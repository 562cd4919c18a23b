"""Streams, events and random state of a CUDA device that is really the CPU: all work is done when a call returns."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


class Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class Stream:
    """A stream whose work is always done; all streams compare equal, since there is one thread of work."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return Event() if event is None else event


class StreamContext:
    """What ``torch.cuda.stream(s)`` returns."""

    def __init__(self, stream: Any = None) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class DeviceProperties:
    """Just enough of a device for Megatron's checks of the architecture: a Hopper-class one."""

    name = "cpu"
    major, minor = 9, 0
    total_memory = 0
    multi_processor_count = 1


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The CPU generator's state: tensors "on the GPU" draw from it."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(new_state)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def nothing(*_: Any, **__: Any) -> None:
    """Stands for a call that has no meaning without a device: synchronize, empty_cache, set_device, ..."""


def weight_gradient_extension() -> ModuleType:
    """Apex's extension for ``--gradient-accumulation-fusion``: ``main_grad += grad_output^T @ input``."""

    def accumulate(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        """``total_input [N, H]``, ``grad_output [N, O]``, ``main_grad [O, H]`` fp32 or lower, changed in place."""
        main_grad.add_(torch.mm(grad_output.t(), total_input))

    module: Any = ModuleType("fused_weight_gradient_mlp_cuda")
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = accumulate
    return module
