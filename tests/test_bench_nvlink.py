"""The NVLink benchmark, as far as it goes without GPUs: command line, kernels' compilation and interface, report."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mok_megatron.backends.peer_memory import PeerMemory
from scripts import bench_nvlink
from scripts.bench import nvlink, nvlink_report
from scripts.bench.inputs import Ranks
from scripts.bench.shapes import LayerShape
from scripts.bench.timing import Timing
from tests.distributed import run_ranks

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


class FakeKernels:
    """Takes what the kernels take. Everything lasts 2 ms, a forward's stages end after 1, 2, 5 and 6."""

    def __call__(self, name: str, *arguments: Any) -> None:
        assert len(arguments) == len(nvlink._ARGUMENTS[name])
        for argument, kind in zip(arguments, nvlink._ARGUMENTS[name], strict=True):
            assert argument is None or isinstance(argument, (int, torch.Tensor)), (name, argument)
            assert kind is nvlink.c_void_p or isinstance(argument, int), (name, argument)
        if name in ("answer_on_gpu", "answer_peer", "bring"):
            arguments[-1].fill_(2_000_000)
        elif name == "observe":
            arguments[-1][:3] = torch.tensor([1_000_010, 2_000_010, 5_000_010])
        elif name == "stamp":
            arguments[0][0] = 6_000_010 if len(arguments[0]) == 1 else 10


class FakeMeter:
    def __init__(self, ranks: Ranks) -> None:
        pass

    def time(self, call: Callable[[int], object], iterations: int | None = None) -> Timing:
        call(0)
        return Timing(ms=2.0, low_ms=2.0, high_ms=2.0, iterations=1)


class FakeBackend:
    def __init__(self) -> None:
        layout, sizes = SimpleNamespace(fc2_done=64), SimpleNamespace(max_rows=512)
        self.workspace = SimpleNamespace(scratch={"counters": 8, "epoch": 16}, base=4096, layout=layout, sizes=sizes)

    def reserve(self, max_tokens: int) -> None:
        pass

    def build_schedule(self, x: torch.Tensor, *_: Any, layer: int) -> SimpleNamespace:
        return SimpleNamespace(expert_first_row=torch.tensor([0, 128, 256], dtype=torch.int32))

    def forward(self, x: torch.Tensor, *_: Any, save: bool, layer: int) -> tuple[torch.Tensor, None]:
        return x, None

    def close(self) -> None:
        pass


def _two_ranks(rank: int, world: int) -> dict[str, Any]:
    def allocate(size: int, group: Any, device: torch.device) -> PeerMemory:
        return PeerMemory(torch.zeros(size, dtype=torch.uint8), [1 << 20, 2 << 20], None)

    for name in ("synchronize", "empty_cache", "Stream", "_sleep"):
        setattr(torch.cuda, name, lambda *_: None)
    torch.cuda.stream = nullcontext  # type: ignore[assignment]
    bench_nvlink.Kernels, bench_nvlink.CudaMeter = FakeKernels, FakeMeter  # type: ignore[assignment, misc]
    bench_nvlink.peer_memory.allocate = allocate
    bench_nvlink.CudaBackend.create = lambda *_: FakeBackend()  # type: ignore[assignment, method-assign]
    bench_nvlink.named_shapes = lambda: {"tiny": LayerShape(
        name="tiny", hidden=64, intermediate=64, experts_per_rank=4, model_experts=8, top_k=2
    )}  # fmt: skip
    options = bench_nvlink.parse(["--tokens", "96", "--comm-sms", "4", "132"])
    options.shape = "tiny"
    ranks = Ranks(rank=rank, world=world, device=torch.device("cpu"), group=dist.group.WORLD)
    parts = []
    for found in bench_nvlink.run(options, ranks):
        parts.append(bench_nvlink.document(found, options, []))
        parts[-1]["lists"] = [name for name in ("bandwidth", "signals", "layer") if name in found]
    assert [part["lists"] for part in parts[:3]] == [
        ["bandwidth"], ["bandwidth", "signals"], ["bandwidth", "signals", "layer"]
    ]  # fmt: skip
    return parts[-1]


def test_all_measurements_on_two_ranks() -> None:
    for content in run_ranks(2, _two_ranks):
        kinds = [("pull", 2), ("pull", 32), ("push", 8)]
        assert [(r["what"], r["warps"], r["sms"]) for r in content["bandwidth"]] == [
            (*k, n) for n in (4, 132) for k in kinds
        ]
        assert content["bandwidth"][0]["gb_per_s"] == pytest.approx(192 * 128 / 2 / 1e6)
        assert [row["us"] for row in content["signals"]] == [1.0, 2.0, 1.0, -1.0, 1.0, 1.0]
        layer = content["layer"]
        assert [(row["routing"], row["sms"]) for row in layer] == [
            ("uniform", 4), ("uniform", 132), ("all-remote", 4), ("all-remote", 132)
        ]  # fmt: skip
        assert layer[2]["pulled_bytes"] == 96 * 128 and layer[2]["pushed_bytes"] == 192 * 128
        assert layer[2]["pull_gb_per_s"] == pytest.approx(96 * 128 / 1.0 / 1e6)
        assert layer[2]["push_gb_per_s"] == pytest.approx(192 * 128 / 3.0 / 1e6)
        assert layer[2]["observed_ms"] == 6.0
        assert "| all-remote | 132 | 2.00 | 6.00 | 1.00 |" in nvlink_report.tables(content)


@pytest.mark.slow
def test_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if nvlink.find_nvcc() is None:
        pytest.skip("there is no nvcc")
    monkeypatch.setenv("MOK_MEGATRON_CACHE", str(tmp_path))
    library = nvlink.compile_kernels()
    assert library.exists() and nvlink.compile_kernels() == library and list(tmp_path.iterdir()) == [library]
    if torch.cuda.device_count() == 0:
        nvlink.Kernels()
