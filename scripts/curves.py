"""Loss curves of the quickstart: read from Megatron's log, compared, written as a picture and as tables."""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_ITERATION = re.compile(
    r"iteration\s+(?P<iteration>\d+)/\s*\d+ \|.*elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \|"
    r".*lm loss: (?P<loss>\S+) \|.*grad norm: (?P<norm>\S+) \|"
)

Curve = Mapping[int, "Point"]
"""Iteration -> what Megatron logged for it."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One logged iteration: mean loss per token in nats, gradient norm before clipping, milliseconds."""

    loss: float
    grad_norm: float
    ms: float


def parse_line(line: str) -> tuple[int, Point] | None:
    """Iteration and values of a line of Megatron's log, None for any other line."""
    match = _ITERATION.search(line)
    if match is None:
        return None
    point = Point(loss=float(match["loss"]), grad_norm=float(match["norm"]), ms=float(match["ms"]))
    return int(match["iteration"]), point


def add_line(points: dict[int, Point], line: str) -> int | None:
    """Add what a log line says to the ``points`` of its run so far; returns its iteration, None for any other line.

    Megatron logs in a run's second line the mean of the run's first two iterations; this undoes that.
    """
    logged = parse_line(line)
    if logged is None:
        return None
    iteration, point = logged
    if len(points) == 1:
        (first,) = points.values()
        point = replace(point, loss=2 * point.loss - first.loss)
    points[iteration] = point
    return iteration


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far two curves may differ: each of the first iterations, and each mean over a window, relative."""

    first: float
    window: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Largest relative differences of the loss between two curves, over the iterations that both have."""

    name: str
    iterations: int
    first: float
    window: float
    limits: Limits

    @property
    def agrees(self) -> bool:
        """Whether both limits hold; a NaN agrees with nothing."""
        return self.first <= self.limits.first and self.window <= self.limits.window


WINDOW = 10
"""Iterations that count as the first ones, and that a window has."""


def compare(name: str, curve: Curve, reference: Curve, limits: Limits) -> Comparison:
    """Compare the losses of the iterations of ``curve`` with those of ``reference``.

    Raises ValueError if ``curve`` has no iterations, or one that ``reference`` lacks.
    """
    iterations = sorted(curve)
    if not iterations or not set(iterations) <= set(reference):
        raise ValueError(
            f"{name}: {len(iterations)} iterations logged, {len(reference)} in the reference: no comparison"
        )
    windows = [iterations[start : start + WINDOW] for start in range(max(len(iterations) - WINDOW, 0) + 1)]
    return Comparison(
        name=name,
        iterations=len(iterations),
        first=max(relative_difference(curve[i].loss, reference[i].loss) for i in iterations[:WINDOW]),
        window=max(
            relative_difference(sum(curve[i].loss for i in window), sum(reference[i].loss for i in window))
            for window in windows
        ),
        limits=limits,
    )


def relative_difference(value: float, reference: float) -> float:
    """``|value - reference| / |reference|``; infinite where either is not finite."""
    difference = abs(value - reference) / abs(reference)
    return difference if math.isfinite(difference) else math.inf


def write_csv(path: Path, curves: Mapping[str, Curve]) -> None:
    """All iterations, one column of losses and one of gradient norms per curve; empty where a curve has none."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["iteration", *(f"{name} {value}" for name in curves for value in ("loss", "grad norm"))])
        for iteration in sorted(set().union(*curves.values())):
            points = [curve.get(iteration) for curve in curves.values()]
            cells = [cell for point in points for cell in ((point.loss, point.grad_norm) if point else ("", ""))]
            table.writerow([iteration, *cells])


def write_markdown(path: Path, curves: Mapping[str, Curve], comparisons: list[Comparison], every: int) -> None:
    """The losses of every ``every``-th iteration and the comparisons, for readers."""
    lines = [f"| iteration | {' | '.join(curves)} |", "|" + "---:|" * (len(curves) + 1)]
    iterations = sorted(set().union(*curves.values()))
    for iteration in [i for i in iterations if i == iterations[0] or i % every == 0]:
        cells = [f"{curve[iteration].loss:.6f}" if iteration in curve else "" for curve in curves.values()]
        lines.append(f"| {iteration} | {' | '.join(cells)} |")
    lines += ["", f"Largest relative differences, of the first {WINDOW} iterations and of means over {WINDOW}:", ""]
    lines.append("| comparison | iterations | first | limit | means | limit |")
    lines.append("|---|---:|---:|---:|---:|---:|")
    for item in comparisons:
        numbers = [f"{value:.1e}" for value in (item.first, item.limits.first, item.window, item.limits.window)]
        lines.append(f"| {item.name} | {item.iterations} | {' | '.join(numbers)} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(path: Path, curves: Mapping[str, Curve], reference: str, title: str) -> None:
    """Losses above, relative differences from the curve ``reference`` below where both have a point, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6.5), height_ratios=(3, 1.4), layout="constrained"
    )
    lines: list[dict[str, Any]] = [{"linewidth": 4, "alpha": 0.35}, {"linewidth": 1.4}]
    lines += [{"linewidth": 1.4, "linestyle": dashes} for dashes in ("--", ":", "-.")]
    for (name, curve), style in zip(curves.items(), itertools.chain(lines, itertools.repeat(lines[1])), strict=False):
        iterations = sorted(curve)
        above.plot(iterations, [curve[i].loss for i in iterations], label=name, **style)
        common = [i for i in iterations if i in curves.get(reference, {})]
        if name != reference and common:
            differences = [relative_difference(curve[i].loss, curves[reference][i].loss) for i in common]
            floor = [max(difference, 1e-8) for difference in differences]  # equal losses have a place on a log axis
            below.semilogy(common, floor, label=name, color=above.lines[-1].get_color(), **style)
    above.set(title=title, ylabel="loss (nats per byte)")
    above.legend()
    below.set(xlabel="iteration", ylabel=f"relative difference\nfrom {reference}")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
