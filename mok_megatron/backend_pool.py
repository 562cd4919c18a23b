"""One backend, and so one workspace and one rendezvous, per (EP group, shape, device, dtype, options)."""

from __future__ import annotations

import atexit
import functools
import logging
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mok_megatron.backends.base import Backend
from mok_megatron.backends.select import create_backend
from mok_megatron.config import MoeShape, MokConfig

logger = logging.getLogger("mok_megatron")

_Key = tuple[int, MoeShape, str, torch.dtype, MokConfig]

_backends: WeakValueDictionary[_Key, Backend] = WeakValueDictionary()
"""The layers hold the backends; when the last layer of a model goes, so does its backend."""

_MARK = "_closes_mok_megatron_backends"


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
        if group is not None and group.size() > 1:
            _close_before_groups_are_destroyed()
    return backend


def close_backends(group: dist.ProcessGroup | None = None) -> None:
    """Free the workspaces of ``group``, or every one. Idempotent; done at exit and before a group is destroyed.

    One that cannot be freed, because its kernels have failed, is logged and keeps no other from being freed.
    """
    for key, backend in list(_backends.items()):
        if group is not None and key[0] != id(group):
            continue
        try:
            backend.close()
        except Exception:
            logger.exception("mok_megatron: the workspace of a %s backend could not be freed", backend.name)
        _backends.pop(key, None)


def _close_before_groups_are_destroyed() -> None:
    """Wrap ``torch.distributed.destroy_process_group``, once: peers' memory must be let go while its group exists.

    Scripts destroy their groups themselves, before any exit handler runs, and torch has no hook for it.
    """
    original = distributed_c10d.destroy_process_group
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def destroy_process_group(group: dist.ProcessGroup | None = None, *args: Any, **kwargs: Any) -> None:
        close_backends(None if group is dist.group.WORLD else group)
        original(group, *args, **kwargs)

    setattr(destroy_process_group, _MARK, True)
    for module in (distributed_c10d, dist):
        module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]
    logger.info("mok_megatron: torch.distributed.destroy_process_group frees the workspaces of its groups first")


atexit.register(close_backends)
