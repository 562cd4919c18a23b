"""The launch script of the long run on one H200, and what records and evaluates such runs, as far as a CPU can tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import real_run
from scripts.moe_marks import MoeMarks, _Mark, read_trace, summarize
from scripts.record_run import Recorder, digest, digest_of_all, recorder_parser, steps_of
from scripts.rounding_noise import add_noise
from tests.distributed import run_ranks
from tests.megatron_versions import ROOT, environment, megatron_versions

SCRIPT = ROOT / "examples" / "deepseek_style_h200.sh"
RUNS = ROOT / "scripts" / "real_run.sh"

_PARSE = """
import contextlib, io, sys, warnings
warnings.simplefilter("ignore")
from types import SimpleNamespace
import torch, mok_megatron
from megatron.core.transformer.moe import moe_utils
from megatron.training import arguments
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)
for name in ("fused_permute", "fused_unpermute", "fused_sort_chunks_by_index"):
    setattr(moe_utils, name, object())
    setattr(moe_utils, name + "_with_probs", object())
with contextlib.redirect_stdout(io.StringIO()):
    args = arguments.validate_args(arguments.parse_args(), {})
    config = arguments.core_transformer_config_from_args(args)
print(config.moe_token_dispatcher_type, config.num_layers, config.moe_layer_freq, args.train_iters, args.seed)
"""


def launch(tmp_path: Path, *arguments: str, script: Path = SCRIPT, **variables: str) -> list[str]:
    """What the script gives to torchrun."""
    stub = tmp_path / "torchrun"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    (tmp_path / "corpus").mkdir(exist_ok=True)
    path = f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        [script, tmp_path / "corpus", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={"PATH": path, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def parsed(arguments: list[str]) -> str:
    """What Megatron makes of its command line."""
    done = subprocess.run(
        [sys.executable, "-c", _PARSE, *arguments],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
        env={**environment(megatron_versions()[-1]), "WORLD_SIZE": "1", "RANK": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[-2]


@pytest.mark.parametrize("dispatcher", ["mok", "alltoall"])
def test_megatron_accepts_the_launch_scripts_flags(tmp_path: Path, dispatcher: str) -> None:
    argv = launch(tmp_path, "--seed", "4321", DISPATCHER=dispatcher, LAYERS="3", STEPS="40")
    assert argv[:4] == ["--standalone", "--nproc-per-node", "1", str(ROOT / "examples" / "pretrain_gpt.py")]
    assert parsed(argv[4:]) == f"{dispatcher} 3 [0, 1, 1] 40 4321"


def test_more_gpus_are_one_expert_parallel_group(tmp_path: Path) -> None:
    argv = launch(tmp_path, GPUS="2")
    assert argv[:3] == ["--standalone", "--nproc-per-node", "2"]
    sizes = {name: argv[argv.index(name) + 1] for name in ("--expert-model-parallel-size", "--global-batch-size")}
    assert sizes == {"--expert-model-parallel-size": "2", "--global-batch-size": "8"}


@pytest.mark.parametrize("script", [SCRIPT, RUNS])
def test_the_scripts_name_what_is_missing(script: Path) -> None:
    done = subprocess.run([script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "usage: " in done.stderr


def test_the_recorded_runs_are_those_that_are_evaluated(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    lines = launch(tmp_path, str(folder), script=RUNS, STEPS="1000")
    runs = {}
    for run in "\n".join(lines).split("real run: ")[1:]:
        name, *argv = run.splitlines()
        recorder = argv[argv.index("scripts/record_run.py") :]
        options = recorder_parser().parse_args(recorder[1:])
        assert (options.report, options.script) == (folder / f"{name}.json", "examples/pretrain_gpt.py")
        runs[name] = options
    assert set(runs) == {"mok", "alltoall", "mok-stopped", "mok-resumed", *real_run.CONTROLS}
    for name, options in runs.items():
        given = options.arguments
        assert given[given.index("--moe-token-dispatcher-type") + 1] == name.split("-")[0]
        assert given[given.index("--train-iters") + 1] == "1000", "the learning rate's schedule depends on it"
    assert [runs[name].noise for name in ("alltoall", "alltoall-noise-1", "alltoall-noise-2")] == [None, 1, 2]
    assert runs["mok"].time == runs["alltoall"].time == range(500, 550)
    assert runs["mok"].profile == runs["alltoall"].profile == range(998, 1001)
    assert runs["mok"].digests - {1000} == runs["mok-stopped"].digests | runs["mok-resumed"].digests == {150, 300}
    ends = {name: runs[name].arguments[-4:] for name in ("mok-stopped", "mok-resumed")}
    assert ends["mok-stopped"] == ["--save-interval", "150", "--exit-interval", "150"]
    assert runs["mok-stopped"].arguments[-6:-4] == ["--save", f"{folder}/checkpoint"]
    assert ends["mok-resumed"] == ["--load", f"{folder}/checkpoint", "--exit-interval", "300"]
    assert runs["alltoall-other-seed"].arguments[-2:] == ["--seed", "4321"]
    for name in ("mok-stopped", "mok-resumed", "alltoall-other-seed"):  # others have nothing that is not tried above
        assert parsed(runs[name].arguments).startswith(name.split("-")[0])

    only = launch(
        tmp_path, str(folder), "mok-again", script=RUNS, STEPS="500", EXTRA="--qk-layernorm\n  --hidden-size 1024"
    )
    assert [line for line in only if line.startswith("real run: ")] == ["real run: mok-again"]
    again = recorder_parser().parse_args(only[only.index("scripts/record_run.py") + 1 :])
    assert again.digests == {500} and again.arguments[-3:] == ["--qk-layernorm", "--hidden-size", "1024"]


def event(category: str, name: str, ts: float, dur: float = 0.0, correlation: int = 0) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": {"correlation": correlation}}


PROFILE = [
    event("cuda_runtime", "cudaLaunchKernel", 1, correlation=1),
    event("user_annotation", "moe forward begins", 2),
    event("cuda_runtime", "cudaLaunchKernel", 3, correlation=2),
    event("user_annotation", "moe forward ends", 4),
    event("cuda_runtime", "cudaMemcpyAsync", 5, correlation=3),
    event("user_annotation", "moe backward begins", 6),
    event("cuda_driver", "cuLaunchKernelEx", 7, correlation=4),
    event("user_annotation", "moe backward ends", 8),
    event("cpu_op", "aten::mm", 7),
    event("kernel", "other", 100, 3000, correlation=1),
    event("kernel", "experts", 200, 5000, correlation=2),
    event("gpu_memcpy", "copy", 300, 1000, correlation=3),
    event("kernel", "experts", 400, 9000, correlation=4),
    {"ph": "M", "name": "process_name"},
]


def test_a_profile_is_split_by_where_the_host_launched() -> None:
    found = summarize(PROFILE, steps=2)
    assert found["busy_ms"] == 9.0
    assert found["moe_busy_ms"] == {"forward": 2.5, "backward": 4.5}
    assert (found["launches"], found["moe_launches"]) == (2.0, 1.0)
    assert found["kernels"][0] == ["experts", 7.0, 1.0]


def test_a_profile_whose_marks_do_not_alternate_is_refused() -> None:
    without_an_end = [item for item in PROFILE if item["name"] != "moe forward ends"]
    with pytest.raises(ValueError, match="'forward begins' is followed by 'backward begins'"):
        summarize(without_an_end, steps=1)
    without_the_last = [item for item in PROFILE if item["name"] != "moe backward ends"]
    with pytest.raises(ValueError, match="'backward begins' is followed by 'nothing'"):
        summarize(without_the_last, steps=1)


def test_marks_change_no_value_and_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    marks, seen = MoeMarks(), []
    monkeypatch.setattr(marks, "mark", lambda part, begins: seen.append((part, begins)))
    x = torch.randn(3, 4, requires_grad=True)
    entered = _Mark.apply(x, marks, ("forward", True), ("backward", False))
    left = _Mark.apply(entered.sin(), marks, ("forward", False), ("backward", True))
    (grad,) = torch.autograd.grad(left.sum(), x)
    assert torch.equal(left, x.sin())
    assert torch.equal(grad, x.cos())
    assert seen == [("forward", True), ("forward", False), ("backward", True), ("backward", False)]


def test_the_reports_folder_is_made_before_anything_runs(tmp_path: Path) -> None:
    Recorder(recorder_parser().parse_args([str(tmp_path / "runs" / "two" / "mok.json"), "script.py"]))
    assert (tmp_path / "runs" / "two").is_dir()


def test_a_run_without_a_step_leaves_an_earlier_report(tmp_path: Path) -> None:
    (tmp_path / "mok.json").write_text("earlier")
    Recorder(recorder_parser().parse_args([str(tmp_path / "mok.json"), "script.py"])).write()
    assert (tmp_path / "mok.json").read_text() == "earlier"


def test_digests_see_bits_names_and_places() -> None:
    def hashed(weight: list[float], name: str = "w") -> str:
        module = torch.nn.Module()
        module.register_parameter(name, torch.nn.Parameter(torch.tensor(weight, dtype=torch.bfloat16)))
        return digest([module])

    assert hashed([1.0, 2.0]) == hashed([1.0, 2.0])
    others = [hashed([2.0, 1.0]), hashed([1.0, 2.015625]), hashed([1.0, 2.0], "v"), hashed([1.0, -2.0]), hashed([1.0])]
    assert len({hashed([1.0, 2.0]), *others}) == 6
    assert hashed([0.0]) != hashed([-0.0])


def _digests(rank: int, world_size: int, weights: list[float]) -> str:
    return digest_of_all([torch.nn.ParameterList([torch.nn.Parameter(torch.tensor([weights[rank]]))])])


def test_digests_cover_all_ranks() -> None:
    found = [run_ranks(2, _digests, weights) for weights in ([1.0, 2.0], [1.0, 3.0], [2.0, 1.0])]
    assert all(first == second for first, second in found) and len({first for first, _ in found}) == 3


def test_noise_is_one_unit_in_output_and_gradient_and_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    moe_layer = pytest.importorskip("megatron.core.transformer.moe.moe_layer")

    class Layer:
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
            return 2 * hidden_states, None

    def run(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(moe_layer, "MoELayer", type("MoELayer", (Layer,), {}))
            add_noise(seed)
            x = torch.ones(1000, dtype=torch.bfloat16, requires_grad=True)
            output, bias = moe_layer.MoELayer().forward(x)
            output.sum().backward()
        assert bias is None and x.grad is not None
        return output.detach().float(), x.grad.float()

    first, again, other = run(1), run(1), run(2)
    for value in first:  # noise where it goes in and where it comes out: 2 units up, 2 down, or none
        assert 0.4 < (value == 2).float().mean() < 0.6
        assert (value / 2 - 1).abs().max() == pytest.approx(2 * 2**-8, rel=0.02)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_ranges_of_steps() -> None:
    assert steps_of("2:4") == range(2, 5)
    for text in ("1:4", "5:4"):
        with pytest.raises(ValueError, match="expected A:B with 1 < A <= B"):
            steps_of(text)


def test_json_of_a_profile_is_read(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": PROFILE}))
    assert read_trace(tmp_path / "trace.json", steps=1)["busy_ms"] == 18.0


def report(
    steps: range, *, scale: float = 1.0, ms: float = 80.0, digests: dict[str, str] | None = None
) -> dict[str, Any]:
    """A run whose loss falls from 5 towards 2, with a profile of its last 3 steps."""
    return {
        "steps": list(steps),
        "losses": {"lm loss": [scale * (2 + 3 / step) for step in steps]},
        "grad_norms": [1.0 / step for step in steps],
        "step_ms": [ms if step < steps[-1] - 2 else 10 * ms for step in steps[1:]],
        "digests": digests or {},
        "parameters": 2_280_000_000,
        "tokens_per_step": 8192,
        "ranks": 1,
        "device": "a GPU",
        "peak_allocated_bytes": 50 * 2**30,
        "device_bytes": 60 * 2**30,
        "moe_ms": {"steps": [110, 119], "forward": ms / 8, "backward": ms / 4},
        "profile": summarize(PROFILE, steps=1),
    }


def test_runs_that_agree_and_runs_that_do_not() -> None:
    whole = report(range(1, 301), digests={"150": "a", "300": "b"})
    stopped = report(range(1, 151), digests={"150": "a"})
    resumed = report(range(151, 301), digests={"300": "b"})
    runs = {
        "mok": whole,
        "alltoall": report(range(1, 301), scale=1.0005),
        "alltoall-noise-1": report(range(1, 301), scale=1.0011),
        "mok-stopped": stopped,
        "mok-resumed": resumed,
    }
    assert [item.holds for item in real_run.verdicts(runs)] == [True] * 4
    assert "weights compared after 300" in real_run.verdicts(runs)[3].numbers

    other_weights = real_run.same_bits("", {**resumed, "digests": {"300": "c"}}, whole)
    assert not other_weights.holds
    assert "weights differ after step 300" in other_weights.numbers
    one_bit = {**resumed, "grad_norms": [*resumed["grad_norms"][:-1], 1.0000001 / 300]}
    assert "first different step 300" in real_run.same_bits("", one_bit, whole).numbers
    assert not real_run.same_bits("", {**resumed, "digests": {}}, whole).holds
    anew = real_run.verdicts({"mok": whole, "mok-stopped": stopped, "mok-resumed": whole})[-1]
    assert not anew.holds and anew.numbers == "begins with step 1, not resumed after 150"


def test_the_controls_say_how_near_the_curve_must_be() -> None:
    def curve(scale: float, steps: range = range(1, 301)) -> dict[str, Any]:
        return report(steps, scale=scale)

    runs = {"mok": curve(1.001), "alltoall": curve(1.0), "alltoall-other-seed": curve(1.0005)}
    assert not real_run.same_curve(runs)[0].holds
    farther = {**runs, "alltoall-noise-2": curve(0.998)}
    near, *controls = real_run.same_curve(farther)
    assert near.holds and near.numbers.startswith("steps 1 to 300: first 10 losses within 1.0e-03")
    assert [item.what.split(" /")[0] for item in controls] == ["alltoall, other seed", "alltoall, noise 2"]
    short = real_run.same_curve({**runs, "alltoall-noise-2": curve(0.998, range(1, 299))})
    assert [item.holds for item in short] == [False, True, False]
    assert short[2].numbers == "298 steps only, not compared"

    rounding_alone = {**farther, "mok": curve(1.003), "alltoall-noise-2": curve(0.99)}
    assert not real_run.same_curve(rounding_alone)[0].holds
    drifted = report(range(1, 301))
    drifted["losses"]["lm loss"][280:] = [1.1 * loss for loss in drifted["losses"]["lm loss"][280:]]
    assert not real_run.same_curve({**farther, "mok": drifted, "alltoall-noise-2": curve(0.998)})[0].holds
    alone = real_run.same_curve({name: runs[name] for name in ("mok", "alltoall")})[0]
    assert not alone.holds and alone.numbers.endswith("; no control of all these steps to compare with")
    apart = real_run.same_curve({**runs, "mok": curve(1.0, range(202, 401))})[0]
    assert not apart.holds and apart.numbers == "99 common steps, at least 100 needed"


@pytest.mark.parametrize("names", [["mok"], ["alltoall"], ["alltoall-other-seed"], ["mok", "alltoall-other-seed"]])
def test_a_loss_that_is_no_number_is_near_nothing(names: list[str]) -> None:
    runs = {
        "mok": report(range(1, 301)),
        "alltoall": report(range(1, 301)),
        "alltoall-other-seed": report(range(1, 301)),
    }
    assert real_run.same_curve(runs)[0].holds
    for name in names:
        runs[name]["losses"]["lm loss"][200] = float("nan")
    assert not real_run.same_curve(runs)[0].holds


def test_speed_leaves_out_warm_up_and_profiled_steps() -> None:
    found = real_run.speed(report(range(1, 201), ms=80.0))
    assert found["median ms per step"] == found["mean ms per step"] == 80.0
    assert found["tokens per second"] == pytest.approx(8192 / 0.08)
    assert found["MoE share of the step %"] == pytest.approx(37.5)
    assert found["profile: MoE share of busy %"] == pytest.approx(100 * 14 / 18)


def test_a_run_that_was_cut_short_has_empty_cells_or_says_so() -> None:
    cut = report(range(1, 201), ms=160.0)
    del cut["moe_ms"], cut["profile"]
    orders: list[tuple[str, str]] = [("mok", "alltoall"), ("alltoall", "mok")]
    for order in orders:
        runs = dict(zip(order, (cut, report(range(1, 201))), strict=True))
        lines = real_run.tables(runs).splitlines()
        assert sum(line.startswith("| MoE share of the step % |") and line.endswith("|  |") for line in lines) == (
            order[0] == "alltoall"
        )
    with pytest.raises(ValueError, match="a report of 60 steps has none behind the 100"):
        real_run.speed(report(range(1, 61)))


def test_the_picture_shows_every_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setattr(plt, "close", lambda figure: None)
    runs = {name: report(range(1, 201)) for name in ("mok", "alltoall", *real_run.CONTROLS)}
    page = tmp_path / "page.md"
    page.write_text("<!-- results -->\n<!-- /results -->\n")
    real_run.write_into(page, runs)
    labels = [line.get_label() for line in plt.gcf().axes[0].lines]
    assert labels == ["alltoall", "mok", *real_run.CONTROLS.values()]
    assert len({(line.get_color(), line.get_linestyle()) for line in plt.gcf().axes[0].lines}) == len(labels)


def test_runs_of_other_lengths_are_drawn_where_they_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    for lengths in ({"mok": 701, "alltoall": 501, "alltoall-other-seed": 301}, {"mok": 201}):
        page.write_text("<!-- results -->\n<!-- /results -->\n")
        page.with_suffix(".png").unlink(missing_ok=True)
        real_run.write_into(page, {name: report(range(1, end)) for name, end in lengths.items()})
        assert page.with_suffix(".png").stat().st_size > 0 and "| median ms per step |" in page.read_text()


def test_results_are_written_into_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    runs = {"mok": report(range(1, 201)), "alltoall": report(range(1, 201), ms=160.0)}
    for _ in range(2):  # writing again replaces
        real_run.write_into(page, runs)
        lines = page.read_text().splitlines()
        assert (lines[0], lines[-1], lines.count("| median ms per step | 80.0 | 160.0 |")) == ("before", "after", 1)
        assert "old" not in lines
    assert (tmp_path / "page.png").stat().st_size > 0
    assert (tmp_path / "page.csv").read_text().startswith("iteration,alltoall loss,")
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the marks"):
        real_run.write_into(page, runs)
