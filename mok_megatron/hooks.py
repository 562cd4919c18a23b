"""Post-import hooks: run a patch right after Megatron's own import of a module, or now if it is imported already.

Only the standard library is imported here, because this runs at the end of every ``import torch``.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from mok_megatron import compat

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

logger = logging.getLogger("mok_megatron")

DISABLE_VARIABLE = "MOK_MEGATRON_DISABLE"

TARGETS = (
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.training.arguments",
)
"""Modules that get a patch; ``mok_megatron.plugin.patch`` knows what each needs."""


def disabled() -> bool:
    """Whether MOK_MEGATRON_DISABLE=1 switches the plugin off."""
    return os.environ.get(DISABLE_VARIABLE, "").strip() == "1"


def install() -> bool:
    """Install the hooks and patch the targets that are imported already; idempotent, never raises.

    Returns False, having done nothing, when the plugin is switched off.
    """
    if disabled():
        return False
    if not any(isinstance(finder, _PostImportFinder) for finder in sys.meta_path):
        # importlib.abc, whose base classes this could have, takes longer to import than all the rest.
        sys.meta_path.insert(0, _PostImportFinder())
    _patch_imported()
    return True


def _patch_imported() -> None:
    """Patch every target that has finished importing; one that is still being imported is left for the next call."""
    for name in TARGETS:
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _patch(module)


def _patch(module: ModuleType) -> None:
    """Apply the module's patch. Whatever goes wrong is recorded for ``mok`` and must not break Megatron's import."""
    try:
        importlib.import_module("mok_megatron.plugin").patch(module)
    except Exception as error:
        compat.record_misfit(module.__name__, f"{type(error).__name__}: {error}")


class _PatchingLoader:
    """Stands in for a module's loader until the module has run; then the module looks as if it never was here."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        # inspect.getsource, pickle and importlib.reload ask the module's own loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _patch_imported()
        _patch(module)


class _PostImportFinder:
    """First on ``sys.meta_path``; lets the others find a target and wraps the loader of what they found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in TARGETS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: ModuleSpec | None = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = cast("Any", _PatchingLoader(spec.loader))
                return spec
        return None
