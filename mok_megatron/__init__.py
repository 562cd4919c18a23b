"""Megatron's MoE layer behind the router as one backend: ``--moe-token-dispatcher-type mok``.

Importing the package installs post-import hooks that register ``mok`` in megatron-core when (or if already) it is
imported. Nothing else happens: no torch import, no CUDA context, no compilation. ``MOK_MEGATRON_DISABLE=1`` leaves
Megatron alone altogether.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mok_megatron import hooks

if TYPE_CHECKING:
    from mok_megatron.config import MokConfig as MokConfig
    from mok_megatron.options import configure as configure

__all__ = ["MokConfig", "configure"]

hooks.install()


def __getattr__(name: str) -> Any:
    """Load the public names on first use, so that importing the package stays cheap."""
    if name == "MokConfig":
        from mok_megatron.config import MokConfig

        return MokConfig
    if name == "configure":
        from mok_megatron.options import configure

        return configure
    if name == "__version__":
        from importlib.metadata import version

        return version("mok-megatron")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
