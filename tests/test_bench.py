"""The layer benchmark without a GPU: its shapes, routings, checks and bookkeeping; the clocks are made up."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mok_megatron.config import Activation, MoeShape
from mok_megatron.simulator import load_measurements
from scripts import bench_layer
from scripts.bench import report, runner
from scripts.bench.implementations import Direction, Implementation, registry, select
from scripts.bench.inputs import Case, Ranks, make_case
from scripts.bench.reference import WrongResultError, check, compute_reference
from scripts.bench.routing import ROUTINGS, route
from scripts.bench.runner import Options, Result, measure_case
from scripts.bench.shapes import BAR_SHAPES, named_shapes
from scripts.bench.timing import CUBLAS_FLOPS, Call, Cublas, Timing, summarise
from scripts.bench.torch_eager import EagerLayer
from tests.distributed import run_ranks

CPU = torch.device("cpu")
ALONE = Ranks(rank=0, world=1, device=CPU)
BOTH = Options(directions=frozenset({"forward", "backward"}))
TINY = MoeShape(hidden=128, intermediate=64, num_experts=8, top_k=2)


def tiny_case(routing: str = "uniform", ranks: Ranks = ALONE, shape: MoeShape = TINY) -> Case:
    return make_case("tiny", dataclasses.replace(shape, ep_size=ranks.world), ranks, tokens=96, routing=routing)


class FakeMeter:
    """Says that forward takes 2 ms, with backward 5, a schedule 0.1, and counts what is called."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.turns: list[list[str]] = []

    def time(self, call: Call, iterations: int | None = None) -> Timing:
        self.calls.append(call)
        call(0), call(1)
        ms = {"forward": 2.0, "both": 5.0, "product": CUBLAS_FLOPS / 800e9}.get(getattr(call, "__name__", ""), 0.1)
        return Timing(ms=ms, low_ms=ms, high_ms=ms, iterations=iterations or 20)

    def time_in_turn(self, calls: Mapping[str, Call], iterations: int | None = None) -> dict[str, Timing]:
        self.turns.append(list(calls))
        return {name: self.time(call, iterations) for name, call in calls.items()}

    def host_us(self, call: Call, prepare: Call | None = None) -> float:
        if prepare is not None:
            prepare(0)
        call(0)
        return {"forward": 50.0, "forward_backward": 130.0}[getattr(call, "__name__", "")]

    def launches(self, call: Call) -> int | None:
        return 4

    def peak_bytes(self, call: Call) -> int:
        return 1000

    def allocated_bytes(self) -> int:
        return 400


class FakeCublas(Cublas):
    """800 TFLOP/s in bursts, 700 sustained; remembers how long it was to sustain."""

    def __init__(self) -> None:
        self.durations: list[float] = []

    def product(self, index: int) -> Tensor:
        return torch.empty(0)

    def sustained_ms(self, duration_ms: float, burst_ms: float) -> float:
        self.durations.append(duration_ms)
        return CUBLAS_FLOPS / 700e9


def measure(case: Case, entries: list[Implementation], options: Options = BOTH) -> list[Result]:
    return measure_case(case, entries, FakeMeter(), FakeCublas(), options)


def test_named_shapes() -> None:
    shapes = {
        name: (s.hidden, s.intermediate, s.experts_per_rank, s.top_k, s.model_experts)
        for name, s in named_shapes().items()
    }
    assert shapes == {
        "deepseek-v3": (7168, 2048, 32, 8, 256),
        "glm-4.5": (5120, 1536, 20, 8, 160),
        "mixtral-8x7b": (4096, 14336, 8, 2, 8),
        "qwen3-30b-a3b": (2048, 768, 128, 8, 128),
        "kimi-k2": (7168, 2048, 48, 8, 384),
        "deepseek-v4-pro": (7168, 3072, 48, 6, 384),
    }
    assert set(BAR_SHAPES) <= set(shapes)
    assert named_shapes()["deepseek-v4-pro"].activation.clamp == 10.0


@pytest.mark.parametrize(
    ("name", "world", "experts"), [("deepseek-v3", 2, 64), ("deepseek-v3", 16, 256), ("mixtral-8x7b", 4, 8)]
)
def test_more_ranks_hold_more_experts_up_to_the_models(name: str, world: int, experts: int) -> None:
    shape = named_shapes()[name].on_ranks(world)
    assert (shape.num_experts, shape.ep_size) == (experts, world)


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_experts=8 is not divisible by the expert-parallel size 3"):
        named_shapes()["mixtral-8x7b"].on_ranks(3)


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "all-remote"])
def test_every_token_has_k_different_experts_and_weights_that_sum_to_one(name: str) -> None:
    experts, weights = route(name, TINY, 500, 0, torch.Generator().manual_seed(1))
    assert experts.shape == weights.shape == (500, 2)
    assert (experts[:, 0] != experts[:, 1]).all() and experts.min() >= 0 and experts.max() < 8
    torch.testing.assert_close(weights.sum(1), torch.ones(500))
    again, _ = route(name, TINY, 500, 0, torch.Generator().manual_seed(1))
    assert torch.equal(experts, again)


def _counts(name: str, shape: MoeShape, rank: int = 0) -> Tensor:
    experts, _ = route(name, shape, 4000, rank, torch.Generator().manual_seed(2 + rank))
    return torch.bincount(experts.flatten(), minlength=shape.num_experts)


def test_uniform_is_even() -> None:
    assert _counts("uniform", TINY).float().div(1000).sub(1).abs().max() < 0.1


def test_zipf_follows_the_law_and_is_the_same_on_all_ranks() -> None:
    one = dataclasses.replace(TINY, top_k=1, ep_size=2)
    law = 1 / torch.arange(1, 9).float()
    counts = _counts("zipf", one)
    assert counts.sort(descending=True).values.div(4000).sub(law / law.sum()).abs().max() < 0.03
    assert int(counts.argmax()) == int(_counts("zipf", one, rank=1).argmax())


def test_single_hot_sends_every_token_to_expert_0() -> None:
    counts = _counts("single-hot", TINY)
    assert counts[0] == 4000 and counts[1:].max() < 700


def test_all_remote_avoids_the_own_rank() -> None:
    two = dataclasses.replace(TINY, ep_size=2)
    assert _counts("all-remote", two, rank=0)[:4].sum() == 0
    assert _counts("all-remote", two, rank=1)[4:].sum() == 0
    with pytest.raises(ValueError, match=r"all-remote needs top_k=2 experts on other ranks.* 0 are remote"):
        route("all-remote", TINY, 4, 0, torch.Generator())


def test_unknown_routing_and_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown routing 'even'; known are uniform"):
        route("even", TINY, 4, 0, torch.Generator())
    with pytest.raises(ValueError, match="tokens must be >= 1, got 0"):
        make_case("tiny", TINY, ALONE, tokens=0, routing="uniform")


def test_a_case_says_how_uneven_it_is() -> None:
    assert tiny_case().load == 1.0
    case = tiny_case("single-hot")
    assert case.rows == 8 * 128 and case.ring_rows() is None
    assert case.ring_rows(0.25) == 256 and case.ring_rows(0.26) == 384 and case.ring_rows(1.0) == case.rows
    assert len(case.copies) == 2 and torch.equal(case.copies[0].w1, case.copies[1].w1)
    assert case.copies[0].w1.data_ptr() != case.copies[1].w1.data_ptr()
    assert float(case.copies[0].x.float().std()) == pytest.approx(1, rel=0.1)


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


def test_median_and_quartiles() -> None:
    assert summarise([3.0, 1.0, 2.0, 100.0, 2.5]) == Timing(ms=2.5, low_ms=2.0, high_ms=3.0, iterations=5)
    assert summarise([4.0]) == Timing(ms=4.0, low_ms=4.0, high_ms=4.0, iterations=1)


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
    cublas.product = product  # type: ignore[method-assign]
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
