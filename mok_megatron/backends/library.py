"""Which layers the kernels run on which device, and the library that holds them."""

from __future__ import annotations

import torch

from mok_megatron.backends.abi import MAX_EXPERTS, MAX_LOCAL_EXPERTS, Library
from mok_megatron.backends.build import architecture_of, build
from mok_megatron.config import MoeShape

_libraries: dict[str, Library] = {}


def load_library(architecture: str) -> Library:
    """The kernel library of an architecture, compiled if need be.

    Raises BuildError when it cannot be compiled, OSError when the cache cannot be written or the file not be loaded,
    RuntimeError when it was built from other sources.
    """
    if architecture not in _libraries:
        _libraries[architecture] = Library(build(architecture))
    return _libraries[architecture]


def cuda_unavailable_reason(device: torch.device, shape: MoeShape, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run a layer on ``device``, or None where they can. Compiles them if need be."""
    if device.type != "cuda":
        return f"the device is {device.type}, not a GPU"
    if dtype != torch.bfloat16:
        return f"the kernels run bfloat16 layers, this one is {dtype}"
    for name, value in (("hidden size", shape.hidden), ("expert intermediate size", shape.intermediate)):
        if value % 64:
            return f"{name} {value} is not a multiple of 64"
    if shape.experts_per_rank > MAX_LOCAL_EXPERTS or shape.num_experts > MAX_EXPERTS:
        return (
            f"{shape.experts_per_rank} experts per rank and {shape.num_experts} in all exceed the kernels' "
            f"{MAX_LOCAL_EXPERTS} and {MAX_EXPERTS}"
        )
    capability = torch.cuda.get_device_capability(device)
    architecture = architecture_of(capability)
    if architecture is None:
        return (
            f"there are no kernels for {torch.cuda.get_device_name(device)} (compute capability "
            f"{capability[0]}.{capability[1]}), only for 9.0 (Hopper)"
        )
    try:
        library = load_library(architecture)
    except (RuntimeError, OSError) as error:  # a reason like any other: the ranks of a group have to hear of it
        return str(error)
    with torch.cuda.device(device):
        failure = library.load_kernels()
    if failure is None:
        return None
    what = f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]})"
    return (
        f"{failure}: {what} needs code for {architecture}. Delete the file, or rebuild it with "
        f"`mok-megatron build --arch {architecture}`"
    )
