"""What is measured: a registry of implementations of the layer, each behind the same few methods.

An implementation that cannot run here says why, and is left out or, when it was asked for, reported with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from .inputs import Case

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """``dx [T, H]``, ``dprobs [T, K]`` as the case's experts, and one expert's ``dw1 [2I, H]`` and ``dw2 [H, I]``."""

    dx: Tensor
    dprobs: Tensor
    dw1: Tensor
    dw2: Tensor


class Layer(Protocol):
    """An implementation, built for one case. ``index`` is the set of tensors (``case.copies``) that a call uses."""

    def forward(self, index: int) -> Tensor:
        """y ``[T, H]`` (or ``[T, 1, H]``). With gradients enabled it can be differentiated, else nothing is kept."""
        ...

    def clear_gradients(self, index: int) -> None:
        """Drop the gradients of the set."""
        ...

    def gradients(self, index: int, expert: int) -> Gradients:
        """What the last backward of the set gave; the weights' for local ``expert``."""
        ...

    def schedule(self, index: int) -> object:
        """Do what comes before any data moves, and nothing else; None where that is no step of its own."""
        ...

    def workspace_bytes(self) -> int:
        """Memory, part of the peak, that stays between calls and that all layers of a model would share."""
        ...

    def uncounted_bytes(self) -> int:
        """Memory to add to what torch's allocator counts: held outside of it, less copies for sets beyond the first."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """An entry of the registry.

    Attributes:
        build: makes the layer for a case. May be collective.
        unavailable: why it cannot run a case here, or None. Cheap, does not allocate.
        saves: whether forward keeps what backward needs.
        directions: what can be timed; backward is the difference of forward with backward and forward.
        by_default: whether it is tried when no implementation is named.
        has_schedule: whether its schedule can be timed alone.
    """

    name: str
    build: Callable[[Case], Layer]
    unavailable: Callable[[Case], str | None]
    saves: bool = True
    directions: frozenset[Direction] = frozenset({"forward", "backward"})
    by_default: bool = True
    has_schedule: bool = False


def registry() -> Mapping[str, Implementation]:
    """All implementations by name, in the order in which they run: baselines first."""
    from . import ours, peers, torch_eager

    entries = (*torch_eager.IMPLEMENTATIONS, *peers.IMPLEMENTATIONS, *ours.IMPLEMENTATIONS)
    return {entry.name: entry for entry in entries}


def select(
    entries: Mapping[str, Implementation], names: list[str] | None, directions: frozenset[Direction], *, saves: bool
) -> list[Implementation]:
    """The implementations to run: those named, else the defaults that have one of the ``directions``.

    Where no forward ``saves``, mok-nograd is what mok would be, so the default has only that one. Raises ValueError for
    an unknown name, and for one that has none of the directions.
    """
    unknown = sorted(set(names or ()) - set(entries))
    if unknown:
        raise ValueError(f"unknown implementation(s) {', '.join(unknown)}; known are {', '.join(entries)}")
    for name in names or ():
        if not entries[name].directions & directions:
            raise ValueError(
                f"{name} has no {' or '.join(sorted(directions))}, only {', '.join(entries[name].directions)}"
            )
    if names:
        return [entries[name] for name in dict.fromkeys(names)]
    able = [entry for entry in entries.values() if entry.by_default and entry.directions & directions]
    return [entry for entry in able if saves or entry.name != "mok"]
