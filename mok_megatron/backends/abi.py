"""The structs of ``kernels/params.h``, field by field, and the functions of the compiled library."""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

import torch

PROBS_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
MAX_LOCAL_EXPERTS = 512
MAX_EXPERTS = 1024
TENSOR_MAP_BYTES = 128
WEIGHT_BOX_ROWS, BOX_ROWS = 128, 64
"""Rows per TMA box of weights that lie as the product needs them, and of all else (kernels/sm90/mainloop.cuh)."""


class FailRecord(Structure):
    """Why a kernel stopped; ``code`` 0 while nothing has failed."""

    _fields_ = (
        ("code", c_int32),
        ("phase", c_int32),
        ("rank", c_int32),
        ("peer", c_int32),
        ("layer", c_int32),
        ("want", c_uint32),
        ("seen", c_uint32),
        ("where", c_int32),
    )


class SymmetricLayout(Structure):
    """Byte offsets of the regions that peers read or write."""

    _fields_ = (
        ("opened", c_int64),
        ("tables_ready", c_int64),
        ("abort", c_int64),
        ("replays", c_int64),
        ("counts", c_int64),
        ("fc2_done", c_int64),
        ("row_source", c_int64),
        ("slot_dst_rank", c_int64),
        ("slot_dst_row", c_int64),
        ("weights", c_int64),
        ("d_weight_parts", c_int64),
        ("y_slots", c_int64),
        ("x", c_int64),
        ("replay_x", c_int64),
        ("bytes", c_int64),
    )


class CallParams(Structure):
    """What all launches of a call share."""

    _fields_ = (
        ("peers", c_void_p),
        ("local", c_void_p),
        ("layout", SymmetricLayout),
        ("epoch", c_void_p),
        ("fail", c_void_p),
        ("spin_limit", c_int64),
        ("rank", c_int32),
        ("world", c_int32),
        ("tokens", c_int32),
        ("top_k", c_int32),
        ("experts", c_int32),
        ("capacity", c_int32),
        ("max_rows", c_int32),
        ("hidden", c_int32),
        ("layer", c_int32),
        ("unused", c_int32),
    )


class ScheduleParams(Structure):
    """Arguments of ``mok_build_schedule``."""

    _fields_ = (
        ("call", CallParams),
        ("probs", c_void_p),
        ("routing_map", c_void_p),
        ("x", c_void_p),
        ("probs_stride", c_int64),
        ("probs_type", c_int32),
        ("unused", c_int32),
        ("out_experts", c_void_p),
        ("out_weights", c_void_p),
        ("out_slot_dst_rank", c_void_p),
        ("out_slot_dst_row", c_void_p),
        ("out_expert_first_row", c_void_p),
        ("tile_table", c_void_p),
        ("block_counts", c_void_p),
        ("route_base", c_void_p),
        ("token_order", c_void_p),
        ("last_counts", c_void_p),
        ("last_next", c_void_p),
        ("counters", c_void_p),
    )


class ForwardParams(Structure):
    """Arguments of ``mok_forward``."""

    _fields_ = (
        ("call", CallParams),
        ("x", c_void_p),
        ("weights", c_void_p),
        ("slot_dst_rank", c_void_p),
        ("slot_dst_row", c_void_p),
        ("expert_first_row", c_void_p),
        ("token_order", c_void_p),
        ("tile_table", c_void_p),
        ("counters", c_void_p),
        ("w1_maps", c_void_p),
        ("w2_maps", c_void_p),
        ("x_rows", c_void_p),
        ("x_ring", c_void_p),
        ("h", c_void_p),
        ("gate_up", c_void_p),
        ("row_src_rank", c_void_p),
        ("row_src_slot", c_void_p),
        ("y", c_void_p),
        ("intermediate", c_int32),
        ("lag", c_int32),
        ("sms", c_int32),
        ("comm_sms", c_int32),
        ("clamp", c_float),
        ("linear_offset", c_float),
    )


class ReopenParams(Structure):
    """Arguments of ``mok_reopen``."""

    _fields_ = (
        ("call", CallParams),
        ("dy", c_void_p),
        ("x", c_void_p),
        ("weights", c_void_p),
        ("slot_dst_rank", c_void_p),
        ("slot_dst_row", c_void_p),
        ("expert_first_row", c_void_p),
        ("tile_table", c_void_p),
        ("counters", c_void_p),
        ("sms", c_int32),
        ("kept", c_int32),
    )


class BackwardParams(Structure):
    """Arguments of ``mok_backward``."""

    _fields_ = (
        ("call", CallParams),
        ("dy", c_void_p),
        ("x", c_void_p),
        ("weights", c_void_p),
        ("slot_dst_rank", c_void_p),
        ("slot_dst_row", c_void_p),
        ("row_src_rank", c_void_p),
        ("row_src_slot", c_void_p),
        ("expert_first_row", c_void_p),
        ("tile_table", c_void_p),
        ("counters", c_void_p),
        ("w1_maps", c_void_p),
        ("w2_maps", c_void_p),
        ("w1_forward_maps", c_void_p),
        ("x_rows", c_void_p),
        ("gate_up", c_void_p),
        ("dy_rows", c_void_p),
        ("d_gate_up", c_void_p),
        ("h_rows", c_void_p),
        ("row_weights", c_void_p),
        ("partials", c_void_p),
        ("w1_grads", c_void_p),
        ("w2_grads", c_void_p),
        ("w1_grad_maps", c_void_p),
        ("w2_grad_maps", c_void_p),
        ("dx", c_void_p),
        ("experts", c_void_p),
        ("d_probs", c_void_p),
        ("intermediate", c_int32),
        ("lag", c_int32),
        ("sms", c_int32),
        ("comm_sms", c_int32),
        ("clamp", c_float),
        ("linear_offset", c_float),
        ("grad_type", c_int32),
        ("accumulate", c_int32),
        ("wants_dx", c_int32),
        ("probs_type", c_int32),
    )


_STRUCTS = {
    struct.__name__: struct
    for struct in (
        FailRecord,
        SymmetricLayout,
        CallParams,
        ScheduleParams,
        ForwardParams,
        ReopenParams,
        BackwardParams,
    )
}


class Library:
    """A loaded kernel library.

    Raises RuntimeError when its structs are not the ones of this module, OSError when the file cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        _check_abi(library, path)
        self._encode_matrices = library.mok_encode_matrices
        self._load = (library.mok_load_schedule, library.mok_load_forward, library.mok_load_backward)
        self._launches = {
            ScheduleParams: library.mok_build_schedule,
            ForwardParams: library.mok_forward,
            ReopenParams: library.mok_reopen,
            BackwardParams: library.mok_backward,
        }
        for function in (self._encode_matrices, *self._load, *self._launches.values()):
            function.restype = ctypes.c_char_p
        self._encode_matrices.argtypes = (c_void_p, c_void_p, *6 * (c_int32,))
        for load in self._load:
            load.argtypes = ()
        for launch in self._launches.values():
            launch.argtypes = (c_void_p, c_void_p)

    def load_kernels(self) -> str | None:
        """Load every kernel onto the current device; None, or why the library cannot run there."""
        error = next((error for load in self._load if (error := load()) is not None), None)
        return None if error is None else f"{self.path}: {error.decode()}"

    def encode_matrices(
        self, maps: int, matrices: list[int], *, rows: int, columns: int, box_rows: int, parts: int = 1, bytes_: int = 2
    ) -> None:
        """Tensor maps of ``matrices``, addresses of ``[parts * rows, columns]``, into host memory at ``maps``.

        Elements are bf16, or fp32 if they have 4 ``bytes_``. Nothing is written for an address of 0.
        """
        array = (c_void_p * len(matrices))(*matrices)
        _raise(self._encode_matrices(maps, array, len(matrices), bytes_, parts, rows, columns, box_rows))

    def launch(self, params: Structure, stream: int) -> None:
        """Launch the kernels of these parameters on ``stream`` of the current device."""
        _raise(self._launches[type(params)](ctypes.addressof(params), stream))


def _raise(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(f"mok_megatron kernel launch failed: {error.decode()}")


def _check_abi(library: ctypes.CDLL, path: Path) -> None:
    if not hasattr(library, "mok_abi"):
        raise RuntimeError(f"{path} is not a mok_megatron kernel library: it has no mok_abi")
    library.mok_abi.restype = c_int64
    library.mok_abi.argtypes = (c_int32, ctypes.POINTER(ctypes.c_char_p))
    name = ctypes.c_char_p()
    index = 0
    while (compiled := library.mok_abi(index, ctypes.byref(name))) >= 0:
        struct, _, field = (name.value or b"").decode().partition(".")
        mirror = _STRUCTS[struct]
        expected = getattr(mirror, field).offset if field else ctypes.sizeof(mirror)
        if compiled != expected:
            what = f"offset of {struct}.{field}" if field else f"size of {struct}"
            raise RuntimeError(
                f"{path} was built from other sources: {what} is {compiled} there and {expected} here; "
                f"delete the file, or rebuild it with `mok-megatron build`"
            )
        index += 1
    if index == 0:
        raise RuntimeError(f"{path} describes no structs: not a mok_megatron kernel library")
