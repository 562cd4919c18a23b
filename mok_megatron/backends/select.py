"""Which backend runs a layer: one decision, made at model build, never changed afterwards."""

from __future__ import annotations

import logging
import warnings

import torch
import torch.distributed as dist

from mok_megatron.backends.base import Backend
from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.backends.library import cuda_unavailable_reason
from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.config import MoeShape, MokConfig

_logger = logging.getLogger(__name__)
_reported: set[str] = set()


def create_backend(
    shape: MoeShape,
    config: MokConfig,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Backend:
    """The backend that ``config.backend`` asks for.

    ``auto`` takes ``cuda`` where all ranks of the group can run it, else ``reference`` on all of them, with one warning
    (``warnings`` and log) per process and reason; collective over ``group``. An explicit choice never falls back:
    ``cuda`` raises ValueError with the reason and the remedy.
    """
    device = torch.device(device)
    if config.backend == "reference":
        return ReferenceBackend(shape, config, group, device, dtype)
    reason = cuda_unavailable_reason(device, shape, dtype)
    if config.backend == "auto":
        reason = _reason_in_group(reason, group)
    if reason is None:
        return CudaBackend.create(shape, config, group, device)
    if config.backend == "cuda":
        raise ValueError(
            f"backend=cuda cannot run this layer on {device} ({dtype}): {reason}; "
            f"choose backend=auto or backend=reference"
        )
    _warn_once(f"mok_megatron uses the slow reference backend on {device} ({dtype}): {reason}")
    return ReferenceBackend(shape, config, group, device, dtype)


def _reason_in_group(reason: str | None, group: dist.ProcessGroup | None) -> str | None:
    """This rank's reason, or else that of the first rank of the group that has one: all must run the same backend."""
    if group is None or group.size() == 1:
        return reason
    reasons: list[str | None] = [None] * group.size()
    dist.all_gather_object(reasons, reason, group=group)
    others = (f"rank {rank} of its expert-parallel group: {other}" for rank, other in enumerate(reasons) if other)
    return reason or next(others, None)


def _warn_once(message: str) -> None:
    if message in _reported:
        return
    _reported.add(message)
    _logger.warning(message)
    warnings.warn(message, RuntimeWarning, stacklevel=3)
