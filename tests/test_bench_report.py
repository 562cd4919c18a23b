"""What the layer benchmark prints, writes and draws, of made-up results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mok_megatron.simulator import load_measurements
from scripts.bench import report
from scripts.bench.runner import Result
from scripts.bench.shapes import named_shapes


def made_up(**changes: Any) -> Result:
    shape = {"name": "deepseek-v3", "H": 7168, "I": 2048}
    return {
        "implementation": "mok", "shape": shape, "T": 8192, "K": 8, "E": 32, "W": 1, "routing": "uniform", "load": 1.0,
        "direction": "forward", "ms": 8.72, "low_ms": 8.7, "high_ms": 8.8, "iterations": 40, "tflops": 661.9,
        "saves": True, "relative_error": 4e-3, "host_us": 80.0, "launches": 4, "peak_bytes": 7 << 30,
        "workspace_bytes": 3 << 29,
        "schedule_ms": 0.028, "cublas_tflops": 800.0, "cublas_sustained_tflops": 700.0, "fraction": 0.827,
        "fraction_sustained": 0.946,
    } | changes  # fmt: skip


def test_table_compares_within_the_case() -> None:
    results = [
        made_up(implementation="eager", ms=17.44),
        made_up(implementation="eager", ms=99.0, T=1024),
        made_up(),
        {key: made_up()[key] for key in ("shape", "T", "W", "routing")} | {"implementation": "x", "error": "broke"},
    ]
    assert report.ratios(results[2], results) == {"eager": 2.0}
    lines = report.table(results).splitlines()
    columns = [cell.strip() for cell in lines[4].split("|")[1:-1]]
    assert columns == [
        "deepseek-v3", "8192", "1", "uniform", "forward", "mok", "8.720", "662", "0.827", "0.946", "eager 2.00x", "4",
        "80", "28 (0.3%)", "7.00 (1.50)", "4.0e-03",
    ]  # fmt: skip
    assert lines[-1] == "x on deepseek-v3: broke"
    assert "800 TFLOP/s in bursts, 700 sustained" in report.cublas_lines(results)


def test_rings_are_compared_with_the_whole_one() -> None:
    results = [
        made_up(ms=8.0),
        made_up(ms=4.0, T=4096),
        made_up(implementation="mok-ring-0.25", ms=10.0),
        {"implementation": "mok-ring-0.5", "shape": made_up()["shape"], "error": "broke"},
    ]
    assert report.ring_lines(results) == "mok-ring-0.25 on deepseek-v3 T=8192 uniform, forward: 1.25 times mok's time"
    assert report.ring_lines(results[:2]) == ""


def test_the_simulator_reads_the_file_and_only_our_layer(tmp_path: Path) -> None:
    results = [
        made_up(),
        made_up(implementation="eager", ms=17.0),
        made_up(implementation="mok-nograd", ms=8.0),
        made_up(ms=7.9, saves=False),
        made_up(implementation="mok-ring-0.25", ms=10.0),
        made_up(direction="forward+backward", ms=27.0),
        made_up(direction="backward", ms=18.3),
        made_up(direction="backward", implementation="mok-main-grad", ms=19.9),
        {"implementation": "sonicmoe", "shape": made_up()["shape"], "unavailable": "not importable"},
    ]
    path = tmp_path / "out" / "h200.json"
    report.write_json(path, report.document(results, ["scripts/bench_layer.py", "--json", "a b"]))
    content = json.loads(path.read_text(encoding="utf-8"))
    assert set(content) >= {"gpu", "driver", "torch", "commit", "date", "command", "results"}
    assert content["command"] == "scripts/bench_layer.py --json 'a b'" and len(content["results"]) == 9
    measured = load_measurements(path)
    assert [(m.direction, m.ms) for m in measured] == [("fwd", 8.72), ("bwd", 19.9)]
    assert measured[0].shape == named_shapes()["deepseek-v3"].on_ranks(1)


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    results = [made_up(), made_up(implementation="eager", ms=17.0, tflops=330.0), made_up(direction="backward")]
    assert report.draw(tmp_path / "a" / "bench.png", results, "H200")
    assert (tmp_path / "a" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert not report.draw(tmp_path / "none.png", [{"implementation": "mok", "error": "broke"}], "H200")
    assert "nothing was measured" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not report.draw(tmp_path / "none.png", results, "H200")
    assert "matplotlib is not installed" in capsys.readouterr().err
