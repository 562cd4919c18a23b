"""Calibration of the performance model, and its error against what was measured."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mok_megatron import cli
from mok_megatron.config import MoeShape
from mok_megatron.floors import DIRECTIONS
from mok_megatron.hardware import gpu
from mok_megatron.simulator import (
    Machine,
    Measurement,
    Policy,
    build_traffic,
    calibrate,
    calibrated_machine,
    load_measurements,
    predict,
    sample_routing,
    simulate,
)

H200 = Machine.from_gpu(gpu("h200"))
BENCHMARKS = Path(__file__).parent.parent / "docs" / "benchmarks"
KERNEL = "8bbf76d"
FILES = sorted(p for p in BENCHMARKS.glob("h200-2026-11-30-*.json") if json.loads(p.read_text())["commit"] == KERNEL)
"""Files of one kernel on one GPU: the constants of the model are of that kernel."""
UNIFORM = [path for path in FILES if "zipf" not in path.name and "single-hot" not in path.name]


@cache
def measured() -> list[tuple[str, Measurement]]:
    """Every training timing of this project on H200: (file, measurement)."""
    return [(path.name, m) for path in FILES for m in load_measurements(path)]


def error(machine: Machine, m: Measurement) -> float:
    return predict(machine, m).total_s * 1e3 / m.ms - 1


def test_what_was_measured_is_read() -> None:
    assert len(UNIFORM) >= 3
    kinds = {(m.routing, m.direction) for _, m in measured()}
    assert kinds == {("uniform", "fwd"), ("uniform", "bwd"), ("zipf", "fwd"), ("single-hot", "fwd")}
    forward = [m.ms for name, m in measured() if "backward" in name and m.direction == "fwd"]
    assert forward == pytest.approx([8.236, 4.500, 8.018, 1.250], abs=2e-3)  # forward+backward minus backward


@pytest.mark.parametrize("path", UNIFORM, ids=lambda path: path.stem)
def test_one_file_predicts_what_all_others_measured_within_ten_percent(path: Path) -> None:
    """Other shapes, other numbers of tokens, other routings, both directions."""
    fitted = calibrate(H200, load_measurements(path))
    for name, m in measured():
        assert abs(error(fitted, m)) < 0.10, f"{path.name} predicts {m} of {name} {error(fitted, m):+.1%} off"


@pytest.mark.parametrize("hidden", sorted({m.shape.hidden for _, m in measured()}))
def test_one_shape_predicts_the_others(hidden: int) -> None:
    """Forward within 10 %; backward only within 15 %: GLM-4.5's is faster than the others' by what is not modelled."""
    known = [m for name, m in measured() if "backward" in name and m.shape.hidden == hidden]
    assert len(known) == 2
    fitted = calibrate(H200, known)
    for name, m in measured():
        limit = 0.10 if m.direction == "fwd" else 0.15
        assert abs(error(fitted, m)) < limit, f"H={hidden} predicts {m} of {name} {error(fitted, m):+.1%} off"


def test_without_calibration_the_error_is_what_the_basis_says() -> None:
    assert "within 15 % of what one GPU was measured to take" in H200.basis
    assert max(abs(error(H200, m)) for _, m in measured()) < 0.15


def synthetic(tmp_path: Path, machine: Machine) -> Path:
    """A benchmark file that the simulator itself wrote."""
    results: list[dict[str, Any]] = []
    for hidden, width, experts in ((7168, 2048, 32), (5120, 1536, 20), (2048, 768, 128)):
        shape = MoeShape(hidden=hidden, intermediate=width, num_experts=experts, top_k=8)
        traffic = build_traffic(shape, sample_routing(shape, 8192, seed=7))
        ms = {d: simulate(machine, Policy(), traffic, d).total_s * 1e3 for d in DIRECTIONS}
        case = {"shape": [hidden, width], "T": 8192, "K": 8, "E": experts, "W": 1, "routing": "uniform"}
        results += [{**case, "direction": direction, "ms": value} for direction, value in ms.items()]
        results += [{**case, "direction": "bwd", "implementation": "mok", "ms": 1.0}]  # not what is modelled
        results += [{**case, "direction": "fwd", "implementation": "eager", "ms": 1.0}]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "commit": "0", "date": "2026-01-01", "results": results}))
    return path


def test_calibration_recovers_a_machine(tmp_path: Path) -> None:
    true = H200.with_(gemm_flops=810e12, backward_share=0.9)
    found = load_measurements(synthetic(tmp_path, true))
    assert len(found) == 6
    fitted = calibrate(H200, found[:2])
    assert fitted.gemm_flops == pytest.approx(true.gemm_flops, rel=0.01)
    assert fitted.backward_share == pytest.approx(true.backward_share, rel=0.01)
    assert "calibrated on 2 forward and backward timing(s)" in fitted.basis
    for m in found[2:]:
        assert predict(fitted, m).total_s * 1e3 == pytest.approx(m.ms, rel=0.02)


def test_long_forwards_show_the_power_limit() -> None:
    path = next(path for path in FILES if "tokens" in path.name)
    fitted = calibrate(H200.with_(sustained=0.6), load_measurements(path))
    assert fitted.sustained == pytest.approx(0.835, abs=0.02)


def test_calibration_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    path.write_text('{"results": [{"direction": "fwd", "ms": "3"}, {"direction": "fwd", "T": 1}]}')
    with pytest.raises(ValueError, match="no usable timing among 2 results"):
        load_measurements(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_measurements(path)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        load_measurements(tmp_path / "none.json")
    shape = MoeShape(hidden=512, intermediate=384, num_experts=4, top_k=2)
    with pytest.raises(ValueError, match="needs a timing with uniform routing; got 1 without"):
        calibrate(H200, [Measurement(shape=shape, tokens=64, direction="fwd", ms=1.0, routing="skewed")])
    path.write_text('{"gpu": "NVIDIA A100", "results": []}')
    with pytest.raises(ValueError, match="measured on gpu 'NVIDIA A100'; known GPUs are h100, h200"):
        calibrated_machine(gpu("h200"), path)


def test_rates_of_another_gpu_are_fractions_of_its_peak() -> None:
    path = next(path for path in FILES if "forward" in path.name)
    hopper, rack = (calibrated_machine(gpu(name), path) for name in ("h200", "gb300"))
    assert hopper.gemm_flops / 989e12 == pytest.approx(rack.gemm_flops / gpu("gb300").bf16_peak_flops)
    assert "calibrated on 2 forward timing(s) of H200 SXM" in rack.basis
    assert "GB300 NVL72 assumed to reach the same fraction of its BF16 peak, error there unknown" in rack.basis


@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_both_verbs_predict_from_a_benchmark_file(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ep", "8", "--tokens", "512"] if verb == "simulate" else ["--nodes", "1"]
    command = [verb, "tiny-deepseek" if verb == "plan" else "qwen3-30b-a3b", "--gpu", "h200", *sizes]
    texts = []
    for more in ([], ["--calibrate", str(next(path for path in FILES if "backward" in path.name))]):
        assert cli.main([*command, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert "not calibrated, within 15 %" in texts[0]
    assert re.search(r"calibrated on 8 forward and backward timing\(s\) of H200 SXM, worst error there [56]", texts[1])
