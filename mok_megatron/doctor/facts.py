"""What the doctor knows about a machine, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mok_megatron.preflight import NodeFabric

PeerLink = Literal["self", "nvlink", "pcie", "none"]

CUDA_ARCHITECTURES = {(9, 0): "sm90a", (10, 0): "sm100a", (10, 3): "sm103a"}
"""Compute capability -> architecture of the kernel library, for the GPUs that the CUDA backend is designed for."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One visible GPU."""

    index: int
    name: str
    capability: tuple[int, int]
    sms: int
    memory_bytes: int

    @property
    def architecture(self) -> str | None:
        """``sm90a`` and the like, or None for a GPU that the CUDA backend is not designed for."""
        return CUDA_ARCHITECTURES.get(self.capability)


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The NVIDIA driver: its release (``580.65.06``), the newest CUDA that it runs, the GPUs, and who reaches whom."""

    release: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[Gpu, ...] = ()
    peer_access: tuple[tuple[PeerLink, ...], ...] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Package:
    """A Python package: its version, and why it could not be imported if it could not."""

    version: str | None = None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """State of the plugin in a fresh process: the variable that switches it off, and why it does not fit."""

    disabled_by: str | None = None
    autoload_disabled: bool = False
    misfit: str | None = None


@dataclass(frozen=True, kw_only=True)
class Compiler:
    """The nvcc that would build the kernels."""

    path: str
    version: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The folder of compiled kernel libraries; ``libraries``: architectures compiled from the present sources."""

    path: str
    writable: bool
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts. ``kernel_architectures`` are those whose kernel sources this installation has."""

    python: tuple[int, int, int]
    mok_megatron: str
    torch: Package
    torch_cuda: str | None
    megatron: Package
    transformer_engine: str | None
    plugin: Plugin
    driver: Driver
    compiler: Compiler | None
    cache: Cache
    kernel_architectures: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    fabric: NodeFabric = field(default_factory=NodeFabric)
