"""Compiles ``kernels/`` with nvcc into one library per GPU architecture, cached by the hash of what went in."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mok_megatron.paths import cache_dir, kernels_dir

SOURCES = {"sm90a": ("api.cu", "moe/schedule.cu", "sm90/forward.cu", "sm90/backward.cu")}
"""Translation units per architecture that has kernels."""

LIBRARY = "libmok.so"
_FLAGS = ("-std=c++17", "-O3", "-lineinfo", "-shared", "-Xcompiler", "-fPIC", "-Werror", "all-warnings")
_TIME_LIMIT_S = 1200


class BuildError(RuntimeError):
    """The library could not be compiled; the message says why and what to do."""


def architecture_of(capability: tuple[int, int]) -> str | None:
    """The architecture whose kernels run on a device of this compute capability, or None where there are none."""
    return {(9, 0): "sm90a"}.get(capability)


def check_architecture(architecture: str) -> None:
    """Raise ValueError for an architecture without kernels."""
    if architecture not in SOURCES:
        raise ValueError(f"no kernels for {architecture!r}; there are kernels for {', '.join(sorted(SOURCES))}")


def find_nvcc() -> str | None:
    """nvcc by ``CUDA_HOME``, then PATH, then the usual place."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [str(Path(home) / "bin" / "nvcc") for home in homes if home]
    found = shutil.which("nvcc")
    candidates += [found] if found else []
    candidates.append("/usr/local/cuda/bin/nvcc")
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def source_hash(architecture: str) -> str:
    """Hash of every file under ``kernels/``, the flags and the architecture."""
    digest = hashlib.sha256(repr((architecture, SOURCES[architecture], _FLAGS)).encode())
    root = kernels_dir()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".cu", ".cuh", ".h")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def library_path(architecture: str) -> Path:
    """Where the library of the present sources lies, once built."""
    check_architecture(architecture)
    return cache_dir() / f"{architecture}-{source_hash(architecture)}" / LIBRARY


def build(architecture: str) -> Path:
    """The library for ``architecture``, compiled unless it is cached.

    Any number of processes may build at once: each compiles into a folder of its own and renames it into place.
    Raises BuildError when nvcc is missing or fails, ValueError for an architecture without kernels.
    """
    target = library_path(architecture)
    if target.exists():
        return target
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            f"no nvcc to compile the kernels for {architecture}: install the CUDA 13 toolkit or set CUDA_HOME, or "
            f"build where there is one (`mok-megatron build --arch {architecture}`) and copy {cache_dir()} here"
        )
    target.parent.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent.parent) as scratch:
        folder = Path(scratch) / target.parent.name
        folder.mkdir()
        sources = [kernels_dir() / source for source in SOURCES[architecture]]
        compile_library(nvcc, architecture, sources, folder / LIBRARY, what=f"the kernels for {architecture}")
        try:
            folder.rename(target.parent)
        except OSError:
            if not target.exists():  # not merely beaten by another process
                raise
    return target


def compile_library(nvcc: str, architecture: str, sources: Sequence[Path], output: Path, *, what: str) -> None:
    """Compile ``sources``, which may include files of ``kernels/``. Raises BuildError, naming ``what``, if it fails."""
    code = architecture.replace("sm", "sm_")
    command = [nvcc, *_FLAGS, f"-gencode=arch={code.replace('sm', 'compute')},code={code}", "--threads", "0"]
    command += [f"-I{kernels_dir()}", "-o", str(output), *map(str, sources)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False)
        failure = None if done.returncode == 0 else f"nvcc failed with exit code {done.returncode}"
        printed = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        failure, printed = f"nvcc took more than {_TIME_LIMIT_S} s", ""
    except OSError as error:
        failure, printed = f"nvcc could not be started: {error}", ""
    if failure is not None:
        raise BuildError(
            f"{what} could not be compiled: {failure}. `mok-megatron doctor` says which CUDA "
            f"toolkit is needed.\n{' '.join(command)}\n{printed}"
        )
