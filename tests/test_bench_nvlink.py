"""The NVLink benchmark, as far as it goes without GPUs: command line, kernels' compilation and interface, report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import bench_nvlink
from scripts.bench import nvlink, nvlink_report

CONTENT: dict[str, Any] = {
    "gpu": "H200", "driver": "1", "torch": "2", "commit": "abc", "shape": "deepseek-v3", "T": 8192,
    "bandwidth": [
        {"what": "pull", "warps": 2, "sms": 2, "gb_per_s": 9.6},
        {"what": "push", "warps": 8, "sms": 2, "gb_per_s": 40.2},
        {"what": "pull", "warps": 2, "sms": 132, "gb_per_s": 330.0},
    ],
    "signals": [{"what": "to the peer, which polls a counter here", "us": 1.347}],
    "layer": [
        {"routing": "all-remote", "sms": 8, "ms": 9.5, "observed_ms": 9.7, "rows_ms": 2.25, "first_output_ms": 1.0,
         "outputs_ms": 9.0, "pull_gb_per_s": 52.2, "push_gb_per_s": 117.0},
    ],
}  # fmt: skip


def test_tables() -> None:
    text = nvlink_report.tables(CONTENT)
    assert "| SMs | pull, 2 warps per SM, GB/s | push, 8 warps per SM, GB/s |" in text
    assert "| 2 | 10 | 40 |" in text and "| 132 | 330 | - |" in text
    assert "| to the peer, which polls a counter here | 1.35 |" in text
    assert "| all-remote | 8 | 9.50 | 9.70 | 2.25 | 52 | 1.00 | 9.00 | 117 |" in text


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert nvlink_report.draw(tmp_path / "new" / "nvlink.png", CONTENT)
    assert (tmp_path / "new" / "nvlink.png").stat().st_size > 10_000


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = bench_nvlink.parse(["--comm-sms", "4", "8", "--routing", "uniform"])
    assert (options.comm_sms, options.routing, options.tokens) == ([4, 8], ["uniform"], 8192)
    with pytest.raises(SystemExit):
        bench_nvlink.parse(["--comm-sms", "0"])
    assert "must be >= 1" in capsys.readouterr().err


def test_one_rank_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert bench_nvlink.main([]) == 2
    assert "needs 2 ranks and 2 GPUs" in capsys.readouterr().err


def test_arguments_are_those_of_the_source() -> None:
    """Every function with as many arguments as the C source, pointers where it has pointers."""
    source = nvlink.SOURCE.read_text(encoding="utf-8")
    found = dict(re.findall(r'extern "C" int nvlink_(\w+)\(([^)]*)\)', source))
    assert set(found) == set(nvlink._ARGUMENTS)
    for name, text in found.items():
        declared = ["*" in argument for argument in text.split(",")[:-1]]
        assert declared == [argument is nvlink.c_void_p for argument in nvlink._ARGUMENTS[name]], name


@pytest.mark.slow
def test_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if nvlink.find_nvcc() is None:
        pytest.skip("there is no nvcc")
    monkeypatch.setenv("MOK_MEGATRON_CACHE", str(tmp_path))
    library = nvlink.compile_kernels()
    assert library.exists() and nvlink.compile_kernels() == library and list(tmp_path.iterdir()) == [library]
    if torch.cuda.device_count() == 0:
        nvlink.Kernels()
