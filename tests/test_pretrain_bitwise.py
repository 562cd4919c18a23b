"""Whole ``mok`` trainings repeat to the last bit: losses, gradient norms and all weights."""

from __future__ import annotations

import pytest

from tests.pretrain import Pretrain


def test_second_run(pretrain: Pretrain) -> None:
    job = pretrain.job("ep2", "mok")
    assert pretrain.server.run_again(job) == pretrain.run("ep2", "mok")


@pytest.mark.parametrize(
    ("layout", "start_order"), [("ep2", (1, 0)), ("ep2-edp2-overlap", (2, 0, 3, 1))], ids=["ep2", "ep2-edp2-overlap"]
)
def test_ranks_that_start_in_another_order(pretrain: Pretrain, layout: str, start_order: tuple[int, ...]) -> None:
    job = pretrain.job(layout, "mok", start_order=start_order)
    assert pretrain.server.run(job, timeout_s=120) == pretrain.run(layout, "mok")


@pytest.mark.parametrize("how", ["moe", "full"])
def test_recompute(pretrain: Pretrain, how: str) -> None:
    recomputed, plain = pretrain.run(f"ep2-recompute-{how}", "mok"), pretrain.run("ep2-fused-wgrad", "mok")
    assert recomputed == plain
    for ours, theirs in zip(recomputed, plain, strict=True):
        assert ours.counts["module calls"] > theirs.counts["module calls"] > 0, "nothing was recomputed"
