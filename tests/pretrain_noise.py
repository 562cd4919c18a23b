"""Rounding noise for whole-run tests (``Job.patch``); what it is: scripts/rounding_noise.py."""

from __future__ import annotations

from scripts.rounding_noise import add_noise


def first() -> None:
    """Noise."""
    add_noise(1)


def second() -> None:
    """Other noise of the same size."""
    add_noise(2)
