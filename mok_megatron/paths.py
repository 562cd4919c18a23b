"""Where things are: kernel sources and configs (inside an installed package or at the top of a checkout), the cache."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _shipped(name: str) -> Path:
    """The folder ``name``: ``mok_megatron/_name`` of a wheel, else ``name`` beside the package in a checkout."""
    candidates = (_PACKAGE / f"_{name}", _PACKAGE.parent / name)
    for folder in candidates:
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"the {name} folder of mok-megatron is missing (looked at {candidates[0]} and {candidates[1]}): "
        "reinstall the package, or complete the checkout"
    )


def kernels_dir() -> Path:
    """Folder of the CUDA sources (``params.h``, ``moe/``, ``sm90/``, ...)."""
    return _shipped("kernels")


def configs_dir() -> Path:
    """Folder of the model configs (``<name>.yaml``) that ship with the package."""
    return _shipped("configs")


def cache_dir() -> Path:
    """Folder of the compiled kernel libraries; it need not exist. ``MOK_MEGATRON_CACHE`` overrides it."""
    chosen = os.environ.get("MOK_MEGATRON_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mok_megatron"
