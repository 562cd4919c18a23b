"""Rates from measurements: read a benchmark file, fit the machine, predict other shapes, state the error."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mok_megatron.config import MoeShape
from mok_megatron.floors import DIRECTIONS, Direction
from mok_megatron.simulator.engine import Outcome, simulate
from mok_megatron.simulator.machine import Machine, Policy
from mok_megatron.simulator.traffic import Traffic, build_traffic, sample_routing


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured call: milliseconds per direction (forward, or backward alone)."""

    shape: MoeShape
    tokens: int
    direction: Direction
    ms: float
    routing: str = "uniform"
    cublas_tflops: float | None = None


def load_measurements(path: str | Path) -> list[Measurement]:
    """Read ``{gpu, commit, date, results: [{shape, T, K, E, W, routing, direction, ms, ...}]}``.

    ``shape`` is ``[H, I]``, a mapping with H and I (or hidden and intermediate), or H and I stand beside it. Entries
    that are no layer timing of real ranks (other directions such as ``fwd+bwd``, no ``ms``, ``virtual`` ranks that
    share one GPU), and those of another ``implementation`` than this project's training layer, are passed over.
    Raises ValueError where the file is not JSON, or holds no timing that could be used.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    entries = document.get("results", []) if isinstance(document, dict) else []
    found = [measurement for entry in entries if (measurement := _parse(entry)) is not None]
    if not found:
        raise ValueError(
            f"{path}: no usable timing among {len(entries)} results: each needs shape (H, I), T, K, E, W, "
            f"direction ({' or '.join(DIRECTIONS)}) and ms"
        )
    return found


def _parse(entry: Any) -> Measurement | None:
    if not isinstance(entry, dict) or entry.get("virtual"):
        return None
    if entry.get("implementation", "mok") != "mok" or not entry.get("saves", True):
        return None
    sizes = entry.get("shape")
    known: dict[str, Any] = dict(entry)
    if isinstance(sizes, dict):
        known |= sizes
    elif isinstance(sizes, list | tuple) and len(sizes) >= 2:
        known |= {"H": sizes[0], "I": sizes[1]}
    hidden, width = known.get("H", known.get("hidden")), known.get("I", known.get("intermediate"))
    direction = {"forward": "fwd", "backward": "bwd"}.get(str(known.get("direction")), known.get("direction"))
    numbers = [hidden, width, known.get("T"), known.get("K"), known.get("E"), known.get("W", 1)]
    ms = known.get("ms")
    if direction not in DIRECTIONS or not all(isinstance(number, int) for number in numbers):
        return None
    if not isinstance(ms, int | float) or not (math.isfinite(ms) and ms > 0):
        return None
    return Measurement(
        shape=MoeShape(
            hidden=cast(int, hidden),
            intermediate=cast(int, width),
            num_experts=known["E"],
            top_k=known["K"],
            ep_size=known.get("W", 1),
        ),
        tokens=known["T"],
        direction=direction,
        ms=float(ms),
        routing=str(known.get("routing", "uniform")),
        cublas_tflops=known.get("cublas_tflops"),
    )


def calibrate(machine: Machine, measured: Sequence[Measurement], policy: Policy | None = None) -> Machine:
    """The machine with GEMM rates (one per direction) and tile overhead fitted to ``measured``.

    The rate is searched first with the overhead as it stands; with two or more shapes of a direction the overhead is
    searched too. Only uniform routing is used: a skewed call says more about its routing than about the machine.
    Raises ValueError without a usable forward or backward timing.
    """
    policy = policy or Policy()
    used = [m for m in measured if m.routing == "uniform"]
    if not used:
        raise ValueError(f"calibration needs a timing with uniform routing; got {len(measured)} without")
    cases = [(m, _traffic(m)) for m in used]
    directions = {m.direction for m in used}
    several = any(len({m.shape for m in used if m.direction == d}) > 1 for d in directions)
    best = _fit_rates(machine, policy, cases)
    if several:
        trials = [
            _fit_rates(machine.with_(tile_overhead_s=us * 1e-6), policy, cases) for us in (0.25, 0.5, 1, 2, 3, 4, 6)
        ]
        best = min([best, *trials], key=lambda candidate: _worst_error(candidate, policy, cases))
    if len(directions) == 1:
        rate = best.gemm_flops if directions == {"fwd"} else best.bwd_gemm_flops
        best = best.with_(gemm_flops=rate, bwd_gemm_flops=rate)
    error = _worst_error(best, policy, cases)
    basis = f"calibrated on {len(used)} timing(s) of {machine.name}, worst error there {error:.1%}"
    return best.with_(basis=basis)


def predict(machine: Machine, measurement: Measurement, policy: Policy | None = None) -> Outcome:
    """What the simulator says about a measured call."""
    return simulate(machine, policy or Policy(), _traffic(measurement), measurement.direction)


def _traffic(m: Measurement) -> Traffic:
    return build_traffic(m.shape, sample_routing(m.shape, m.tokens))


def _fit_rates(machine: Machine, policy: Policy, cases: Sequence[tuple[Measurement, Traffic]]) -> Machine:
    """Scale each direction's GEMM rate until the mean log error vanishes (time falls steadily with the rate)."""
    fields = {"fwd": "gemm_flops", "bwd": "bwd_gemm_flops"}
    for direction in DIRECTIONS:
        own = [(m, traffic) for m, traffic in cases if m.direction == direction]
        for _ in range(8 if own else 0):
            ratios = [
                math.log(simulate(machine, policy, traffic, direction).total_s / (m.ms * 1e-3)) for m, traffic in own
            ]
            drift = statistics.fmean(ratios)
            rate = getattr(machine, fields[direction]) * math.exp(drift)
            machine = machine.with_(**{fields[direction]: rate})
            if abs(drift) < 1e-3:
                break
    return machine


def _worst_error(machine: Machine, policy: Policy, cases: Sequence[tuple[Measurement, Traffic]]) -> float:
    return max(abs(simulate(machine, policy, t, m.direction).total_s / (m.ms * 1e-3) - 1.0) for m, t in cases)
