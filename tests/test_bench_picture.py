"""The benchmark's picture says what its bars are, also where an implementation has no bar in the first panel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.bench import report

pytest.importorskip("matplotlib")


def result(implementation: str, direction: str, tflops: float) -> dict[str, Any]:
    return {
        "implementation": implementation, "direction": direction, "ms": 5772.0 / tflops, "tflops": tflops,
        "shape": {"name": "deepseek-v3"}, "T": 8192, "W": 1, "routing": "uniform",
        "cublas_tflops": 800.0, "cublas_sustained_tflops": 700.0,
    }  # fmt: skip


def test_legend_has_the_colors_of_the_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    results = [
        result("mok", "forward", 650.0),
        result("mok-main-grad", "backward", 600.0),
        result("megatron-te", "forward", 85.0),
        result("megatron-te", "backward", 500.0),
    ]
    assert report.draw(tmp_path / "bench.png", results, "H200")
    figure = drawn[0]
    monkeypatch.undo()
    bars = {
        bar.get_label(): bar.patches[0].get_facecolor()
        for panel in figure.axes
        for bar in panel.containers
        if bar.patches
    }
    (legend,) = figure.legends
    named = {text.get_text(): handle for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)}
    assert {name: named[name].get_facecolor() for name in bars} == bars
    assert set(bars) == {"mok", "mok-main-grad", "megatron-te"} and len(set(bars.values())) == 3
    texts = {text.get_text(): text.get_color() for panel in figure.axes for text in panel.texts}
    assert texts["8.88 ms"] == "white" and texts["67.91 ms"] == "black"  # beside a bar that is too short for it
    plt.close(figure)
