"""The quickstart: its comparison of curves on made-up numbers, and one short run of the whole command."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import curves, quickstart
from scripts.curves import Limits, Point

ROOT = Path(__file__).parents[1]
LIMITS = Limits(first=1e-5, window=1e-2)

LINE = (
    " [2026-01-01 00:00:00.000000] iteration {:8d}/      20 | consumed samples:          152 | elapsed time per"
    " iteration (ms): 507.2 | learning rate: 1.000000E-03 | global batch size:     8 | lm loss: {:.6E} |"
    " load_balancing_loss: 0.000000E+00 | loss scale: 1.0 | grad norm: 1.250 | number of skipped iterations:   0 |\n"
)


def curve(losses: list[float], first: int = 1) -> dict[int, Point]:
    return {first + i: Point(loss=loss, grad_norm=1.0, ms=1.0) for i, loss in enumerate(losses)}


def test_log_lines_are_read_and_the_second_mean_undone() -> None:
    points: dict[int, Point] = {}
    assert curves.add_line(points, "> building train, validation, and test datasets ...\n") is None
    for iteration, logged in ((61, 4.0), (62, 3.75), (63, 3.25)):
        assert curves.add_line(points, LINE.format(iteration, logged)) == iteration
    assert [point.loss for point in points.values()] == [4.0, 3.5, 3.25]
    assert points[61] == Point(loss=4.0, grad_norm=1.25, ms=507.2)


def test_equal_curves_agree() -> None:
    reference = curve([3.0 - i / 100 for i in range(40)])
    resumed = {i: point for i, point in reference.items() if i > 20}
    result = curves.compare("a", resumed, reference, LIMITS)
    assert result.agrees and result.first == result.window == 0 and result.iterations == 20


@pytest.mark.parametrize(
    ("changed", "agrees"),
    [({3: 3.001}, False), ({30: 3.2}, True), (dict.fromkeys(range(25, 40), 3.1), False), ({3: float("nan")}, False)],
    ids=["an early difference", "one late outlier", "a late shift", "NaN"],
)
def test_differences(changed: dict[int, float], agrees: bool) -> None:
    reference = curve([3.0] * 40)
    other = reference | {i: Point(loss=loss, grad_norm=1.0, ms=1.0) for i, loss in changed.items()}
    assert curves.compare("a", other, reference, LIMITS).agrees is agrees


@pytest.mark.parametrize("other", [{}, curve([3.0], first=99)], ids=["empty", "foreign iterations"])
def test_curves_that_cannot_be_compared_are_refused(other: dict[int, Point]) -> None:
    with pytest.raises(ValueError, match="no comparison"):
        curves.compare("a", other, curve([3.0]), LIMITS)


@pytest.mark.parametrize(
    ("gpus", "processes", "layout", "precision"),
    [(0, 2, "ep2", "fp32"), (1, 1, "single", "bf16"), (2, 2, "ep2", "bf16"), (8, 2, "ep2", "bf16")],
)
def test_uses_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, gpus: int, processes: int, layout: str, precision: str
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "some GPU")
    machine = quickstart.find_machine()
    assert (machine.processes, machine.layout, machine.precision) == (processes, layout, precision)
    assert ("tests.megatron_cpu" in machine.module) is (gpus == 0)
    args = quickstart.common_args(machine, Path("text"), 20)
    assert args[args.index("--expert-model-parallel-size") + 1] == str(processes)


@pytest.mark.parametrize(
    "error",
    ["[rank1]: ValueError: top_k=9 exceeds 8", "pretrain_gpt.py: error: invalid choice: 'mok'", "a.b.CError: x"],
)
def test_failure_shows_the_first_error_of_the_log(tmp_path: Path, error: str) -> None:
    log = tmp_path / "mok.log"
    later = ["torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ", "OtherError: later"]
    log.write_text("\n".join(["torchrun", *["noise"] * 50, error, *["noise"] * 50, *later]))
    message = quickstart._failure("mok", 1, log, 3.0)
    assert error in message and str(log) in message and "later" not in message


def _quickstart(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/quickstart.py", "--folder", str(folder), *args]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_whole_command(tmp_path: Path) -> None:
    done = _quickstart(tmp_path, "--iterations", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "quickstart: PASSED" in done.stdout and "DIFFERS" not in done.stdout
    with (tmp_path / "curves.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["iteration"] for row in rows] == ["1", "2", "3", "4"]
    assert rows[0]["resumed with mok loss"] == "" and float(rows[3]["resumed with mok loss"]) > 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "| resumed with mok / alltoall | 2 |" in (tmp_path / "curves.md").read_text()


def test_odd_iterations_are_refused(tmp_path: Path) -> None:
    done = _quickstart(tmp_path, "--iterations", "5")
    assert done.returncode == 2 and "must be even" in done.stderr
