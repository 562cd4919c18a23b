"""Whether the Megatron that is here is one that we fit: recorded when a patch is applied, asked when ``mok`` is used.

Only the standard library is imported here (see hooks.py).
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("mok_megatron")

OLDEST_MEGATRON = (0, 17)

_misfits: dict[str, str] = {}
"""Module name -> why its patch did not fit."""


class MisfitError(Exception):
    """A symbol of Megatron is not what a patch expects; the message says which and how."""


def record_misfit(module_name: str, reason: str) -> None:
    """Remember, and log once, why a module could not be patched."""
    if _misfits.get(module_name) != reason:
        _misfits[module_name] = reason
        logger.warning("mok_megatron: cannot patch %s: %s (%s)", module_name, reason, versions())


def clear_misfit(module_name: str) -> None:
    """Forget an earlier failure, once the module has been patched."""
    _misfits.pop(module_name, None)


def require_fit() -> None:
    """Raise RuntimeError with the reasons and the versions when megatron-core could not be patched for ``mok``."""
    misfits = {name: reason for name, reason in sorted(_misfits.items()) if name.startswith("megatron.core.")}
    if misfits:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in misfits.items())
        raise RuntimeError(
            f"moe_token_dispatcher_type='mok' is not available, because this Megatron is not one that mok_megatron "
            f"knows: {reasons} ({versions()}). Use a megatron-core >= {'.'.join(map(str, OLDEST_MEGATRON))} that this "
            f"mok_megatron was tested with, or another dispatcher"
        )


def require_version() -> None:
    """Raise MisfitError for a megatron-core that is too old; one without a version is judged by its symbols alone."""
    found = megatron_version()
    parts = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if len(parts) == 2 and parts < OLDEST_MEGATRON:
        raise MisfitError(f"megatron-core {found} is older than {'.'.join(map(str, OLDEST_MEGATRON))}")


def megatron_version() -> str:
    """Version of the megatron-core that is imported (a checkout has one too), or 'unknown'."""
    info = sys.modules.get("megatron.core.package_info") or sys.modules.get("megatron.core")
    return str(getattr(info, "__version__", "unknown"))


def versions() -> str:
    """Versions for messages: 'mok-megatron 0.1.0, megatron-core 0.19.2, torch 2.13.0'."""
    torch = sys.modules.get("torch")
    named = {
        "mok-megatron": _distribution_version("mok-megatron"),
        "megatron-core": megatron_version(),
        "torch": str(getattr(torch, "__version__", "unknown")),
    }
    return ", ".join(f"{name} {number}" for name, number in named.items())


def _distribution_version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
