"""What is printed and written: a table, a JSON file, a picture."""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .ours import RING_PREFIX
from .runner import Result

ROOT = Path(__file__).resolve().parents[2]
BASELINES = ("eager", "megatron-te", "megatron-te-main-grad", "sonicmoe", "liger-cute", "deep-ep")

_COLUMNS = (
    "shape", "T", "W", "routing", "direction", "implementation", "ms", "TFLOP/s", "of cuBLAS", "of sustained",
    "faster than", "launches", "host us", "schedule us", "peak GiB (workspace)", "error",
)  # fmt: skip


def ratios(result: Result, results: Sequence[Result]) -> dict[str, float]:
    """How many times faster ``result`` is than each baseline in the same case and direction."""
    keys = ("shape", "T", "W", "routing", "direction")
    return {
        other["implementation"]: other["ms"] / result["ms"]
        for other in results
        if "ms" in other
        and other["implementation"] in BASELINES
        and other["implementation"] != result["implementation"]
        and all(other[key] == result[key] for key in keys)
    }


def table(results: Sequence[Result]) -> str:
    """The results as a Markdown table, one line each; below it what could not be measured, with the reason."""
    rows = [f"| {' | '.join(_cells(result, results))} |" for result in results if "ms" in result]
    lines = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS), *rows] if rows else []
    missing = [
        f"{r['implementation']} on {r['shape']['name']}: {r.get('error') or r.get('unavailable')}"
        for r in results
        if "ms" not in r
    ]
    return "\n".join([*lines, *(["", "not measured:", *dict.fromkeys(missing)] if missing else [])])


def _cells(result: Result, results: Sequence[Result]) -> list[str]:
    faster = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios(result, results).items())
    schedule = result.get("schedule_ms")
    return [
        result["shape"]["name"],
        str(result["T"]),
        str(result["W"]),
        result["routing"] + (f" (load {result['load']:.2f})" if result["load"] > 1.005 else ""),
        result["direction"],
        result["implementation"],
        f"{result['ms']:.3f}",
        f"{result['tflops']:.0f}",
        f"{result['fraction']:.3f}",
        f"{result['fraction_sustained']:.3f}",
        faster or "-",
        _optional(result.get("launches"), "d"),
        _optional(result.get("host_us"), ".0f"),
        "-" if schedule is None else f"{schedule * 1e3:.0f} ({schedule / result['ms']:.1%})",
        _memory(result),
        f"{result['relative_error']:.1e}",
    ]


def _memory(result: Result) -> str:
    if "peak_bytes" not in result:
        return "-"
    workspace = result.get("workspace_bytes", 0)
    return f"{result['peak_bytes'] / 2**30:.2f}" + (f" ({workspace / 2**30:.2f})" if workspace else "")


def _optional(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def ring_lines(results: Sequence[Result]) -> str:
    """How much longer each call takes with part of the ring than with the whole one, of the same case."""
    lines = []
    for result in results:
        if "ms" not in result or not result["implementation"].startswith(RING_PREFIX):
            continue
        keys = ("shape", "T", "W", "routing", "direction")
        whole = [r for r in results if r["implementation"] == "mok" and all(r.get(key) == result[key] for key in keys)]
        lines += [
            f"{result['implementation']} on {result['shape']['name']} T={result['T']} {result['routing']}, "
            f"{result['direction']}: {result['ms'] / full['ms']:.2f} times mok's time"
            for full in whole
        ]
    return "\n".join(lines)


def cublas_lines(results: Sequence[Result]) -> str:
    """The cuBLAS rates of each case and direction, in bursts and sustained."""
    lines = {
        f"cuBLAS 8192x4096x7168 beside {r['shape']['name']} T={r['T']} {r['routing']} {r['direction']}: "
        f"{r['cublas_tflops']:.0f} TFLOP/s in bursts, {r['cublas_sustained_tflops']:.0f} sustained": None
        for r in results
        if "ms" in r
    }
    return "\n".join(lines)


def document(results: Sequence[Result], command: Sequence[str]) -> dict[str, Any]:
    """What the JSON file holds; ``mok_megatron.simulator.load_measurements`` reads it."""
    gpu, driver, power = _gpu()
    return {
        "gpu": gpu,
        "driver": driver,
        "power_limit": power,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "results": list(results),
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``document``, making folders as needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _output(*command: str) -> str:
    """Standard output of a small program, empty where it is missing or fails."""
    try:
        done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _gpu() -> tuple[str, str, str]:
    """Name, driver and power limit of the first GPU; ``unknown`` where the driver does not say."""
    lines = _output("nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader").splitlines()
    values = [value.strip() for value in lines[0].split(",")] if lines else []
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return (name, values[1], values[2]) if len(values) == 3 else (name, "unknown", "unknown")


def _commit() -> str:
    """The checkout's commit, marked when tracked files differ from it; ``unknown`` without git."""
    commit = _output("git", "rev-parse", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return commit + ("-dirty" if changed else "") if commit else "unknown"


def pyplot(program: str, path: Path) -> Any | None:
    """Matplotlib for pictures in files; None where it is not installed, said of ``path`` on stderr."""
    try:
        import matplotlib
    except ImportError:
        sys.stderr.write(f"{program}: no picture {path}: matplotlib is not installed\n")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_picture(plt: Any, figure: Any, path: Path) -> None:
    """Write the figure, making folders as needed, and forget it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


_TEXT_TFLOPS = 130.0
"""Bars up to this height are too short for their text, which then stands above them."""


def draw(path: Path, results: Sequence[Result], title: str) -> bool:
    """Useful TFLOP/s per case as bars, cuBLAS as lines, a panel per direction; False, said on stderr, if it cannot."""
    timed = [result for result in results if "ms" in result]
    if not timed:
        sys.stderr.write(f"bench_layer: no picture {path}: nothing was measured\n")
        return False
    if (plt := pyplot("bench_layer", path)) is None:
        return False
    directions = list(dict.fromkeys(result["direction"] for result in timed))
    names = list(dict.fromkeys(result["implementation"] for result in timed))
    cases = max(len({_label(r) for r in timed if r["direction"] == direction}) for direction in directions)
    figure, axes = plt.subplots(
        len(directions), 1, figsize=(max(10.0, 1.2 * cases), 4 * len(directions)), squeeze=False, layout="constrained"
    )
    for panel, direction in zip(axes[:, 0], directions, strict=True):
        _panel(panel, [result for result in timed if result["direction"] == direction], names)
        panel.set(ylabel="useful TFLOP/s", title=f"{title}, {direction}")
    known = {
        label: handle for panel in axes[:, 0] for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=6, fontsize="small")
    save_picture(plt, figure, path)
    return True


def _panel(panel: Any, results: Sequence[Result], names: Sequence[str]) -> None:
    labels = list(dict.fromkeys(_label(result) for result in results))
    present = {label: [name for name in names for r in results if (_label(r), r["implementation"]) == (label, name)]
               for label in labels}  # fmt: skip
    width = 0.8 / max(len(there) for there in present.values())
    for number, name in enumerate(names):
        own = [result for result in results if result["implementation"] == name]
        if not own:  # an implementation that has no such direction; its bars are in another panel
            continue
        shifts = [present[label].index(name) - (len(present[label]) - 1) / 2 for label in map(_label, own)]
        places = [labels.index(_label(result)) + shift * width for result, shift in zip(own, shifts, strict=True)]
        bars = panel.bar(places, [result["tflops"] for result in own], width, label=name, color=f"C{number}")
        texts = [f"{result['ms']:.2f} ms" for result in own]
        fits = [result["tflops"] > _TEXT_TFLOPS for result in own]
        inside = [text if fit else "" for text, fit in zip(texts, fits, strict=True)]
        above = ["" if fit else text for text, fit in zip(texts, fits, strict=True)]
        panel.bar_label(bars, inside, fontsize=8, rotation=90, label_type="center", color="white")
        panel.bar_label(bars, above, fontsize=8, rotation=90, padding=2)
    for key, style, label in (
        ("cublas_tflops", "-", "cuBLAS, bursts"),
        ("cublas_sustained_tflops", "--", "cuBLAS, sustained"),
    ):
        rates = {_label(result): result[key] for result in results}
        for place, (name, rate) in enumerate(rates.items()):
            middle = labels.index(name)
            line_label = label if place == 0 else None
            panel.hlines(rate, middle - 0.45, middle + 0.45, colors="black", linestyles=style, label=line_label)
    panel.set_xticks(range(len(labels)), labels)
    panel.grid(axis="y", alpha=0.3)


def _label(result: Result) -> str:
    ranks = f"\nEP {result['W']}" if result["W"] > 1 else ""
    routing = "" if result["routing"] == "uniform" else f"\n{result['routing']}"
    return f"{result['shape']['name']}\nT={result['T']}{ranks}{routing}"
