"""Clocks: GPU time by events, host time, launches, memory. Why they are read so: docs/benchmarks/README.md."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .inputs import Ranks

Call = Callable[[int], object]
"""One call of what is timed; the argument counts up and picks the set of tensors."""

WARM_UP_CALLS = 4
TIMED_S = 0.4
LEAST_ITERATIONS, MOST_ITERATIONS = 8, 40
HOST_CALLS = 5
CYCLES_PER_S = 2e9
"""At least the GPU's clock: a sleep of so many cycles takes at least a second."""
SLEEP_S, LONGEST_SLEEP_S = 1.5e-3, 5e-3
"""The pause before a call: one and a half times the host's time for it, within these limits."""

CUBLAS_SHAPE = (8192, 4096, 7168)
"""M, N, K of the product that speed is compared with."""
CUBLAS_FLOPS = 2 * CUBLAS_SHAPE[0] * CUBLAS_SHAPE[1] * CUBLAS_SHAPE[2]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of a call: median over iterations of the slowest rank, and the quartiles around it."""

    ms: float
    low_ms: float
    high_ms: float
    iterations: int


def summarise(times_ms: list[float]) -> Timing:
    """Median and quartiles of at least one time."""
    if len(times_ms) == 1:
        return Timing(ms=times_ms[0], low_ms=times_ms[0], high_ms=times_ms[0], iterations=1)
    low, middle, high = statistics.quantiles(times_ms, n=4, method="inclusive")
    return Timing(ms=middle, low_ms=low, high_ms=high, iterations=len(times_ms))


class Meter(Protocol):
    """What the runner needs of a device."""

    def time(self, call: Call, iterations: int | None = None) -> Timing:
        """Device time of a call; enough iterations for a stable median unless given. Collective."""
        ...

    def time_in_turn(self, calls: Mapping[str, Call], iterations: int | None = None) -> dict[str, Timing]:
        """The same of several calls, one after the other in each iteration, so that all meet the same clocks."""
        ...

    def host_us(self, call: Call, prepare: Call | None = None) -> float:
        """Host time per call, in microseconds, without waiting for the device, nor for ``prepare`` before it."""
        ...

    def launches(self, call: Call) -> int | None:
        """Kernels, copies and fills that one call puts on the device, or None where they cannot be counted."""
        ...

    def peak_bytes(self, call: Call) -> int:
        """Most memory that was allocated while a call ran."""
        ...

    def allocated_bytes(self) -> int:
        """Memory allocated now."""
        ...


class CudaMeter:
    """See ``Meter``. One per process."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._signal = torch.zeros(1, device=ranks.device)

    def time(self, call: Call, iterations: int | None = None) -> Timing:
        """See ``Meter.time``."""
        return self.time_in_turn({"": call}, iterations)[""]

    def time_in_turn(self, calls: Mapping[str, Call], iterations: int | None = None) -> dict[str, Timing]:
        """See ``Meter.time_in_turn``.

        Each call has the device to itself: the GPU sleeps until the host has queued it, and ranks meet after the
        sleep, so that neither host time nor late ranks are counted.
        """
        sleeps, longest_ms = {}, 0.0
        for name, call in calls.items():
            for index in range(WARM_UP_CALLS):
                call(index)
            sleeps[name] = min(max(SLEEP_S, 1.5e-6 * self.host_us(call)), LONGEST_SLEEP_S)
            if iterations is None:
                estimate = statistics.median(self._elapsed(call, index, sleeps[name]) for index in range(3))
                longest_ms = max(longest_ms, self._ranks.largest(estimate))
        if iterations is None:
            iterations = min(max(round(TIMED_S * 1e3 / longest_ms), LEAST_ITERATIONS), MOST_ITERATIONS)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for index in range(iterations):
            for name, call in calls.items():
                times[name].append(self._elapsed(call, index, sleeps[name]))
        return {name: summarise(self._slowest(of_call)) for name, of_call in times.items()}

    def _slowest(self, times_ms: list[float]) -> list[float]:
        times = torch.tensor(times_ms, device=self._ranks.device)
        return [float(ms) for ms in self._ranks.reduce(times, dist.ReduceOp.MAX).tolist()]

    def _elapsed(self, call: Call, index: int, sleep_s: float) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(sleep_s * CYCLES_PER_S))
        if self._ranks.group is not None:
            self._ranks.reduce(self._signal)
        start.record()
        call(index)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def host_us(self, call: Call, prepare: Call | None = None) -> float:
        """See ``Meter.host_us``. A call that waits for the device itself shows that wait."""
        torch.cuda.synchronize()
        times = []
        for index in range(HOST_CALLS):
            if prepare is not None:
                prepare(index)
            begin = time.perf_counter()
            call(index)
            times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        return statistics.median(times) * 1e6

    def launches(self, call: Call) -> int | None:
        """See ``Meter.launches``. Counted by torch's profiler."""
        from torch._C._autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile, supported_activities

        if ProfilerActivity.CUDA not in supported_activities():
            return None
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call(0)
            torch.cuda.synchronize()
        events = profiler.events() or []
        return sum(event.device_type == DeviceType.CUDA for event in events) or None

    def peak_bytes(self, call: Call) -> int:
        """See ``Meter.peak_bytes``."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for index in range(2):
            call(index)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def allocated_bytes(self) -> int:
        """See ``Meter.allocated_bytes``."""
        return torch.cuda.memory_allocated()


class Cublas:
    """The bf16 product that the layer's speed is given as a fraction of."""

    def __init__(self, meter: Meter, device: torch.device) -> None:
        rows, columns, inner = CUBLAS_SHAPE
        self._meter = meter
        self._a, self._b = (torch.randn(size, inner, dtype=torch.bfloat16, device=device) for size in (rows, columns))

    def product(self, index: int) -> Tensor:
        """One product; timed after a pause, it runs as a burst."""
        return self._a @ self._b.T

    def sustained_ms(self, duration_ms: float, burst_ms: float) -> float:
        """Milliseconds per product, back to back for about ``duration_ms``, after the same pause."""
        count = max(1, round(duration_ms / burst_ms))

        def products(index: int) -> None:
            for _ in range(count):
                self.product(index)

        return self._meter.time(products).ms / count
