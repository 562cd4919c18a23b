"""Tables of predictions: EP size, pull and push, crossings, copying resources, imbalance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from mok_megatron.config import MoeShape
from mok_megatron.floors import DIRECTIONS, Direction
from mok_megatron.simulator.engine import Outcome, simulate
from mok_megatron.simulator.machine import Machine, Policy
from mok_megatron.simulator.traffic import Traffic, build_traffic, sample_routing

BASE = Policy()
HEADER = ("case", "fwd ms", "bwd ms", "TFLOP/s fwd / bwd", "floors fwd: FLOP / NVLink ms", "waiting fwd")
Row = tuple[str, ...]


@lru_cache(maxsize=32)
def traffic(shape: MoeShape, tokens: int, imbalance: float = 0.0) -> Traffic:
    """Random routing of one case; the same for every table."""
    return build_traffic(shape, sample_routing(shape, tokens, imbalance=imbalance))


def row(name: str, machine: Machine, policy: Policy, moved: Traffic) -> Row:
    """One line of a table."""
    forward, backward = (simulate(machine, policy, moved, direction) for direction in DIRECTIONS)
    return (
        name,
        f"{forward.total_s * 1e3:.2f}",
        f"{backward.total_s * 1e3:.2f}",
        f"{forward.tflops:.0f} / {backward.tflops:.0f}",
        f"{forward.floors.flop_s * 1e3:.2f} / {forward.floors.nvlink_s * 1e3:.2f}",
        f"{forward.waiting:.0%}",
    )


def ep_sizes(machine: Machine, shape: MoeShape, tokens: int, sizes: list[int]) -> Iterator[Row]:
    """The same layer over more and more ranks; where E is not divisible, E is rounded up to the next multiple."""
    for ep in sizes:
        experts = -(-shape.num_experts // ep) * ep
        note = "" if experts == shape.num_experts else f", {experts} experts"
        yield row(f"EP {ep}{note}", machine, BASE, traffic(replace(shape, ep_size=ep, num_experts=experts), tokens))


def transport(machine: Machine, shape: MoeShape, tokens: int) -> Iterator[Row]:
    """How rows travel."""
    pull = replace(BASE, combine="pull")
    cases = {
        "y rows pushed by the experts' ranks": BASE,
        "pulled by their tokens' ranks": pull,
        "pulled, combine in token order": replace(pull, token_order="token"),
        "pushed, x rotated: destination d begins with source d": replace(BASE, pull_order="rotated"),
        "pulled, x rotated": replace(pull, pull_order="rotated"),
        "dispatch once per route": replace(BASE, dedup=False),
        "combine once per (token, rank), results depend on W": replace(BASE, combine_per_rank=True),
    }
    for name, policy in cases.items():
        yield row(name, machine, policy, traffic(shape, tokens))


def copying(machine: Machine, shape: MoeShape, tokens: int) -> Iterator[Row]:
    """What moves the rows."""
    for warps in (1, 2, 4, 8):
        policy = replace(BASE, copy_warps=warps)
        name = f"{warps} copying warp(s) in every CTA ({policy.copy_rate(machine) / 1e9:.0f} GB/s)"
        yield row(name, machine, policy, traffic(shape, tokens))
    for sms in (4, 8, 16, 32):
        policy = replace(BASE, copy_layout="dedicated", comm_sms=sms)
        name = f"{sms} SMs that only copy ({policy.copy_rate(machine) / 1e9:.0f} GB/s)"
        yield row(name, machine, policy, traffic(shape, tokens))


def imbalance(machine: Machine, shape: MoeShape, tokens: int) -> Iterator[Row]:
    """Log-normal popularity of experts, and ranks that are late."""
    for sigma in (0.0, 0.25, 0.5, 1.0):
        moved = traffic(shape, tokens, sigma)
        yield row(f"sigma {sigma:g}: fullest rank {moved.imbalance:.2f} x mean", machine, BASE, moved)
    for skew in (50e-6, 500e-6):
        late = machine.with_(skew_s=skew, jitter=0.05)
        yield row(f"ranks enter within {skew * 1e6:.0f} us, tiles jitter 5 %", late, BASE, traffic(shape, tokens))


STUDIES: dict[str, Callable[[Machine, MoeShape, int], Iterator[Row]]] = {
    "How rows travel": transport,
    "What moves the rows": copying,
    "Imbalance and lateness": imbalance,
}


def markdown(rows: Iterator[Row]) -> str:
    """A table in Markdown, all times predicted."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


def describe(outcome: Outcome) -> str:
    """Multi-line text of one prediction."""
    return "\n".join(
        [
            outcome.describe(),
            f"  all rows arrived {outcome.dispatch_s * 1e3:.3f} ms, last tile {outcome.compute_s * 1e3:.3f} ms, "
            f"combine adds {outcome.tail_s * 1e3:.3f} ms; clusters wait {outcome.waiting:.0%} of the time",
        ]
    )


def predictions(machine: Machine, policy: Policy, shape: MoeShape, tokens: int, skewed: float) -> list[str]:
    """Both directions of one case as text."""
    directions: tuple[Direction, ...] = DIRECTIONS
    return [describe(simulate(machine, policy, traffic(shape, tokens, skewed), d)) for d in directions]
