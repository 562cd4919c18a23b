"""How much of a training step Megatron's MoE layers take: marks around them, on the GPU's clock and in a profile.

A MoE layer here is the whole module: router, shared expert, dispatch, experts, combine. Whatever its dispatcher, its
forward begins and ends with a mark, and so does its backward; the marks change no value.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PARTS = ("forward", "backward")
_PREFIX = "moe "


class MoeMarks:
    """Wraps every MoE layer of this process; call ``install`` before the model is built.

    ``timing`` and ``naming`` switch on, for the steps that follow, CUDA events at the marks and names in a profile.
    """

    def __init__(self) -> None:
        self.timing = False
        self.naming = False
        self._events: list[tuple[str, bool, torch.cuda.Event]] = []

    def install(self) -> None:
        """Wrap ``MoELayer.forward``, which all dispatchers share."""
        from megatron.core.transformer.moe.moe_layer import MoELayer

        forward = MoELayer.forward

        @functools.wraps(forward)
        def marked(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            entered = _Mark.apply(hidden_states, self, ("forward", True), ("backward", False))
            output, bias = forward(layer, entered, *args, **kwargs)
            return _Mark.apply(output, self, ("forward", False), ("backward", True)), bias

        MoELayer.forward = marked

    def mark(self, part: str, begins: bool) -> None:
        """A part of a layer begins or ends on the current stream."""
        if self.timing:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((part, begins, event))
        if self.naming:
            with torch.profiler.record_function(_PREFIX + part + (" begins" if begins else " ends")):
                pass

    def take_ms(self) -> dict[str, float]:
        """Milliseconds between the marks since the last call, summed over layers, by part; waits for the GPU."""
        torch.cuda.synchronize()
        total = dict.fromkeys(PARTS, 0.0)
        started: torch.cuda.Event | None = None
        for part, begins, event in self._events:
            if begins:
                started = event
            elif started is not None:
                total[part] += started.elapsed_time(event)
                started = None
        self._events.clear()
        return total


class _Mark(torch.autograd.Function):
    """Identity whose forward and backward each leave a mark."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: MoeMarks, there: tuple[str, bool], back: tuple[str, bool]) -> Tensor:
        ctx.marks, ctx.back = marks, back
        marks.mark(*there)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.marks.mark(*ctx.back)
        return grad, None, None, None


def read_trace(path: Path, steps: int) -> dict[str, Any]:
    """What a Chrome trace of torch's profiler over ``steps`` steps says; see ``summarize``."""
    return summarize(json.loads(path.read_text(encoding="utf-8"))["traceEvents"], steps)


def summarize(events: Iterable[dict[str, Any]], steps: int, longest: int = 25) -> dict[str, Any]:
    """GPU time per step, in ms, of a profile with marks.

    A kernel, copy or fill belongs to a MoE layer when the host launched it between two of its marks (one thread at a
    time launches: the main one waits while backward runs in its own). Result: ``busy_ms`` of everything,
    ``moe_busy_ms`` by part, ``launches`` and ``moe_launches``, and ``kernels``: the ``longest`` ones as
    [name, ms, launches]. Raises ValueError where the marks do not alternate.
    """
    launched_at: dict[int, float] = {}
    marks: list[tuple[float, str]] = []
    work: list[dict[str, Any]] = []
    for event in events:
        category = event.get("cat")
        if category in ("cuda_runtime", "cuda_driver"):
            launched_at[event["args"].get("correlation", -1)] = event["ts"]
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append(event)
        elif category == "user_annotation" and event["name"].startswith(_PREFIX):
            marks.append((event["ts"], event["name"].removeprefix(_PREFIX)))
    spans = _spans(sorted(marks))
    begins = [begin for begin, _, _ in spans]
    busy, moe_busy, moe_launches = 0.0, dict.fromkeys(PARTS, 0.0), 0
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in work:
        ms = event["dur"] / 1000
        busy += ms
        by_name[event["name"]][0] += ms
        by_name[event["name"]][1] += 1
        at = launched_at.get(event["args"].get("correlation", -2), -1.0)
        nearest = bisect.bisect_right(begins, at) - 1
        if nearest >= 0 and at <= spans[nearest][1]:
            moe_busy[spans[nearest][2]] += ms
            moe_launches += 1
    slowest = sorted(by_name.items(), key=lambda item: -item[1][0])[:longest]
    return {
        "busy_ms": busy / steps,
        "moe_busy_ms": {part: ms / steps for part, ms in moe_busy.items()},
        "launches": len(work) / steps,
        "moe_launches": moe_launches / steps,
        "kernels": [[name[:160], ms / steps, count / steps] for name, (ms, count) in slowest],
    }


def _spans(marks: list[tuple[float, str]]) -> list[tuple[float, float, str]]:
    """(begin, end, part) in the order of the host's time."""
    spans: list[tuple[float, float, str]] = []
    for (begin, first), (end, second) in itertools.zip_longest(marks[::2], marks[1::2], fillvalue=(0.0, "nothing")):
        part = first.removesuffix(" begins")
        if first == part or second != f"{part} ends":
            raise ValueError(f"a profile's marks do not alternate: {first!r} is followed by {second!r}")
        spans.append((begin, end, part))
    return spans
