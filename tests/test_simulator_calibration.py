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
NEWEST = sorted(BENCHMARKS.glob("h200-2026-12-01-*.json"))
"""Files of the kernels whose constants the model has, on one GPU."""
OLDER = [BENCHMARKS / f"h200-2026-11-30-{name}.json" for name in ("tokens", "zipf", "single-hot")]
"""Forwards of an older kernel: the newest one was measured at no other number of tokens and with no other routing."""
BOTH = BENCHMARKS / "h200-2026-12-01-megatron-te.json"
"""The one file with the backward that adds to ``main_grad``."""


@cache
def measured() -> list[tuple[str, Measurement]]:
    """Every training timing of this project on H200: (file, measurement)."""
    return [(path.name, m) for path in [*NEWEST, *OLDER] for m in load_measurements(path)]


def error(machine: Machine, m: Measurement) -> float:
    return predict(machine, m).total_s * 1e3 / m.ms - 1


def test_what_was_measured_is_read() -> None:
    assert len(NEWEST) >= 4
    kinds = {(m.routing, m.direction) for _, m in measured()}
    assert kinds == {("uniform", "fwd"), ("uniform", "bwd"), ("zipf", "fwd"), ("single-hot", "fwd")}
    backward = [m.ms for m in load_measurements(BOTH) if m.direction == "bwd"]
    assert backward == pytest.approx([18.977, 8.946, 19.337, 3.115], abs=2e-3)


def test_a_forward_that_was_not_timed_is_the_difference(tmp_path: Path) -> None:
    case = {"shape": [512, 384], "T": 64, "K": 2, "E": 4, "implementation": "mok-main-grad"}
    times = {"forward+backward": 3.0, "backward": 2.0}
    results = [{**case, "direction": direction, "ms": ms} for direction, ms in times.items()]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"results": results}))
    assert {m.direction: m.ms for m in load_measurements(path)} == {"fwd": 1.0, "bwd": 2.0}


@pytest.mark.parametrize("path", [*NEWEST, OLDER[0]], ids=lambda path: path.stem)
def test_one_file_predicts_what_all_others_measured_within_ten_percent(path: Path) -> None:
    """Other shapes, other numbers of tokens, other routings, both directions."""
    fitted = calibrate(H200, load_measurements(path))
    for name, m in measured():
        assert abs(error(fitted, m)) < 0.10, f"{path.name} predicts {m} of {name} {error(fitted, m):+.1%} off"


@pytest.mark.parametrize("hidden", sorted({m.shape.hidden for m in load_measurements(BOTH)}))
def test_one_shape_predicts_the_others_within_ten_percent(hidden: int) -> None:
    known = [m for m in load_measurements(BOTH) if m.shape.hidden == hidden]
    assert len(known) == 2
    fitted = calibrate(H200, known)
    for name, m in measured():
        assert abs(error(fitted, m)) < 0.10, f"H={hidden} predicts {m} of {name} {error(fitted, m):+.1%} off"


def test_all_shapes_together_describe_backward_within_five_percent() -> None:
    fitted = calibrate(H200, load_measurements(BOTH))
    for m in load_measurements(BOTH):
        assert m.direction == "fwd" or abs(error(fitted, m)) < 0.05, f"{m}: {error(fitted, m):+.1%}"


def test_without_calibration_the_error_is_what_the_basis_says() -> None:
    assert "within 20 % of what one GPU was measured to take" in H200.basis
    assert max(abs(error(H200, m)) for _, m in measured()) < 0.20


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
    fitted = calibrate(H200.with_(sustained=0.6), load_measurements(OLDER[0]))
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
    hopper, rack = (calibrated_machine(gpu(name), BOTH) for name in ("h200", "gb300"))
    assert hopper.gemm_flops / 989e12 == pytest.approx(rack.gemm_flops / gpu("gb300").bf16_peak_flops)
    assert "calibrated on 8 forward and backward timing(s) of H200 SXM" in rack.basis
    assert "GB300 NVL72 assumed to reach the same fraction of its BF16 peak, error there unknown" in rack.basis


@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_both_verbs_predict_from_a_benchmark_file(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--ep", "8", "--tokens", "512"] if verb == "simulate" else ["--nodes", "1"]
    command = [verb, "tiny-deepseek" if verb == "plan" else "qwen3-30b-a3b", "--gpu", "h200", *sizes]
    texts = []
    for more in ([], ["--calibrate", str(BOTH)]):
        assert cli.main([*command, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert "not calibrated, within 20 %" in texts[0]
    assert re.search(r"calibrated on 8 forward and backward timing\(s\) of H200 SXM, worst error there [78]", texts[1])
