"""The kernels of nvlink.cu: compiled when first wanted, called through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok_megatron.backends.build import BuildError, compile_library, find_nvcc, source_hash
from mok_megatron.paths import cache_dir

SOURCE = Path(__file__).with_name("nvlink.cu")
_ARCHITECTURE = "sm90a"

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "pull": (c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_int32, c_int32),
    "push": (c_void_p, c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_int32),
    "answer_on_gpu": (c_void_p, c_int32, c_void_p, c_int32, c_void_p, c_void_p),
    "answer_peer": (c_void_p, c_void_p, c_int32, c_int32, c_void_p),
    "bring": (c_void_p, c_int32, c_void_p, c_int32, c_void_p),
    "observe": (c_void_p, c_void_p, c_void_p, c_int64, c_int32, c_uint32, c_uint32, c_void_p),
    "stamp": (c_void_p,),
}


def compile_kernels() -> Path:
    """The library of nvlink.cu for Hopper, cached or compiled. Raises BuildError when nvcc is missing or fails."""
    name = hashlib.sha256(SOURCE.read_bytes() + source_hash(_ARCHITECTURE).encode()).hexdigest()[:16]
    target = cache_dir() / f"nvlink-{name}.so"
    if target.exists():
        return target
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError("no nvcc to compile the benchmark's kernels: install the CUDA 13 toolkit or set CUDA_HOME")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="nvlink-", dir=target.parent) as folder:
        made = Path(folder) / target.name
        compile_library(nvcc, _ARCHITECTURE, [SOURCE], made, what="the benchmark's kernels")
        made.replace(target)
    return target


class Kernels:
    """The kernels by name; a tensor argument stands for its address. They run on the current stream."""

    def __init__(self) -> None:
        library = ctypes.CDLL(str(compile_kernels()))
        self._functions = {name: getattr(library, f"nvlink_{name}") for name in _ARGUMENTS}
        for name, function in self._functions.items():
            function.argtypes, function.restype = (*_ARGUMENTS[name], c_void_p), c_int32

    def __call__(self, name: str, *arguments: Tensor | int | None) -> None:
        """Launch. Raises RuntimeError with CUDA's error number."""
        values = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        code = self._functions[name](*values, torch.cuda.current_stream().cuda_stream)
        if code != 0:
            raise RuntimeError(f"{name}: CUDA error {code}")
