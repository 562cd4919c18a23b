"""Options of the backend: ``--mok-*`` flags, ``configure(...)`` from Python, one YAML file, and their precedence.

A flag wins over ``configure``, which wins over the YAML file, which wins over the default. The file is named by
``--mok-config`` or else by the variable MOK_MEGATRON_CONFIG. Names and checks are those of ``MokConfig``.
"""

from __future__ import annotations

import argparse
import os
import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mok_megatron.config import MokConfig

CONFIG_VARIABLE = "MOK_MEGATRON_CONFIG"
CONFIG_FLAG = "--mok-config"


@dataclass
class _Sources:
    """Where options came from in this process; the config file is read again at each use."""

    flags: dict[str, Any] = field(default_factory=dict)
    file: str | None = None
    python: dict[str, Any] = field(default_factory=dict)


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


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options to a parser. What it parses is checked at once and kept for ``current``.

    A new parser starts afresh: flags that an earlier one parsed in this process are forgotten.
    """
    _sources.flags, _sources.file = {}, None
    group = parser.add_argument_group("mok", "Backend behind --moe-token-dispatcher-type mok.")
    group.add_argument(
        CONFIG_FLAG, metavar="FILE", action=_FileAction, help=f"YAML file of the options below [{CONFIG_VARIABLE}]."
    )
    hints = typing.get_type_hints(MokConfig)
    described = _descriptions()
    for option in fields(MokConfig):
        flag = "--mok-" + option.name.replace("_", "-")
        text = f"{described.get(option.name, '')} Default: {option.default}.".replace("%", "%%")
        kind = _value_type(hints[option.name])
        if kind is bool:
            names = [flag, f"--no-{flag.removeprefix('--')}"]
            group.add_argument(*names, dest=f"mok_{option.name}", nargs=0, action=_OptionAction, help=text)
        else:
            choices = typing.get_args(hints[option.name]) if kind is str else None
            group.add_argument(flag, type=kind, choices=choices or None, action=_OptionAction, help=text)
    return parser


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


def _descriptions() -> dict[str, str]:
    """Option -> its line in the docstring of MokConfig ("" where Python strips docstrings)."""
    found = re.findall(r"^ {8}(\w+): (.+(?:\n {12}.+)*)", MokConfig.__doc__ or "", flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
