"""A tiny case for tests of the layer benchmark without a GPU; the clocks are made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from mok_megatron.config import MoeShape
from scripts.bench.implementations import Implementation
from scripts.bench.inputs import Case, Ranks, make_case
from scripts.bench.runner import Options, Result, measure_case
from scripts.bench.timing import CUBLAS_FLOPS, Call, Cublas, Timing

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, world=1, device=CPU)
BOTH = Options(directions=frozenset({"forward", "backward"}))
TINY = MoeShape(hidden=128, intermediate=64, num_experts=8, top_k=2)


def tiny_case(routing: str = "uniform", ranks: Ranks = ALONE, shape: MoeShape = TINY) -> Case:
    return make_case("tiny", dataclasses.replace(shape, ep_size=ranks.world), ranks, tokens=96, routing=routing)


class FakeMeter:
    """Says that forward takes 2 ms, with backward 5, a schedule 0.1, and counts what is called."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.turns: list[list[str]] = []

    def time(self, call: Call, iterations: int | None = None) -> Timing:
        self.calls.append(call)
        call(0), call(1)
        ms = {"forward": 2.0, "both": 5.0, "product": CUBLAS_FLOPS / 800e9}.get(getattr(call, "__name__", ""), 0.1)
        return Timing(ms=ms, low_ms=ms, high_ms=ms, iterations=iterations or 20)

    def time_in_turn(self, calls: Mapping[str, Call], iterations: int | None = None) -> dict[str, Timing]:
        self.turns.append(list(calls))
        return {name: self.time(call, iterations) for name, call in calls.items()}

    def host_us(self, call: Call, prepare: Call | None = None) -> float:
        if prepare is not None:
            prepare(0)
        call(0)
        return {"forward": 50.0, "forward_backward": 130.0}[getattr(call, "__name__", "")]

    def launches(self, call: Call) -> int | None:
        return 4

    def peak_bytes(self, call: Call) -> int:
        return 1000

    def allocated_bytes(self) -> int:
        return 400


class FakeCublas(Cublas):
    """800 TFLOP/s in bursts, 700 sustained; remembers how long it was to sustain."""

    def __init__(self) -> None:
        self.durations: list[float] = []

    def product(self, index: int) -> Tensor:
        return torch.empty(0)

    def sustained_ms(self, duration_ms: float, burst_ms: float) -> float:
        self.durations.append(duration_ms)
        return CUBLAS_FLOPS / 700e9


def measure(case: Case, entries: list[Implementation], options: Options = BOTH) -> list[Result]:
    return measure_case(case, entries, FakeMeter(), FakeCublas(), options)
