"""Every replacement that Megatron needs to train on the CPU, each with its reason."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron_cpu import fake_cuda

_CPU = torch.device("cpu")

_FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm", "empty_like", "zeros_like", "ones_like", "full_like"),
)
_METHOD_FACTORIES = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


def install() -> None:
    """Apply all replacements to this process; call before megatron is imported. Idempotent.

    Raises RuntimeError where a real CUDA device is present: use that one instead.
    """
    if torch.cuda.Stream is fake_cuda.Stream:  # type: ignore[comparison-overlap]
        return
    if torch.cuda.is_available():
        raise RuntimeError("a CUDA device is present: run the script directly, not under tests.megatron_cpu")
    # Adam imports it; it catalogues torch's functions when imported, and refuses replaced ones.
    importlib.import_module("torch._dynamo")
    _fake_device()
    _cpu_tensors()
    _disable_compiler()
    _plain_split_sizes()
    # Lets the option be tested: Megatron takes it only where Apex's CUDA extension can be imported.
    sys.modules["fused_weight_gradient_mlp_cuda"] = fake_cuda.weight_gradient_extension()


def _fake_device() -> None:
    """``torch.cuda`` says that there is one device; its streams are idle and its generator is the CPU's."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = lambda device=None: fake_cuda.DeviceProperties()
    cuda.is_current_stream_capturing = lambda: False
    torch.accelerator.current_accelerator = lambda check_available=False: None  # Adam asks before each step
    cuda.Stream = fake_cuda.Stream
    cuda.Event = fake_cuda.Event
    cuda.stream = fake_cuda.StreamContext
    cuda.current_stream = cuda.default_stream = lambda device=None: fake_cuda.Stream()
    for name in ("synchronize", "empty_cache", "set_device", "set_stream", "_lazy_init", "reset_peak_memory_stats"):
        setattr(cuda, name, fake_cuda.nothing)
    cuda._lazy_call = lambda call, **_: call()  # the real one queues until a device is initialised
    cuda.default_generators = (torch.default_generator,)
    for module in (cuda, cuda.random):
        module.get_rng_state = fake_cuda.get_rng_state
        module.set_rng_state = fake_cuda.set_rng_state
        module.manual_seed = module.manual_seed_all = fake_cuda.manual_seed
    # Megatron warns when the CPU's generator moves inside its GPU generator's scope; here they are the same one.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _cpu_tensors() -> None:
    """Tensors asked for on ``cuda`` are made on, or stay on, the CPU."""
    # Functions are replaced one by one. A TorchFunctionMode would be shorter, but is off during backward.
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    tensor: Any = torch.Tensor
    for name in _METHOD_FACTORIES:
        setattr(tensor, name, _on_cpu(getattr(tensor, name)))
    original_to, original_type = tensor.to, tensor.type
    tensor.to = lambda self, *args, **kwargs: original_to(self, *map(_to_cpu, args), **_cpu_kwargs(kwargs))
    tensor.cuda = lambda self, *_, **__: self
    tensor.pin_memory = lambda self, *_, **__: self
    tensor.record_stream = fake_cuda.nothing

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Optimizers sort parameters by the type's name, and know only the CUDA ones."""
        answer = original_type(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    tensor.type = cuda_type


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        return factory(*args, **_cpu_kwargs(kwargs))

    return make


def _cpu_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    if "device" in kwargs:
        kwargs["device"] = _to_cpu(kwargs["device"])
    kwargs.pop("pin_memory", None)
    return kwargs


def _to_cpu(value: Any) -> Any:
    """The CPU for a CUDA device (name, index or object); anything else unchanged."""
    is_index = isinstance(value, int) and not isinstance(value, bool)
    is_name = isinstance(value, str) and value.startswith("cuda")
    is_object = isinstance(value, torch.device) and value.type == "cuda"
    return _CPU if is_index or is_name or is_object else value


def _disable_compiler() -> None:
    """``torch.compile`` returns the function: compiling for the CPU takes minutes and needs a C++ compiler."""

    def compile_nothing(model: Callable[..., Any] | None = None, **_: Any) -> Any:
        return model if model is not None else (lambda function: function)

    torch.compile = compile_nothing


def _plain_split_sizes() -> None:
    """gloo's ``all_to_all_single`` takes split sizes only as lists of int; the dispatchers pass arrays or tensors."""
    original = dist.all_to_all_single

    def sizes(splits: Iterable[Any] | None) -> list[int] | None:
        return None if splits is None else [int(size) for size in splits]

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Iterable[Any] | None = None,
        input_split_sizes: Iterable[Any] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return original(output, input, sizes(output_split_sizes), sizes(input_split_sizes), group, async_op)

    dist.all_to_all_single = all_to_all_single
