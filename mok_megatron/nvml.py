"""What NVML says about the GPUs of this node and their NVLink fabric, through ctypes.

ctypes and not a Python binding: six calls are needed, the library comes with the driver, and a binding would be one
more dependency to match with it. Not ``nvidia-smi``: its text changes with releases, and it takes seconds on a large
node. NVML lists all GPUs of the node, whatever CUDA_VISIBLE_DEVICES says, so that ranks which see one GPU each still
know how their GPUs are linked. No CUDA context is created.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from mok_megatron.preflight import FabricState, GpuFabric, Link, NodeFabric

_STATES: tuple[FabricState, ...] = ("not supported", "not started", "in progress", "completed")
_P2P_NVLINK, _P2P_READ, _P2P_OK = 2, 0, 0
_NOT_SUPPORTED = 3
IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")


class _FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
        ("health_mask", ctypes.c_uint),
    )


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _NvmlError(Exception):
    """A call failed; the message names call and code."""


def probe_node(library: Any = "libnvidia-ml.so.1", channels: Path = IMEX_CHANNELS) -> NodeFabric:
    """All GPUs of this node. Where NVML is missing or fails, ``error`` says why and the rest is empty."""
    try:
        nvml = ctypes.CDLL(library) if isinstance(library, str) else library
    except OSError:
        return NodeFabric(error=f"{library} not found")
    try:
        _require("nvmlInit_v2", nvml.nvmlInit_v2())
        count = ctypes.c_uint()
        _require("nvmlDeviceGetCount_v2", nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        handles = [_handle(nvml, index) for index in range(count.value)]
        by_name = {_bus_id(nvml, handle): handle for handle in handles}
        gpus = tuple(
            GpuFabric(
                bus_id=name,
                links={other: _link(nvml, handle, peer) for other, peer in by_name.items() if other != name},
                **_fabric(nvml, handle),
            )
            for name, handle in by_name.items()
        )
    except _NvmlError as error:
        return NodeFabric(error=str(error))
    finally:
        nvml.nvmlShutdown()
    return NodeFabric(gpus=gpus, imex_channels=_imex_channels(channels))


def _handle(nvml: Any, index: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _require("nvmlDeviceGetHandleByIndex_v2", nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)))
    return handle


def _bus_id(nvml: Any, handle: ctypes.c_void_p) -> str:
    info = _PciInfo()
    _require("nvmlDeviceGetPciInfo_v3", nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(info)))
    return normal_bus_id(info.bus_id.decode())


def normal_bus_id(text: str) -> str:
    """NVML writes ``00000000:1B:00.0``, the CUDA driver ``0000:1b:00.0``: both become the latter."""
    domain, bus, device = text.lower().split(":")
    return f"{int(domain, 16):04x}:{bus}:{device}"


def _fabric(nvml: Any, handle: ctypes.c_void_p) -> dict[str, Any]:
    """State, cluster and clique; a driver without the call, or a GPU without a fabric, is ``not supported``."""
    info = _FabricInfo(version=ctypes.sizeof(_FabricInfo) | 2 << 24)
    try:
        call = nvml.nvmlDeviceGetGpuFabricInfoV
    except AttributeError:
        return {}
    code = call(handle, ctypes.byref(info))
    if code == _NOT_SUPPORTED:
        return {}
    _require("nvmlDeviceGetGpuFabricInfoV", code)
    state = _STATES[info.state] if info.state < len(_STATES) else "in progress"
    if state == "completed" and info.status:
        state = "in progress"  # registered, but with an error: the fabric cannot be used
    cluster = bytes(info.cluster_uuid)
    return {"state": state, "cluster": cluster.hex() if any(cluster) else "", "clique": int(info.clique_id)}


def _link(nvml: Any, handle: ctypes.c_void_p, peer: ctypes.c_void_p) -> Link:
    """How a GPU reaches the memory of another one of the node."""
    status = ctypes.c_int()
    links: tuple[tuple[int, Link], ...] = ((_P2P_NVLINK, "nvlink"), (_P2P_READ, "other"))
    for capability, link in links:
        code = nvml.nvmlDeviceGetP2PStatus(handle, peer, capability, ctypes.byref(status))
        if code == 0 and status.value == _P2P_OK:
            return link
    return "none"


def _imex_channels(folder: Path) -> tuple[str, ...]:
    """Channels that this process may open."""
    try:
        found = [path for path in sorted(folder.iterdir()) if path.name.startswith("channel")]
    except OSError:
        return ()
    return tuple(path.name for path in found if os.access(path, os.R_OK | os.W_OK))


def _require(call: str, code: int) -> None:
    if code:
        raise _NvmlError(f"the NVML call {call} failed with code {code}")
