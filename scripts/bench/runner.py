"""One case through all implementations: build and check each, then time all of them and cuBLAS in turn."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mok_megatron.floors import routed_flops

from .implementations import Direction, Implementation, Layer
from .inputs import Case
from .reference import Reference, check, compute_reference
from .timing import CUBLAS_FLOPS, Call, Cublas, Meter, Timing

Result = dict[str, Any]
"""One line of the report and one entry of the JSON file; docs/benchmarks/README.md lists the keys."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to time: directions, whether forward keeps what backward needs, iterations (None: enough)."""

    directions: frozenset[Direction]
    saves: bool = True
    iterations: int | None = None


@dataclass(frozen=True, kw_only=True)
class _Built:
    """An implementation that is built and right.

    Attributes:
        relative_error: its largest.
        held_bytes: memory that it holds between calls.
    """

    entry: Implementation
    layer: Layer
    relative_error: float
    held_bytes: int
    saves: bool


class _CallError(Exception):
    """A timed call of the implementation ``name`` raised ``__cause__``."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def measure_case(
    case: Case, entries: Iterable[Implementation], meter: Meter, cublas: Cublas, options: Options
) -> list[Result]:
    """Results of all ``entries``; one that fails or is wrong gives a result with ``error`` and no time. Collective."""
    reference = compute_reference(case, backward="backward" in options.directions)
    built: list[_Built] = []
    results: dict[str, list[Result]] = {}
    try:
        for entry in entries:
            reason = entry.unavailable(case)
            if reason is not None:
                results[entry.name] = [_describe(case, entry) | {"unavailable": reason}]
                continue
            found = _build(case, entry, reference, meter, options)
            if isinstance(found, _Built):
                built.append(found)
                results[entry.name] = []
            else:
                results[entry.name] = [found]
        while built:
            try:
                timed = _time(case, built, meter, cublas, options)
            except _CallError as failed:
                broken = next(candidate for candidate in built if candidate.entry.name == failed.name)
                results[failed.name] = [_describe(case, broken.entry) | {"error": _text(failed.__cause__)}]
                built.remove(broken)
                _close(case, broken)
                continue
            for result in timed:
                results[result["implementation"]].append(result)
            break
    finally:
        for candidate in built:
            _close(case, candidate)
    return [result for of_entry in results.values() for result in of_entry]


def _text(problem: BaseException | None) -> str:
    return f"{type(problem).__name__}: {problem}"


def _close(case: Case, built: _Built) -> None:
    built.layer.close()
    gc.collect()
    if case.ranks.device.type == "cuda":
        torch.cuda.empty_cache()


def _build(case: Case, entry: Implementation, reference: Reference, meter: Meter, options: Options) -> _Built | Result:
    """Build and check one implementation. Any failure of it, on any rank, becomes an ``error``."""
    layer, failure, error = None, None, 0.0
    saves = entry.saves and options.saves
    before = meter.allocated_bytes()
    try:
        layer = entry.build(case)
        error = check(layer, case, reference, saves=saves, backward="backward" in options.directions & entry.directions)
        for index in range(len(case.copies)):
            layer.clear_gradients(index)
    except Exception as problem:  # whatever a foreign layer raises must not end the run
        failure = _text(problem)
    if case.ranks.largest(float(failure is not None)):
        if layer is not None:
            layer.close()
        return _describe(case, entry) | {"error": failure or "failed on another rank"}
    assert layer is not None
    held = meter.allocated_bytes() - before
    return _Built(entry=entry, layer=layer, relative_error=error, held_bytes=held, saves=saves)


def _time(case: Case, built: list[_Built], meter: Meter, cublas: Cublas, options: Options) -> list[Result]:
    """Forward, and forward+backward, of all implementations in turn. Raises _CallError."""
    forwards = {candidate.entry.name: _Calls(case, candidate) for candidate in built}
    backwards = {
        candidate.entry.name: forwards[candidate.entry.name]
        for candidate in built
        if "backward" in options.directions & candidate.entry.directions
    }
    results: list[Result] = []
    timed = _rounds({name: calls.forward for name, calls in forwards.items()}, meter, cublas, options)
    whole = _rounds({name: calls.both for name, calls in backwards.items()}, meter, cublas, options)
    for name, calls in forwards.items():
        common = _describe(case, calls.built.entry) | {"saves": calls.built.saves}
        common["relative_error"] = calls.built.relative_error
        host_us = meter.host_us(calls.forward)
        if "forward" in options.directions & calls.built.entry.directions:
            measured = _numbers(timed[name].timing, case, 1) | timed[name].cublas | {"host_us": host_us}
            measured |= calls.memory(meter, calls.forward) | {"launches": meter.launches(calls.forward)}
            if calls.built.entry.has_schedule:
                measured["schedule_ms"] = meter.time(calls.schedule, options.iterations).ms
            results.append(common | {"direction": "forward"} | _fractions(measured))
        if name in backwards:
            both_us = meter.host_us(calls.forward_backward, calls.clear)
            measured = _numbers(whole[name].timing, case, 3) | whole[name].cublas | {"host_us": both_us}
            measured |= calls.memory(meter, calls.both) | {"launches": meter.launches(calls.both)}
            results.append(common | {"direction": "forward+backward"} | _fractions(measured))
            ms = whole[name].timing.ms - timed[name].timing.ms
            difference = Timing(ms=ms, low_ms=ms, high_ms=ms, iterations=whole[name].timing.iterations)
            measured = _numbers(difference, case, 2) | whole[name].cublas | {"host_us": both_us - host_us}
            results.append(common | {"direction": "backward"} | _fractions(measured))
        calls.clear_all()
    return results


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """A time, and the rates of cuBLAS beside it."""

    timing: Timing
    cublas: Result


_CUBLAS = "cuBLAS"


def _rounds(calls: Mapping[str, Call], meter: Meter, cublas: Cublas, options: Options) -> dict[str, _Measured]:
    """Times of ``calls`` and of a product of cuBLAS, all in turn, so that clock and heat are the same for all.

    Then products of cuBLAS back to back for as long as our call takes, or else the fastest.
    """
    if not calls:
        return {}

    def guarded(name: str, call: Call) -> Call:
        def run(index: int) -> object:
            try:
                return call(index)
            except Exception as problem:
                raise _CallError(name) from problem

        run.__name__ = getattr(call, "__name__", name)
        return run

    named = {name: guarded(name, call) for name, call in calls.items()}
    timings = meter.time_in_turn({_CUBLAS: cublas.product} | named, options.iterations)
    burst_ms = timings.pop(_CUBLAS).ms
    times = {name: timing.ms for name, timing in timings.items()}
    sustained_ms = cublas.sustained_ms(times.get("mok", min(times.values())), burst_ms)
    rates = {
        "cublas_tflops": CUBLAS_FLOPS / burst_ms / 1e9,
        "cublas_sustained_tflops": CUBLAS_FLOPS / sustained_ms / 1e9,
    }
    return {name: _Measured(timing=timing, cublas=rates) for name, timing in timings.items()}


class _Calls:
    """What is called of one implementation; ``index`` counts up and picks the set of tensors."""

    def __init__(self, case: Case, built: _Built) -> None:
        self.built = built
        self._case, self._sets = case, len(case.copies)

    def forward(self, index: int) -> None:
        """Forward, with or without keeping what backward needs."""
        with torch.set_grad_enabled(self.built.saves):
            self.built.layer.forward(index % self._sets)

    def clear(self, index: int) -> None:
        """Drop the set's gradients."""
        self.built.layer.clear_gradients(index % self._sets)

    def clear_all(self) -> None:
        """Drop all gradients."""
        for index in range(self._sets):
            self.clear(index)

    def forward_backward(self, index: int) -> None:
        """Forward and backward."""
        self.built.layer.forward(index % self._sets).backward(self._case.copies[index % self._sets].dy)

    def both(self, index: int) -> None:
        """The same, for new gradients."""
        self.clear(index)
        self.forward_backward(index)

    def schedule(self, index: int) -> object:
        """What comes before any data moves."""
        return self.built.layer.schedule(index % self._sets)

    def memory(self, meter: Meter, call: Call) -> Result:
        """Peak of a call as if the implementation and one set of tensors were alone."""
        self.clear_all()
        others = meter.allocated_bytes() - self.built.held_bytes
        peak = meter.peak_bytes(lambda index: call(0)) - others
        peak += self._case.copies[0].bytes + self.built.layer.uncounted_bytes()
        return {"peak_bytes": int(peak), "workspace_bytes": self.built.layer.workspace_bytes()}


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


def _fractions(measured: Result) -> Result:
    """With the useful rate as fractions of cuBLAS's."""
    return measured | {
        "fraction": measured["tflops"] / measured["cublas_tflops"],
        "fraction_sustained": measured["tflops"] / measured["cublas_sustained_tflops"],
    }


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
