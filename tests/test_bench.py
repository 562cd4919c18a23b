"""The layer benchmark without a GPU: its checks and bookkeeping; the clocks are made up."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.config import Activation
from scripts import bench_layer
from scripts.bench import report, runner
from scripts.bench.implementations import Direction, Implementation, registry, select
from scripts.bench.inputs import Case, Ranks
from scripts.bench.reference import WrongResultError, check, compute_reference
from scripts.bench.runner import Options, Result, measure_case
from scripts.bench.shapes import BAR_SHAPES
from scripts.bench.timing import Call, Cublas, CudaMeter, Timing, summarise
from scripts.bench.torch_eager import EagerLayer
from tests.bench_case import BOTH, CPU, TINY, FakeCublas, FakeMeter, measure, tiny_case
from tests.distributed import run_ranks


def test_eager_and_our_reference_backend_are_right_and_reported() -> None:
    """The real checks, forward and backward, on real layers."""
    case = tiny_case()
    results = measure(case, [registry()["eager"], registry()["mok-reference"]])
    assert [(r["implementation"], r["direction"]) for r in results] == [
        (name, direction)
        for name in ("eager", "mok-reference")
        for direction in ("forward", "forward+backward", "backward")
    ]
    assert [r["ms"] for r in results[:3]] == [2.0, 5.0, 3.0]
    flops = 6 * 96 * 2 * 128 * 64
    assert [r["tflops"] for r in results[:3]] == pytest.approx([flops / 2e9, 3 * flops / 5e9, 2 * flops / 3e9])
    assert results[0]["fraction"] == pytest.approx(results[0]["tflops"] / 800)
    assert results[0]["fraction_sustained"] == pytest.approx(results[0]["tflops"] / 700)
    assert results[0]["peak_bytes"] == 1000 - 400 + case.copies[0].bytes == results[1]["peak_bytes"]
    assert results[0]["workspace_bytes"] == 0 and "peak_bytes" not in results[2]
    assert [r["host_us"] for r in results[:3]] == [50.0, 130.0, 80.0]
    assert "schedule_ms" not in results[0] and results[3]["schedule_ms"] == 0.1
    assert 0 < results[3]["relative_error"] < 1e-2


def _two_ranks(rank: int, world: int) -> list[Result]:
    ranks = Ranks(rank=rank, world=world, device=CPU, group=dist.group.WORLD)
    entries = [registry()["eager"], registry()["mok-reference"]]
    return [result for name in ("uniform", "all-remote") for result in measure(tiny_case(name, ranks), entries)]


def test_two_ranks_check_the_same_layers() -> None:
    for results in run_ranks(2, _two_ranks):
        assert [result.get("error") for result in results] == [None] * 12
        assert all(result["W"] == 2 and result["relative_error"] < 1e-2 for result in results)


class Broken(EagerLayer):
    """Eager with one flaw."""

    def __init__(self, case: Case, flaw: str) -> None:
        super().__init__(case)
        self._flaw = flaw

    def forward(self, index: int) -> Tensor:
        y = super().forward(index)
        if self._flaw == "raises":
            raise RuntimeError("no kernel for this")
        if self._flaw == "one token":
            y = y * torch.ones(len(y), 1).index_fill(0, torch.tensor([len(y) - 1]), 0.9).to(y.dtype)
        if self._flaw == "nan":
            y = y * float("nan")
        return y if self._flaw != "second set" or index == 0 else y * 1.1

    def gradients(self, index: int, expert: int) -> Any:
        grads = super().gradients(index, expert)
        if not hasattr(grads, self._flaw):
            return grads
        return dataclasses.replace(grads, **{self._flaw: getattr(grads, self._flaw) * 1.1})


def broken(flaw: str) -> Implementation:
    def build(case: Case) -> EagerLayer:
        return Broken(case, flaw)

    return Implementation(name="broken", build=build, unavailable=lambda case: None)


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("one token", "WrongResultError: y differs from the fp32 reference by"),
        ("second set", "WrongResultError: y differs"),
        ("nan", "WrongResultError: y differs from the fp32 reference by nan"),
        ("dx", "WrongResultError: dx differs"),
        ("dprobs", "WrongResultError: dprobs differs"),
        ("dw1", "WrongResultError: dw1 differs"),
        ("dw2", "WrongResultError: dw2 differs"),
        ("raises", "RuntimeError: no kernel for this"),
    ],
)
def test_a_wrong_layer_is_not_timed(flaw: str, message: str) -> None:
    meter = FakeMeter()
    results = measure_case(tiny_case(), [broken(flaw), registry()["eager"]], meter, FakeCublas(), BOTH)
    assert results[0]["error"].startswith(message) and "ms" not in results[0]
    assert len(results) == 4, "the next one is measured all the same"
    assert runner.failures(results, None)[0].startswith("broken on tiny: ")


def test_all_take_turns_with_cublas() -> None:
    """Heat and clock change while a case runs: each iteration has one call of everybody."""
    meter = FakeMeter()
    measure_case(tiny_case(), [registry()["eager"], registry()["mok-reference"]], meter, FakeCublas(), BOTH)
    assert meter.turns == [["cuBLAS", "eager", "mok-reference"]] * 2


def test_a_call_that_fails_when_it_is_timed_does_not_end_the_others() -> None:
    class Failing(EagerLayer):
        calls = 0

        def forward(self, index: int) -> Tensor:
            self.calls += 1
            if self.calls > len(self._case.copies):  # checked once per set
                raise RuntimeError("out of memory")
            return super().forward(index)

    failing = Implementation(name="failing", build=Failing, unavailable=lambda case: None)
    results = measure(tiny_case(), [failing, registry()["eager"]])
    assert results[0]["error"] == "RuntimeError: out of memory" and "ms" not in results[0]
    assert [result["implementation"] for result in results[1:]] == ["eager"] * 3


def test_weight_gradients_are_not_checked_where_only_forward_is_measured() -> None:
    forward = Options(directions=frozenset({"forward"}))
    assert [r["direction"] for r in measure(tiny_case(), [broken("dw1")], forward)] == ["forward"]


def test_an_expert_without_rows_must_have_no_gradient() -> None:
    case = tiny_case()
    empty = dataclasses.replace(case, experts=torch.tensor([[0, 1]]).expand(96, 2).contiguous())
    reference = compute_reference(empty, backward=True)
    assert reference.dw1 is not None and not reference.dw1.any()
    check(EagerLayer(empty), empty, reference, saves=True, backward=True)

    class Garbage(EagerLayer):
        def gradients(self, index: int, expert: int) -> Any:
            grads = super().gradients(index, expert)
            return dataclasses.replace(grads, dw1=grads.dw1 + 1e-6)

    with pytest.raises(WrongResultError, match="dw1 differs from the fp32 reference by inf"):
        check(Garbage(empty), empty, reference, saves=True, backward=True)


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sonicmoe", "liger_cute_kernels", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, module, None)
    entries = registry()
    case = tiny_case()
    assert entries["mok"].unavailable(case) == "the device is cpu, not a GPU"
    for name in ("sonicmoe", "liger-cute", "megatron-te"):
        reason = entries[name].unavailable(case)
        assert reason is not None and reason.startswith("not importable: "), name
    assert entries["deep-ep"].unavailable(case) == "does not run on 1 rank(s)"
    clamped = dataclasses.replace(case, shape=dataclasses.replace(TINY, activation=Activation(clamp=7.0)))
    assert entries["sonicmoe"].unavailable(clamped) == "its SwiGLU has no clamp, the layer's is 7.0"
    results = measure(case, [entries["mok"]])
    assert "unavailable" in results[0] and "mok on tiny: the device is cpu" in report.table(results)
    assert runner.failures(results, None) == []
    assert runner.failures(results, ["mok"]) == ["mok on tiny: the device is cpu, not a GPU"]


def test_selection() -> None:
    entries, both = registry(), BOTH.directions
    forward: frozenset[Direction] = frozenset({"forward"})
    names = [entry.name for entry in select(entries, None, both, saves=True)]
    assert {"eager", "mok", "mok-nograd", "mok-main-grad"} <= set(names) and "mok-reference" not in names
    assert "mok-main-grad" not in [entry.name for entry in select(entries, None, forward, saves=True)]
    assert "mok" not in [entry.name for entry in select(entries, None, forward, saves=False)]
    assert [entry.name for entry in select(entries, ["mok-reference"], both, saves=True)] == ["mok-reference"]
    with pytest.raises(ValueError, match="unknown implementation"):
        select(entries, ["cutlass"], both, saves=True)
    with pytest.raises(ValueError, match="mok-main-grad has no forward, only backward"):
        select(entries, ["mok-main-grad"], forward, saves=True)


def test_clamped_layers_are_checked_with_their_clamp() -> None:
    """Forward only: where bf16 rounds a gate onto the clamp, one side passes a gradient and the other does not."""
    shape = dataclasses.replace(TINY, activation=Activation(clamp=0.5, linear_offset=1.0))
    forward = Options(directions=frozenset({"forward"}))
    results = measure(tiny_case(shape=shape), [registry()["eager"], registry()["mok-reference"]], forward)
    assert [result.get("error") for result in results] == [None] * 2


def test_without_grad_nothing_is_differentiated() -> None:
    meter, seen = FakeMeter(), []

    class Watching(EagerLayer):
        def forward(self, index: int) -> Tensor:
            seen.append(torch.is_grad_enabled())
            return super().forward(index)

    entry = Implementation(name="watching", build=Watching, unavailable=lambda case: None)
    options = Options(directions=frozenset({"forward"}), saves=False)
    results = measure_case(tiny_case(), [entry], meter, FakeCublas(), options)
    assert seen and not any(seen) and results[0]["saves"] is False


def test_median_and_quartiles() -> None:
    assert summarise([3.0, 1.0, 2.0, 100.0, 2.5]) == Timing(ms=2.5, low_ms=2.0, high_ms=3.0, iterations=5)
    assert summarise([4.0]) == Timing(ms=4.0, low_ms=4.0, high_ms=4.0, iterations=1)


def _slowest(rank: int, world: int) -> list[float]:
    return CudaMeter(Ranks(rank=rank, world=world, device=CPU, group=dist.group.WORLD))._slowest(
        [1.0 + rank, 3.0 - rank]
    )


def test_every_call_counts_by_its_slowest_rank() -> None:
    assert run_ranks(2, _slowest) == [[2.0, 3.0], [2.0, 3.0]]


def test_sustained_products_last_as_long_as_the_layer() -> None:
    counted: list[int] = []

    class Meter(FakeMeter):
        def time(self, call: Call, iterations: int | None = None) -> Timing:
            counted.clear()
            call(0)
            return Timing(ms=0.7 * len(counted), low_ms=0, high_ms=0, iterations=1)

    cublas = Cublas.__new__(Cublas)
    cublas._meter = Meter()
    product: Callable[[int], Any] = counted.append
    cublas.product = product  # type: ignore[method-assign, assignment]
    assert cublas.sustained_ms(9.0, 0.6) == pytest.approx(0.7) and len(counted) == 15
    assert cublas.sustained_ms(0.1, 0.6) == pytest.approx(0.7) and len(counted) == 1


def test_command_line() -> None:
    options = bench_layer.parse([])
    assert options.shapes == list(BAR_SHAPES) and options.tokens == [8192] and options.saves
    options = bench_layer.parse(["--tokens", "1024", "2048", "--direction", "both", "--impl", "mok"])
    assert options.tokens == [1024, 2048] and options.impl == ["mok"]
    options = bench_layer.parse(["--impl", "mok", "--ring-fraction", "0.25", "0.5"])
    assert [entry.name for entry in bench_layer.chosen(options)] == ["mok", "mok-ring-0.25", "mok-ring-0.5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "gpt-2"], "invalid choice: 'gpt-2'"),
        (["--tokens", "0"], "must be >= 1, got 0"),
        (["--ring-fraction", "0"], "must be in (0, 1], got 0"),
        (["--ring-fraction", "1.5"], "must be in (0, 1], got 1.5"),
        (["--no-grad", "--direction", "both"], "--no-grad has no backward"),
        (["--no-grad", "--save"], "not allowed with argument"),
    ],
)
def test_bad_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_layer.parse(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_what_one_rank_cannot_do_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_layer.main(["--routing", "uniform", "all-remote"]) == 2
    assert "all-remote needs top_k=8 experts on other ranks" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="says what is missing where there is no GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="rank 0 needs GPU 0, this machine has 0"):
        bench_layer.main(["--shapes", "glm-4.5"])
