"""Evaluate the long runs on H200: are they what they should be, how fast, how much of a step is MoE?

``real_run.py FOLDER`` reads the reports of scripts/record_run.py in the folder (``mok.json`` and so on) and prints the
verdicts; exit code 1 when one is bad. ``--into docs/benchmarks/real-run-h200.md`` writes the tables between the page's
marks, and picture and numbers beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts import curves

WARM = 100
"""Steps before timing counts: compilation, autotuning, clocks."""

CONTROLS = {
    "alltoall-other-seed": "alltoall, other seed",
    "alltoall-noise-1": "alltoall, noise 1",
    "alltoall-noise-2": "alltoall, noise 2",
}
"""Runs that show how far right runs come apart: other weights and data; rounding noise (scripts/rounding_noise.py)."""

FIRST_LIMIT = 2e-3
"""``mok`` against ``alltoall``, relative, each of the first 10 losses: they differ by the rounding of bf16 alone.

Such a difference grows by the step, and later two right runs go different ways around the same curve
(docs/quickstart.md, "How near is near enough"). So from there on the controls are the limit.
"""

FEWEST_STEPS = 100
"""Of a comparison: fewer say nothing about a curve."""

Report = Mapping[str, Any]


def load(folder: Path) -> dict[str, Report]:
    """Reports by name."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def curve(report: Report) -> dict[int, curves.Point]:
    """Step -> loss, gradient norm and milliseconds (0 for the first step, which nothing times)."""
    values = zip(
        report["steps"], report["losses"]["lm loss"], report["grad_norms"], [0.0, *report["step_ms"]], strict=True
    )
    return {step: curves.Point(loss=loss, grad_norm=norm, ms=ms) for step, loss, norm, ms in values}


def means(points: curves.Curve, width: int) -> dict[int, curves.Point]:
    """Means over each ``width`` steps, under the number of the last; an incomplete rest is left out."""
    steps = sorted(points)
    found = {}
    for first in range(0, len(steps) - width + 1, width):
        window = [points[step] for step in steps[first : first + width]]
        found[steps[first + width - 1]] = curves.Point(
            loss=statistics.fmean(point.loss for point in window),
            grad_norm=statistics.fmean(point.grad_norm for point in window),
            ms=statistics.fmean(point.ms for point in window),
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One statement about the runs, whether it holds, and the numbers behind it."""

    what: str
    holds: bool
    numbers: str


def same_bits(what: str, got: Report, expected: Report) -> Verdict:
    """Losses, gradient norms and digests of the steps that both have are equal. No common digest is a failure."""
    ours, theirs = curve(got), curve(expected)
    steps = sorted(set(ours) & set(theirs))
    key = {
        step: (ours[step].loss, ours[step].grad_norm) == (theirs[step].loss, theirs[step].grad_norm) for step in steps
    }
    different = [step for step in steps if not key[step]]
    digests = sorted(set(got["digests"]) & set(expected["digests"]), key=int)
    bad = [step for step in digests if got["digests"][step] != expected["digests"][step]]
    numbers = f"{len(steps)} steps {steps[0]} to {steps[-1]}" if steps else "no common step"
    numbers += f", first different step {different[0]}" if different else ""
    numbers += (
        f", weights differ after step {bad[0]}" if bad else f", weights compared after {', '.join(digests) or 'none'}"
    )
    return Verdict(what=what, holds=bool(steps and digests) and not different and not bad, numbers=numbers)


def differences(got: curves.Curve, reference: curves.Curve, steps: list[int]) -> dict[str, float]:
    """Largest relative difference of the first 10 losses, and of means over 50 steps; difference of the end's mean."""
    ours, theirs = ({step: points[step] for step in steps} for points in (got, reference))
    wide, other = (means(points, min(50, len(steps))) for points in (ours, theirs))
    last = [statistics.fmean(points[step].loss for step in steps[-100:]) for points in (ours, theirs)]
    return {
        "first": max(curves.relative_difference(ours[step].loss, theirs[step].loss) for step in steps[:10]),
        "window": max(curves.relative_difference(wide[step].loss, other[step].loss) for step in wide),
        "end": curves.relative_difference(*last),
    }


def same_curve(reports: Mapping[str, Report]) -> list[Verdict]:
    """``mok`` is no farther from ``alltoall`` than the farthest control is, over the steps that both of them have.

    Without a control of all these steps that cannot be said, and the verdict is no, as where a loss is not finite.
    The first 10 losses have a limit of their own.
    """
    what = "mok / alltoall: the same loss curve"
    runs = {name: curve(reports[name]) for name in ("mok", *CONTROLS) if name in reports}
    reference = curve(reports["alltoall"])
    steps = sorted(set(runs["mok"]) & set(reference))
    if len(steps) < FEWEST_STEPS:
        return [Verdict(what=what, holds=False, numbers=f"{len(steps)} common steps, at least {FEWEST_STEPS} needed")]
    found = {name: differences(points, reference, steps) for name, points in runs.items() if set(steps) <= set(points)}
    ours = found.pop("mok")
    allowed = {name: max((control[name] for control in found.values()), default=0.0) for name in ("window", "end")}
    finite = all(math.isfinite(value) for distance in (ours, *found.values()) for value in distance.values())
    near = Verdict(
        what=what,
        holds=finite and ours["first"] <= FIRST_LIMIT and all(ours[name] <= limit for name, limit in allowed.items()),
        numbers=_shown(ours, steps) + ("" if found else "; no control of all these steps to compare with"),
    )
    controls = [
        Verdict(
            what=f"{CONTROLS[name]} / alltoall, for comparison",
            holds=name in found,
            numbers=_shown(found[name], steps) if name in found else f"{len(points)} steps only, not compared",
        )
        for name, points in runs.items()
        if name != "mok"
    ]
    return [near, *controls]


def resumed_bits(reports: Mapping[str, Report]) -> Verdict:
    """``mok-resumed`` has the bits of ``mok``, and begins behind the last step of ``mok-stopped``.

    Without a checkpoint Megatron begins anew, and comes to the same bits.
    """
    found = same_bits("mok stopped and resumed, the same bits", reports["mok-resumed"], reports["mok"])
    first, stopped = reports["mok-resumed"]["steps"][0], reports["mok-stopped"]["steps"][-1]
    if first == stopped + 1:
        return found
    return replace(found, holds=False, numbers=f"begins with step {first}, not resumed after {stopped}")


def verdicts(reports: Mapping[str, Report]) -> list[Verdict]:
    """Everything that can be said of the reports that are there."""
    found = same_curve(reports) if {"mok", "alltoall"} <= set(reports) else []
    for name in ("mok-stopped", "mok-again"):
        if {name, "mok"} <= set(reports):
            found.append(same_bits("mok again, the same bits", reports[name], reports["mok"]))
    if {"mok-resumed", "mok-stopped", "mok"} <= set(reports):
        found.append(resumed_bits(reports))
    return found


def _shown(distance: Mapping[str, float], steps: list[int]) -> str:
    return (
        f"steps {steps[0]} to {steps[-1]}: first 10 losses within {distance['first']:.1e}, "
        f"means over 50 steps within {distance['window']:.1e}, mean of the last 100 within {distance['end']:.1e}"
    )


def speed(report: Report) -> dict[str, float]:
    """Milliseconds per step after the warm-up, tokens per second, memory, and the MoE layers' part; see the page.

    Raises ValueError for a report of the warm-up alone.
    """
    points = curve(report)
    profiled = 3 if "profile" in report else 0  # the last steps, slowed down by the profiler
    steps = [step for step in sorted(points)[: -profiled or None] if step > WARM]
    if not steps:
        raise ValueError(f"a report of {len(points)} steps has none behind the {WARM} of the warm-up")
    times = [points[step].ms for step in steps]
    found = {
        "median ms per step": statistics.median(times),
        "mean ms per step": statistics.fmean(times),
        "tokens per second": report["tokens_per_step"] * len(times) / (sum(times) / 1000),
        "peak GiB": report["peak_allocated_bytes"] / 2**30,
        "GiB on the device": report["device_bytes"] / 2**30,
    }
    if "moe_ms" in report:
        first, last = report["moe_ms"]["steps"]
        window = statistics.fmean(points[step].ms for step in range(first, last + 1))
        forward, backward = report["moe_ms"]["forward"], report["moe_ms"]["backward"]
        found |= {
            "MoE forward ms": forward,
            "MoE backward ms": backward,
            "MoE share of the step %": 100 * (forward + backward) / window,
        }
    if profiled:
        profile = report["profile"]
        busy = sum(profile["moe_busy_ms"].values())
        found |= {
            "profile: GPU busy ms": profile["busy_ms"],
            "profile: MoE busy ms": busy,
            "profile: MoE share of busy %": 100 * busy / profile["busy_ms"],
            "profile: launches": profile["launches"],
            "profile: MoE launches": profile["moe_launches"],
        }
    return found


def tables(reports: Mapping[str, Report]) -> str:
    """Markdown: verdicts, then numbers of the timed runs."""
    lines = ["| | | |", "|---|---|---|"]
    lines += [f"| {item.what} | {'yes' if item.holds else 'NO'} | {item.numbers} |" for item in verdicts(reports)]
    numbers = {name: speed(reports[name]) for name in ("mok", "alltoall") if name in reports}
    lines += ["", f"| | {' | '.join(numbers)} |", "|---|" + "---:|" * len(numbers)]
    for row in dict.fromkeys(row for values in numbers.values() for row in values):
        cells = (f"{values[row]:,.1f}" if row in values else "" for values in numbers.values())
        lines.append(f"| {row} | {' | '.join(cells)} |")
    for name in numbers:
        lines += ["", f"The longest kernels of `{name}`, ms and launches per step:", "", "| kernel | ms | launches |"]
        lines.append("|---|---:|---:|")
        kernels = reports[name].get("profile", {}).get("kernels", [])[:10]
        lines += [f"| `{kernel[:70]}` | {ms:.2f} | {count:.0f} |" for kernel, ms, count in kernels]
    return "\n".join(lines)


MARKS = "<!-- results -->", "<!-- /results -->"


def write_into(page: Path, reports: Mapping[str, Report]) -> None:
    """Put the tables between the page's marks, and picture and numbers beside it. Raises ValueError without marks."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise ValueError(f"{page} lacks the marks {MARKS[0]} and {MARKS[1]}")
    picture, numbers = page.with_suffix(".png"), page.with_suffix(".csv")
    links = f"![Loss curves]({picture.name})\n\nEvery step: [{numbers.name}]({numbers.name})."
    content = f"{before}{begin}\n{tables(reports)}\n\n{links}\n{end}{after}"
    named = {"alltoall": "alltoall", "mok": "mok", **CONTROLS}
    shown = {title: curve(reports[name]) for name, title in named.items() if name in reports}
    curves.write_csv(numbers, shown)
    devices = sorted({f"{report['ranks']} x {report['device']}" for report in reports.values()})
    title = f"DeepSeek-style, {next(iter(reports.values()))['parameters'] / 1e9:.2f}e9 parameters, {', '.join(devices)}"
    averaged = {name: means(points, 10) for name, points in shown.items()}
    curves.draw(picture, averaged, "alltoall", f"{title}; means over 10 steps")
    page.write_text(content, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Evaluate the long runs' reports.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--into", type=Path, metavar="PAGE.md")
    options = parser.parse_args()
    reports = {name: report for name, report in load(options.folder).items() if not name.startswith("smoke-")}
    found = verdicts(reports)
    for item in found:
        print(f"{'yes' if item.holds else 'NO ':3}  {item.what}: {item.numbers}")
    for name in ("mok", "alltoall"):
        if name in reports:
            print(f"{name}: " + ", ".join(f"{key} {value:,.1f}" for key, value in speed(reports[name]).items()))
    if options.into is not None:
        write_into(options.into, reports)
    return 0 if found and all(item.holds for item in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
