"""Registration of ``mok`` in an unedited megatron-core: the command-line choice, the checks, the layer, the options.

Each patch checks the symbols that it touches before it changes anything, is idempotent, and logs itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any

from mok_megatron import compat, options, refusals

logger = logging.getLogger("mok_megatron")

DISPATCHER_TYPE = "mok"
TYPE_FIELD = "moe_token_dispatcher_type"

_CONFIG_MODULE = "megatron.core.transformer.transformer_config"
_LAYER_MODULE = "megatron.core.transformer.moe.moe_layer"
_ARGUMENTS_MODULE = "megatron.training.arguments"
_PATCHED = "_patched_by_mok_megatron"

_LAYER_METHODS = {
    "routed_experts_compute": ["self", "hidden_states", "probs"],
    "dispatch": ["self", "hidden_states", "probs"],
    "combine": ["self", "output"],
    "postprocess": ["self", "output", "shared_expert_output"],
    "preprocess": ["self", "hidden_states", "probs", "routing_map"],
    "set_layer_number": ["self", "layer_number"],
}
"""Methods of MoELayer that the subclass overrides or relies on, with their parameters."""

_DISPATCHER_METHODS = {
    "dispatch_preprocess": ["self", "tokens", "routing_map", "probs"],
    "token_dispatch": ["self", "hidden_states", "probs"],
    "token_combine": ["self", "hidden_states"],
    "combine_postprocess": ["self", "hidden_states"],
}


def patch(module: ModuleType) -> None:
    """Patch one imported module of Megatron. Raises compat.MisfitError, having changed nothing, if it does not fit."""
    patches: dict[str, Callable[[ModuleType], bool]] = {
        _CONFIG_MODULE: _patch_config,
        _LAYER_MODULE: _patch_layer,
        _ARGUMENTS_MODULE: _patch_arguments,
    }
    try:
        changed = patches[module.__name__](module)
    except compat.MisfitError as misfit:
        compat.record_misfit(module.__name__, str(misfit))
        return
    if changed:
        compat.clear_misfit(module.__name__)
        logger.info("mok_megatron: patched %s (%s)", module.__name__, compat.versions())


def _symbol(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise compat.MisfitError(f"{getattr(owner, '__name__', owner)} has no {name}")
    return getattr(owner, name)


def _check_methods(owner: type, expected: dict[str, list[str]]) -> None:
    for name, parameters in expected.items():
        found = list(inspect.signature(_symbol(owner, name)).parameters)
        if found != parameters:
            raise compat.MisfitError(
                f"{owner.__name__}.{name} takes ({', '.join(found)}), expected ({', '.join(parameters)})"
            )


def _patch_config(module: ModuleType) -> bool:
    """Let TransformerConfig accept ``mok``, and check the rest of the config when it is asked for."""
    config_class = _symbol(module, "TransformerConfig")
    original = config_class.__dict__.get("__post_init__")
    if original is None or "__dataclass_fields__" not in vars(config_class):
        raise compat.MisfitError("TransformerConfig is not a dataclass with its own __post_init__")
    if hasattr(original, _PATCHED):
        return False
    # First, so that a config that asks for ``mok`` hears the reason even where the rest does not fit.
    config_class.__post_init__ = _checked_post_init(original)
    compat.require_version()
    field = config_class.__dataclass_fields__.get(TYPE_FIELD)
    if field is None:
        raise compat.MisfitError(f"TransformerConfig has no field {TYPE_FIELD}")
    if typing.get_origin(field.type) is not typing.Literal:
        raise compat.MisfitError(f"TransformerConfig.{TYPE_FIELD} is annotated {field.type!r}, expected a Literal")
    # ArgumentGroupFactory reads the choices from here; the config's subclasses share this Field.
    choices = (*typing.get_args(field.type), DISPATCHER_TYPE)
    field.type = typing.Literal.__getitem__(choices)
    config_class.__annotations__[TYPE_FIELD] = field.type
    return True


def _checked_post_init(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def __post_init__(self: Any) -> None:  # noqa: N807
        if getattr(self, TYPE_FIELD, None) != DISPATCHER_TYPE:
            original(self)
            if getattr(self, "num_moe_experts", None) is not None:
                options.warn_if_unused()
            return
        importlib.import_module(_LAYER_MODULE)
        compat.require_fit()
        options.current()
        # Before, so that our reasons come first; and after, when Megatron has filled in what was left open.
        refusals.check_config(self, resolved=False)
        original(self)
        refusals.check_config(self, resolved=True)

    setattr(__post_init__, _PATCHED, True)
    return __post_init__


def _patch_layer(module: ModuleType) -> bool:
    """Let ``MoELayer(...)`` build our subclass when the config asks for ``mok``."""
    layer_class = _symbol(module, "MoELayer")
    own_new = layer_class.__dict__.get("__new__")
    if hasattr(getattr(own_new, "__func__", None), _PATCHED):
        return False
    compat.require_version()
    if own_new is not None:
        raise compat.MisfitError("MoELayer has a __new__ of its own")
    _check_methods(layer_class, _LAYER_METHODS)
    _check_methods(_symbol(module, "MoETokenDispatcher"), _DISPATCHER_METHODS)
    _symbol(module, "get_default_pg_collection")
    parameters = inspect.signature(layer_class.__init__).parameters
    for name in ("config", "pg_collection"):
        if name not in parameters:
            raise compat.MisfitError(f"MoELayer.__init__ has no parameter {name}")

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        config = kwargs["config"] if "config" in kwargs else (args[0] if args else None)
        if getattr(config, TYPE_FIELD, None) == DISPATCHER_TYPE:
            cls = _mok_layer_class(cls, layer_class)
        return object.__new__(cls)

    setattr(__new__, _PATCHED, True)
    layer_class.__new__ = staticmethod(__new__)
    return True


def _mok_layer_class(asked: type, layer_class: type) -> type:
    from mok_megatron.layer import MokMoELayer

    if issubclass(asked, MokMoELayer):
        return asked
    if asked is layer_class:
        return MokMoELayer
    raise ValueError(
        f"{TYPE_FIELD}='{DISPATCHER_TYPE}' replaces Megatron's MoELayer and cannot replace its subclass "
        f"{asked.__module__}.{asked.__qualname__}: use MoELayer itself in the layer spec, or another dispatcher"
    )


def _patch_arguments(module: ModuleType) -> bool:
    """Add the ``--mok-*`` options to Megatron's parser."""
    original = _symbol(module, "add_megatron_arguments")
    if hasattr(original, _PATCHED):
        return False

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return options.add_arguments(original(parser))

    setattr(add_megatron_arguments, _PATCHED, True)
    vars(module)["add_megatron_arguments"] = add_megatron_arguments
    return True
