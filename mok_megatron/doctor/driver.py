"""Asks the CUDA driver about the GPUs through ctypes. No context is created, so no GPU memory is taken.

``CUDA_VISIBLE_DEVICES`` applies: indices are those that torch uses.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

from mok_megatron.doctor.facts import Driver, Gpu, PeerLink

_NO_DEVICE = 100
_ATTRIBUTE_SMS = 16
_ATTRIBUTE_CAPABILITY_MAJOR = 75
_ATTRIBUTE_CAPABILITY_MINOR = 76
_P2P_NATIVE_ATOMICS = 3
_NAME_BYTES = 256


class _DriverError(Exception):
    """A driver call failed; the message names call and error."""


def probe_driver(library: str = "libcuda.so.1") -> Driver:
    """All that the driver says. Where there is none, or it fails, ``error`` says why and the rest is empty."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return Driver(release=_release(), error=f"no NVIDIA driver here ({library} not found)")
    try:
        code = cuda.cuInit(0)
        if code == _NO_DEVICE:
            return Driver(release=_release(), cuda=_cuda_version(cuda), error="the driver sees no GPU")
        _require(cuda, "cuInit", code)
        gpus = tuple(_gpu(cuda, index) for index in range(_int_from(cuda, "cuDeviceGetCount")))
        peers = tuple(tuple(_link(cuda, a.index, b.index) for b in gpus) for a in gpus)
    except _DriverError as error:
        return Driver(release=_release(), error=str(error))
    return Driver(release=_release(), cuda=_cuda_version(cuda), gpus=gpus, peer_access=peers)


def _gpu(cuda: Any, index: int) -> Gpu:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _require(cuda, "cuDeviceGetName", cuda.cuDeviceGetName(name, _NAME_BYTES, index))
    memory = ctypes.c_size_t()
    _require(cuda, "cuDeviceTotalMem", cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), index))
    major = _int_from(cuda, "cuDeviceGetAttribute", _ATTRIBUTE_CAPABILITY_MAJOR, index)
    minor = _int_from(cuda, "cuDeviceGetAttribute", _ATTRIBUTE_CAPABILITY_MINOR, index)
    return Gpu(
        index=index,
        name=name.value.decode(errors="replace"),
        capability=(major, minor),
        sms=_int_from(cuda, "cuDeviceGetAttribute", _ATTRIBUTE_SMS, index),
        memory_bytes=memory.value,
    )


def _link(cuda: Any, source: int, peer: int) -> PeerLink:
    """How ``source`` reaches the memory of ``peer``: native atomics tell NVLink from PCIe."""
    if source == peer:
        return "self"
    if not _int_from(cuda, "cuDeviceCanAccessPeer", source, peer):
        return "none"
    return "nvlink" if _int_from(cuda, "cuDeviceGetP2PAttribute", _P2P_NATIVE_ATOMICS, source, peer) else "pcie"


def _int_from(cuda: Any, call: str, *args: int) -> int:
    """Result of a driver call whose first argument is a pointer to an int."""
    result = ctypes.c_int()
    _require(cuda, call, getattr(cuda, call)(ctypes.byref(result), *args))
    return result.value


def _require(cuda: Any, call: str, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode(errors="replace") if text.value else "unknown error"
        raise _DriverError(f"the driver call {call} failed: {reason} (error {code})")


def _cuda_version(cuda: Any) -> tuple[int, int]:
    version = _int_from(cuda, "cuDriverGetVersion")
    return version // 1000, version % 1000 // 10


def _release() -> str | None:
    """Release of the kernel driver, as ``580.65.06``."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else None
