"""Checkpoints know nothing of the dispatcher: either one goes on from the other's, in this and other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_cpu.job import RankReport
from tests.pretrain import ITERATIONS, Pretrain, assert_same

TOLERANCE = 2e-6
SAVED_AT = 3


@pytest.fixture(scope="module")
def checkpoints(pretrain: Pretrain, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Per dispatcher: the checkpoint of its EP-2 run after iteration SAVED_AT."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("alltoall", "mok")}
    for name, folder in folders.items():
        pretrain.run("ep2", name, f"--save {folder} --save-interval {SAVED_AT} --exit-interval {SAVED_AT}")
    return folders


def _from_iteration(reports: list[RankReport], first: int) -> list[RankReport]:
    """The part of an uninterrupted run that a resumed one repeats; ``first`` counts from 1."""
    return [
        RankReport(losses=report.losses[first - 1 :], grad_norms=report.grad_norms[first - 1 :]) for report in reports
    ]


@pytest.mark.parametrize(("saved_by", "resumed_by"), [("alltoall", "mok"), ("mok", "alltoall"), ("mok", "mok")])
def test_resume(pretrain: Pretrain, checkpoints: dict[str, Path], saved_by: str, resumed_by: str) -> None:
    """With optimizer, scheduler and random state: the run goes on as if it had not been interrupted."""
    resumed = pretrain.run("ep2", resumed_by, f"--load {checkpoints[saved_by]}")
    assert len(resumed[0].losses) == ITERATIONS - SAVED_AT
    assert_same(resumed, _from_iteration(pretrain.run("ep2", "alltoall"), SAVED_AT + 1), TOLERANCE)


def test_resuming_mok_is_bitwise(pretrain: Pretrain, checkpoints: dict[str, Path]) -> None:
    resumed = pretrain.run("ep2", "mok", f"--load {checkpoints['mok']}")
    uninterrupted = pretrain.run("ep2", "mok")
    assert [report.weights for report in resumed] == [report.weights for report in uninterrupted]


@pytest.mark.parametrize("layout", ["ep1", "ep4"])
def test_load_into_another_expert_parallel_size(pretrain: Pretrain, checkpoints: dict[str, Path], layout: str) -> None:
    """The weights of an EP-2 ``mok`` checkpoint give the loss of the uninterrupted run, and both train on alike.

    Megatron reshards the optimizer's state only with the distributed optimizer, so that is left out.
    """
    load = f"--load {checkpoints['mok']} --no-load-optim --no-load-rng"
    mok, alltoall = (pretrain.run(layout, dispatcher, load) for dispatcher in ("mok", "alltoall"))
    assert_same(mok, alltoall, TOLERANCE)
    uninterrupted = pretrain.run("ep2", "alltoall")[0].losses[SAVED_AT]["lm loss"]
    assert mok[0].losses[0]["lm loss"] == pytest.approx(uninterrupted, rel=TOLERANCE)
