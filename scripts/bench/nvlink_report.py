"""Tables and picture of scripts/bench_nvlink.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .report import pyplot, save_picture


def tables(content: Mapping[str, Any]) -> str:
    """Markdown: bandwidth alone, signals, and the forward by its communication SMs."""
    parts = [
        f"{content['gpu']}, driver {content['driver']}, torch {content['torch']}, commit {content['commit'][:12]}; "
        f"{content['shape']}, T={content['T']} per rank, both directions at once",
        _bandwidth(content["bandwidth"]),
        _table(("signal", "us"), [(row["what"], f"{row['us']:.2f}") for row in content["signals"]]),
        _layer(content["layer"]),
    ]
    return "\n\n".join(parts)


def _kinds(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((row["what"], row["warps"]) for row in rows))


def _bandwidth(rows: Sequence[Mapping[str, Any]]) -> str:
    kinds = _kinds(rows)
    by_place = {(row["what"], row["warps"], row["sms"]): f"{row['gb_per_s']:.0f}" for row in rows}
    header = ("SMs", *(f"{what}, {warps} warps per SM, GB/s" for what, warps in kinds))
    sms = list(dict.fromkeys(row["sms"] for row in rows))
    return _table(header, [(str(n), *(by_place.get((*kind, n), "-") for kind in kinds)) for n in sms])


def _layer(rows: Sequence[Mapping[str, Any]]) -> str:
    header = (
        "routing", "comm_sms", "forward ms", "observed ms", "rows here after ms", "pulled GB/s", "first output ms",
        "last output ms", "pushed GB/s",
    )  # fmt: skip
    cells = [
        (
            row["routing"],
            str(row["sms"]),
            *(f"{row[name]:.2f}" for name in ("ms", "observed_ms", "rows_ms")),
            f"{row['pull_gb_per_s']:.0f}",
            *(f"{row[name]:.2f}" for name in ("first_output_ms", "outputs_ms")),
            f"{row['push_gb_per_s']:.0f}",
        )
        for row in rows
    ]
    return _table(header, cells)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(path: Path, content: Mapping[str, Any]) -> bool:
    """GB/s over SMs on the left, the forward over comm_sms on the right; False, said on stderr, without matplotlib."""
    if (plt := pyplot("bench_nvlink", path)) is None:
        return False
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for what, warps in _kinds(content["bandwidth"]):
        rows = [row for row in content["bandwidth"] if (row["what"], row["warps"]) == (what, warps)]
        label = f"{what}, {warps} warps per SM"
        left.plot([row["sms"] for row in rows], [row["gb_per_s"] for row in rows], marker="o", label=label)
    left.set(xlabel="SMs", ylabel="GB/s, one direction of two", title="alone")
    for routing in dict.fromkeys(row["routing"] for row in content["layer"]):
        rows = [row for row in content["layer"] if row["routing"] == routing]
        for name, label, style in (("ms", "forward", "-"), ("rows_ms", "all rows here", ":")):
            right.plot([row["sms"] for row in rows], [row[name] for row in rows], style, marker="o",
                       label=f"{label}, {routing}")  # fmt: skip
    right.set(xlabel="comm_sms", ylabel="ms", title=f"forward of {content['shape']}, T={content['T']}")
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.suptitle(f"NVLink, two {content['gpu']}")
    save_picture(plt, figure, path)
    return True
