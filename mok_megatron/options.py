"""Options of the backend: ``--mok-*`` flags, ``configure(...)`` from Python, one YAML file, and their precedence.

A flag wins over ``configure``, which wins over the YAML file, which wins over the default. The file is named by
``--mok-config`` or else by the variable MOK_MEGATRON_CONFIG. Names and checks are those of ``MokConfig``.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mok_megatron.config import MokConfig

logger = logging.getLogger("mok_megatron")

CONFIG_VARIABLE = "MOK_MEGATRON_CONFIG"
CONFIG_FLAG = "--mok-config"


@dataclass
class _Sources:
    """Where options came from in this process; the config file is read again at each use."""

    flags: dict[str, Any] = field(default_factory=dict)
    file: str | None = None
    python: dict[str, Any] = field(default_factory=dict)
    warned: bool = False


_sources = _Sources()


def current() -> MokConfig:
    """The options in force. Raises ValueError for a bad file or value, OSError for a file that cannot be read."""
    path = _sources.file or os.environ.get(CONFIG_VARIABLE)
    config = MokConfig.from_yaml(path) if path else MokConfig()
    return replace(config, **{**_sources.python, **_sources.flags})


def configure(**options: Any) -> MokConfig:
    """Set options from Python, before the model is built; returns the options in force.

    ``mok_megatron.configure(backend="reference")``. Without arguments, forgets what earlier calls set. Raises
    ValueError for an unknown option or a bad value and then changes nothing.
    """
    MokConfig.from_mapping(options, source="mok_megatron.configure")
    _sources.python = {**_sources.python, **options} if options else {}
    return current()


def warn_if_unused() -> None:
    """Say once that ``--mok-*`` flags were given to a run whose MoE layers do not use them."""
    if _sources.flags and not _sources.warned:
        _sources.warned = True
        given = ", ".join(flag_names(name)[0] for name in sorted(_sources.flags))
        logger.warning("mok_megatron: %s without effect: moe_token_dispatcher_type is not 'mok'", given)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options to a parser. What it parses is checked at once and kept for ``current``.

    A new parser starts afresh: flags that an earlier one parsed in this process are forgotten.
    """
    _sources.flags, _sources.file, _sources.warned = {}, None, False
    group = parser.add_argument_group("mok", "Backend behind --moe-token-dispatcher-type mok.")
    group.add_argument(
        CONFIG_FLAG, metavar="FILE", action=_FileAction, help=f"YAML file of the options below [{CONFIG_VARIABLE}]."
    )
    hints = typing.get_type_hints(MokConfig)
    described = descriptions()
    for option in fields(MokConfig):
        flags = flag_names(option.name)
        text = f"{described.get(option.name, '')} Default: {option.default}.".replace("%", "%%")
        kind = _value_type(hints[option.name])
        if kind is bool:
            group.add_argument(*flags, dest=f"mok_{option.name}", nargs=0, action=_OptionAction, help=text)
        else:
            choices = typing.get_args(hints[option.name]) if kind is str else None
            group.add_argument(*flags, type=kind, choices=choices or None, action=_OptionAction, help=text)
    return parser


def flag_names(option: str) -> list[str]:
    """``save_x`` -> ``--mok-save-x`` and, for an option that is true or false, ``--no-mok-save-x``."""
    flag = "mok-" + option.replace("_", "-")
    is_bool = _value_type(typing.get_type_hints(MokConfig)[option]) is bool
    return [f"--{flag}", f"--no-{flag}"] if is_bool else [f"--{flag}"]


def descriptions() -> dict[str, str]:
    """Option -> its line in the docstring of MokConfig (nothing where Python strips docstrings)."""
    found = re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", MokConfig.__doc__ or "", flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


class _OptionAction(argparse.Action):
    """Checks one option as MokConfig does and keeps it, in the namespace and for ``current``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        value = values if self.nargs != 0 else not str(option_string).startswith("--no-")
        name = self.dest.removeprefix("mok_")
        try:
            MokConfig.from_mapping({name: value}, source=str(option_string))
        except ValueError as error:
            parser.error(f"argument {option_string}: {error}")
        setattr(namespace, self.dest, value)
        _sources.flags[name] = value


class _FileAction(argparse.Action):
    """Reads the file at once, so that a bad one ends the run before anything was built."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            MokConfig.from_yaml(str(values))
        except (ValueError, OSError) as error:
            parser.error(f"argument {option_string}: {error}")
        setattr(namespace, self.dest, values)
        _sources.file = str(values)


def _value_type(hint: Any) -> type:
    """``int | None`` -> int, ``Literal["a", "b"]`` -> str, ``float`` -> float."""
    if isinstance(hint, type):
        return hint
    if typing.get_origin(hint) is typing.Literal:
        return str
    if isinstance(hint, types.UnionType):
        plain = [part for part in typing.get_args(hint) if part is not type(None)]
        if len(plain) == 1:
            return _value_type(plain[0])
    raise TypeError(f"an option of MokConfig has a type without a flag: {hint!r}")
