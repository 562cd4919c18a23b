"""Rates from measurements: read a benchmark file, fit the machine, predict other shapes, state the error."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mok_megatron.config import MoeShape
from mok_megatron.floors import DIRECTIONS, Direction
from mok_megatron.hardware import GPUS, GpuSpec
from mok_megatron.simulator.engine import Outcome, simulate
from mok_megatron.simulator.machine import Machine, Policy
from mok_megatron.simulator.traffic import Traffic, build_traffic, named_routing

_IMPLEMENTATIONS = {"fwd": ("mok", "mok-main-grad"), "bwd": ("mok-main-grad",), "both": ("mok-main-grad",)}
"""Whose timings count: training as Megatron runs it, with gradients added to fp32 ``main_grad``."""
_DIRECTIONS = {"forward": "fwd", "backward": "bwd", "forward+backward": "both"}
_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measured call: milliseconds per direction (forward, or backward alone)."""

    shape: MoeShape
    tokens: int
    direction: Direction
    ms: float
    routing: str = "uniform"


def calibrated_machine(spec: GpuSpec, path: str | Path) -> Machine:
    """``spec`` with the rates that a benchmark file gives; a file of another GPU gives its fractions of the peak.

    Raises ValueError for a file of a GPU that ``hardware.py`` does not know, or without usable timings.
    """
    name = str(_document(path).get("gpu", ""))
    found = sorted((known for known in GPUS if known in name.lower()), key=len)
    if not found:
        raise ValueError(f"{path}: measured on gpu {name!r}; known GPUs are {', '.join(GPUS)}")
    source = GPUS[found[-1]]  # of "b200" and "gb200" the longer
    fitted = calibrate(Machine.from_gpu(source), load_measurements(path))
    if source is spec:
        return fitted
    return Machine.from_gpu(spec).with_(
        gemm_flops=fitted.gemm_flops * spec.bf16_peak_flops / source.bf16_peak_flops,
        sustained=fitted.sustained,
        backward_share=fitted.backward_share,
        basis=f"{fitted.basis}; {spec.title} assumed to reach the same fraction of its BF16 peak, error there unknown; "
        + spec.basis,
    )


def _document(path: str | Path) -> dict[str, Any]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    return document if isinstance(document, dict) else {}


def load_measurements(path: str | Path) -> list[Measurement]:
    """Read ``{gpu, commit, date, results: [{shape, T, K, E, W, routing, direction, ms, ...}]}``.

    ``shape`` is ``[H, I]``, a mapping with H and I (or hidden and intermediate), or H and I stand beside it. Where a
    case has forward+backward and backward but no forward, forward is their difference (that is how backward was
    found). Entries without ``ms``, of ``virtual`` ranks that share one GPU, of forwards that keep nothing for backward,
    and of other implementations than ``mok`` (forward) and ``mok-main-grad`` are passed over.
    Raises ValueError where the file cannot be read, is not JSON, or holds no timing that could be used.
    """
    entries = _document(path).get("results", [])
    cases: dict[tuple[MoeShape, int, str], dict[str, float]] = {}
    for entry in entries:
        parsed = _parse(entry)
        if parsed is not None:
            case, direction, ms = parsed
            cases.setdefault(case, {}).setdefault(direction, ms)
    found = [
        Measurement(shape=shape, tokens=tokens, routing=routing, direction=direction, ms=times[direction])
        for (shape, tokens, routing), times in cases.items()
        for direction in DIRECTIONS
        if direction in _with_forward(times)
    ]
    if not found:
        raise ValueError(
            f"{path}: no usable timing among {len(entries)} results: each needs shape (H, I), T, K, E, W, "
            f"direction ({' or '.join(_DIRECTIONS)}) and ms"
        )
    return found


def _with_forward(times: dict[str, float]) -> dict[str, float]:
    if "fwd" not in times and "bwd" in times and times.get("both", 0.0) > times["bwd"]:
        times["fwd"] = times["both"] - times["bwd"]
    return times


def _parse(entry: Any) -> tuple[tuple[MoeShape, int, str], str, float] | None:
    """((shape, tokens, routing), direction, ms) of a usable entry."""
    if not isinstance(entry, dict) or entry.get("virtual") or not entry.get("saves", True):
        return None
    sizes = entry.get("shape")
    known: dict[str, Any] = dict(entry)
    if isinstance(sizes, dict):
        known |= sizes
    elif isinstance(sizes, list | tuple) and len(sizes) >= 2:
        known |= {"H": sizes[0], "I": sizes[1]}
    hidden, width = known.get("H", known.get("hidden")), known.get("I", known.get("intermediate"))
    direction = _DIRECTIONS.get(str(known.get("direction")), str(known.get("direction")))
    numbers = [hidden, width, known.get("T"), known.get("K"), known.get("E"), known.get("W", 1)]
    ms = known.get("ms")
    if direction not in _IMPLEMENTATIONS or not all(isinstance(number, int) for number in numbers):
        return None
    if known.get("implementation", _IMPLEMENTATIONS[direction][0]) not in _IMPLEMENTATIONS[direction]:
        return None
    if not isinstance(ms, int | float) or not (math.isfinite(ms) and ms > 0):
        return None
    shape = MoeShape(
        hidden=cast(int, hidden),
        intermediate=cast(int, width),
        num_experts=known["E"],
        top_k=known["K"],
        ep_size=known.get("W", 1),
    )
    return (shape, known["T"], str(known.get("routing", "uniform"))), direction, float(ms)


def calibrate(machine: Machine, measured: Sequence[Measurement], policy: Policy | None = None) -> Machine:
    """The machine with at most three numbers fitted to ``measured``, each by the timings that show it.

    The GEMM rate by forwards that end before the power limit is felt, the sustained share of it by those that last
    twice as long, the share of it that backward reaches by backwards. What no timing shows stays as it is; with long
    forwards only, the rate is fitted and the share stays. Only uniform routing is used: a skewed call says more about
    its routing than about the machine. Raises ValueError without a usable timing.
    """
    policy = policy or Policy()
    cases = [(m, _traffic(m)) for m in measured if m.routing == "uniform"]
    if not cases:
        raise ValueError(f"calibration needs a timing with uniform routing; got {len(measured)} without")
    forwards = [case for case in cases if case[0].direction == "fwd"]
    short = [case for case in forwards if case[0].ms * 1e-3 < machine.burst_s]
    long = [case for case in forwards if case[0].ms * 1e-3 > 2 * machine.burst_s]
    backwards = [case for case in cases if case[0].direction == "bwd"]
    for _ in range(_ROUNDS):
        if drift := _mean_log_error(machine, policy, short or forwards):
            machine = machine.with_(gemm_flops=machine.gemm_flops * math.exp(drift))
        if short and (drift := _mean_log_error(machine, policy, long)):
            machine = machine.with_(sustained=min(1.0, machine.sustained * math.exp(drift)))
        if drift := _mean_log_error(machine, policy, backwards):
            machine = machine.with_(backward_share=machine.backward_share * math.exp(drift))
    error = max(abs(_total(machine, policy, m, t) / (m.ms * 1e-3) - 1.0) for m, t in cases)
    covered = " and ".join(name for name, used in (("forward", forwards), ("backward", backwards)) if used)
    basis = f"calibrated on {len(cases)} {covered} timing(s) of {machine.name}, worst error there {error:.1%}"
    return machine.with_(basis=basis)


def predict(machine: Machine, measurement: Measurement, policy: Policy | None = None) -> Outcome:
    """What the simulator says about a measured call."""
    return simulate(machine, policy or Policy(), _traffic(measurement), measurement.direction)


def _traffic(m: Measurement) -> Traffic:
    return build_traffic(m.shape, named_routing(m.routing, m.shape, m.tokens))


def _total(machine: Machine, policy: Policy, m: Measurement, traffic: Traffic) -> float:
    return simulate(machine, policy, traffic, m.direction).total_s


def _mean_log_error(machine: Machine, policy: Policy, cases: Iterable[tuple[Measurement, Traffic]]) -> float:
    errors = [math.log(_total(machine, policy, m, traffic) / (m.ms * 1e-3)) for m, traffic in cases]
    return statistics.fmean(errors) if errors else 0.0
