"""Strict mapping -> frozen dataclass, for YAML files. Unknown or missing keys and wrong types are refused by name."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest of ``known``, or an empty string where nothing is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""


def build[T](cls: type[T], value: object, where: str = "") -> T:
    """Build the dataclass ``cls`` from a mapping; ``where`` is its dotted place for messages, empty at the top.

    Fields may be int, float, bool, str, Literal, ``X | None``, nested dataclasses (several kinds
    are told apart by their field ``kind``), tuples of them, and mappings.
    Raises ValueError that names file, key, value and what was expected. ValueErrors of the dataclass's own checks
    are passed on with the place in front.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{_prefix(where)}expected a mapping, got {_shown(value)}")
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # a dataclass
    for key in value:
        if key not in known:
            raise ValueError(
                f"{_prefix(where)}unknown key {key!r}{nearest(str(key), known)}; known keys are {', '.join(known)}"
            )
    missing = [name for name, field in known.items() if name not in value and _is_required(field)]
    if missing:
        raise ValueError(f"{_prefix(where)}missing {', '.join(missing)}")
    hints = typing.get_type_hints(cls)
    arguments = {key: _convert(hints[key], item, f"{where}.{key}".lstrip(".")) for key, item in value.items()}
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ValueError(f"{_prefix(where)}{error}") from error


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(hint: Any, value: object, where: str) -> Any:
    """``value`` as the type ``hint``, without coercion (an int is accepted where a float is wanted)."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(typing.get_args(hint), value, where)
    if origin is typing.Literal:
        choices = typing.get_args(hint)
        if value not in choices or isinstance(value, bool):
            raise ValueError(f"{where}: expected one of {', '.join(map(str, choices))}, got {_shown(value)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: expected a list, got {_shown(value)}")
        return tuple(_convert(typing.get_args(hint)[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: expected a mapping, got {_shown(value)}")
        item_hint = typing.get_args(hint)[1]
        return {str(key): _convert(item_hint, item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    return _convert_plain(hint, value, where)


def _convert_union(choices: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and type(None) in choices:
        return None
    if isinstance(value, Mapping):
        choices = (_by_kind([choice for choice in choices if dataclasses.is_dataclass(choice)], value, where),)
    errors = []
    for choice in choices:
        if choice is not type(None):
            try:
                return _convert(choice, value, where)
            except ValueError as error:
                errors.append(error)
    raise errors[0]


def _by_kind(choices: list[Any], value: Mapping[Any, Any], where: str) -> Any:
    """The dataclass that a mapping describes: the only one, or the one whose ``kind`` it names."""
    if len(choices) <= 1:
        return choices[0] if choices else str
    kinds = {choice.kind: choice for choice in choices}
    kind = value.get("kind")
    if kind not in kinds:
        raise ValueError(f"{where}.kind: expected one of {', '.join(kinds)}, got {_shown(kind)}")
    return kinds[kind]


def _convert_plain(hint: Any, value: object, where: str) -> Any:
    if hint is Any or hint is object:
        return value
    accepted = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        names = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
        raise ValueError(f"{where}: expected {names.get(hint, hint)}, got {_shown(value)}")
    return float(value) if hint is float else value


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r}" if value is not None else "nothing"
