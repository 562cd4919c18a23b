"""One backend, and so one workspace and one rendezvous, per (EP group, shape, device, dtype, options)."""

from __future__ import annotations

import atexit
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from mok_megatron.backends.base import Backend
from mok_megatron.backends.select import create_backend
from mok_megatron.config import MoeShape, MokConfig

_Key = tuple[int, MoeShape, str, torch.dtype, MokConfig]

_backends: WeakValueDictionary[_Key, Backend] = WeakValueDictionary()
"""The layers hold the backends; when the last layer of a model goes, so does its backend."""


def shared_backend(
    shape: MoeShape, config: MokConfig, group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype
) -> Backend:
    """The backend of these layers, created by the first that asks. Collective over ``group``."""
    # A living backend keeps its group alive, so that no other group can have this id.
    key = (id(group), shape, str(device), dtype, config)
    backend = _backends.get(key)
    if backend is None:
        backend = create_backend(shape, config, group, device, dtype)
        _backends[key] = backend
    return backend


def close_backends() -> None:
    """Free every workspace; call before the process groups are destroyed. Idempotent, and done at exit."""
    for backend in list(_backends.values()):
        backend.close()
    _backends.clear()


atexit.register(close_backends)
