"""One case through all implementations: check, then time, then compare with cuBLAS of the same run."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mok_megatron.floors import routed_flops

from .implementations import Direction, Implementation, Layer
from .inputs import Case
from .reference import Reference, check, compute_reference
from .timing import CUBLAS_FLOPS, Cublas, Meter, Timing

Result = dict[str, Any]
"""One line of the report and one entry of the JSON file; docs/benchmarks/README.md lists the keys."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to time: directions, whether forward keeps what backward needs, iterations (None: enough)."""

    directions: frozenset[Direction]
    saves: bool = True
    iterations: int | None = None


def measure_case(
    case: Case, entries: Iterable[Implementation], meter: Meter, cublas: Cublas, options: Options
) -> list[Result]:
    """Results of all ``entries``; one that fails or is wrong gives a result with ``error`` and no time. Collective."""
    burst_ms = cublas.burst_ms()
    reference = compute_reference(case, backward="backward" in options.directions)
    results: list[Result] = []
    for entry in entries:
        reason = entry.unavailable(case)
        if reason is not None:
            results.append(_describe(case, entry) | {"unavailable": reason})
            continue
        results += _measure(case, entry, reference, meter, options)
        gc.collect()
        if case.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
    return _compare(results, cublas, burst_ms)


def _measure(case: Case, entry: Implementation, reference: Reference, meter: Meter, options: Options) -> list[Result]:
    """Build, check and time one implementation. Any failure of it, on any rank, becomes an ``error``."""
    layer, failure, error = None, None, 0.0
    saves = entry.saves and options.saves
    needs = options.directions & entry.directions
    before = meter.allocated_bytes()
    try:
        layer = entry.build(case)
        error = check(layer, case, reference, saves=saves, backward="backward" in needs)
    except Exception as problem:  # whatever a foreign layer raises must not end the run
        failure = f"{type(problem).__name__}: {problem}"
    results: list[Result]
    if case.ranks.largest(float(failure is not None)):
        results = [_describe(case, entry) | {"error": failure or "failed on another rank"}]
    else:
        assert layer is not None
        try:
            results = _time(case, entry, layer, meter, options, before=before, saves=saves)
            results = [result | {"relative_error": error} for result in results]
        except Exception as problem:
            results = [_describe(case, entry) | {"error": f"{type(problem).__name__}: {problem}"}]
    if layer is not None:
        layer.close()
    return results


def _time(
    case: Case, entry: Implementation, layer: Layer, meter: Meter, options: Options, *, before: int, saves: bool
) -> list[Result]:
    sets = len(case.copies)

    def forward(index: int) -> None:
        with torch.set_grad_enabled(saves):
            layer.forward(index % sets)

    def clear(index: int) -> None:
        layer.clear_gradients(index % sets)

    def forward_backward(index: int) -> None:
        layer.forward(index % sets).backward(case.copies[index % sets].dy)

    def both(index: int) -> None:
        clear(index)
        forward_backward(index)

    def memory(call: Any) -> Result:
        for index in range(sets):
            clear(index)
        peak = meter.peak_bytes(lambda index: call(0)) - before + case.copies[0].bytes + layer.uncounted_bytes()
        return {"peak_bytes": int(peak), "workspace_bytes": layer.workspace_bytes()}

    common = _describe(case, entry) | {"saves": saves}
    timed, host_us = meter.time(forward, options.iterations), meter.host_us(forward)
    results = []
    if "forward" in options.directions & entry.directions:
        measured = _numbers(timed, case, 1) | {"host_us": host_us} | memory(forward)
        if entry.has_schedule:
            measured["schedule_ms"] = meter.time(lambda index: layer.schedule(index % sets), options.iterations).ms
        results.append(common | {"direction": "forward"} | measured | {"launches": meter.launches(forward)})
    if "backward" in options.directions & entry.directions:
        whole, both_us = meter.time(both, options.iterations), meter.host_us(forward_backward, clear)
        measured = _numbers(whole, case, 3) | {"host_us": both_us} | memory(both)
        results.append(common | {"direction": "forward+backward"} | measured | {"launches": meter.launches(both)})
        ms = whole.ms - timed.ms
        difference = Timing(ms=ms, low_ms=ms, high_ms=ms, iterations=whole.iterations)
        measured = _numbers(difference, case, 2) | {"host_us": both_us - host_us}
        results.append(common | {"direction": "backward"} | measured)
    for index in range(sets):
        clear(index)
    return results


def _describe(case: Case, entry: Implementation) -> Result:
    """What was measured; the same keys in every result."""
    shape = case.shape
    return {
        "implementation": entry.name,
        "shape": {"name": case.name, "H": shape.hidden, "I": shape.intermediate},
        "T": case.tokens,
        "K": shape.top_k,
        "E": shape.num_experts,
        "W": shape.ep_size,
        "routing": case.routing,
        "load": case.load,
    }


def _numbers(timing: Timing, case: Case, forwards: int) -> Result:
    """Times and the useful rate of a call that does ``forwards`` times the arithmetic of a forward."""
    flops = forwards * routed_flops(case.shape, case.tokens, "fwd")
    return {
        "ms": timing.ms,
        "low_ms": timing.low_ms,
        "high_ms": timing.high_ms,
        "iterations": timing.iterations,
        "tflops": flops / timing.ms / 1e9,
    }


def _compare(results: Sequence[Result], cublas: Cublas, burst_ms: float) -> list[Result]:
    """Add cuBLAS rates and the fractions of them; sustained ones last as long as our call, or else the fastest."""
    burst = CUBLAS_FLOPS / burst_ms / 1e9
    sustained: dict[str, float] = {}
    for direction in dict.fromkeys(result["direction"] for result in results if "ms" in result):
        times = {r["implementation"]: r["ms"] for r in results if r.get("direction") == direction}
        duration_ms = times.get("mok", min(times.values()))
        sustained[direction] = CUBLAS_FLOPS / cublas.sustained_ms(duration_ms, burst_ms) / 1e9
    compared = []
    for result in results:
        if "ms" in result:
            rate = sustained[result["direction"]]
            result = result | {
                "cublas_tflops": burst,
                "cublas_sustained_tflops": rate,
                "fraction": result["tflops"] / burst,
                "fraction_sustained": result["tflops"] / rate,
            }
        compared.append(result)
    return compared


def failures(results: Iterable[Mapping[str, Any]], named: Iterable[str] | None) -> list[str]:
    """What must make the run fail: errors, and implementations that were asked for by name but cannot run."""
    lines = []
    for result in results:
        what = result.get("error")
        if what is None and named is not None and result["implementation"] in set(named):
            what = result.get("unavailable")
        if what is not None:
            lines.append(f"{result['implementation']} on {result['shape']['name']}: {what}")
    return lines
