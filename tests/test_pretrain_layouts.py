"""Whole trainings with ``mok`` and with ``alltoall``, in every parallel layout: equal losses and gradient norms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.megatron_cpu.job import RankReport
from tests.pretrain import Pretrain, assert_same, worst_difference

FP32_TOLERANCE = 2e-6
"""Sums in another order differ by about 1e-7; in the first steps Adam divides by small numbers, which amplifies it."""

LAYOUTS = [
    "ep2",
    "ep2-fused-wgrad",
    "ep2-recompute-moe",
    "ep2-recompute-full",
    "ep2-mtp",
    "ep1-mtp-repeated",
    "ep2-bias-update",
    "ep2-mlp-chunks",
    "pp2",
    "pp2-vpp2",
    "ep2-pp2",
    "ep2-edp2-overlap",
    "ep2-edp2-overlap-plain-wgrad",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_alltoall_in_fp32(pretrain: Pretrain, layout: str) -> None:
    assert_same(pretrain.run(layout, "mok"), pretrain.run(layout, "alltoall"), FP32_TOLERANCE)


@pytest.mark.parametrize("layout", ["ep2", "ep2-fused-wgrad", "ep2-edp2-overlap"])
def test_equals_alltoall_in_bf16(pretrain: Pretrain, layout: str) -> None:
    """The two differ by no more than bf16 itself costs: ``alltoall`` in bf16 against ``alltoall`` in fp32."""
    alltoall = pretrain.run(layout, "alltoall", "--bf16")
    cost_of_bf16 = worst_difference(alltoall, pretrain.run(layout, "alltoall"))
    assert 0 < cost_of_bf16 < 0.01
    assert_same(pretrain.run(layout, "mok", "--bf16"), alltoall, cost_of_bf16)


def _run_broken(pretrain: Pretrain, layout: str, fault: str) -> list[RankReport]:
    return pretrain.server.run(pretrain.job(layout, "mok", patch=f"tests.pretrain_breaks:{fault}"), timeout_s=120)


def test_control_unfired_pre_hooks_are_noticed(pretrain: Pretrain) -> None:
    """Only with expert data parallelism: without it, nobody else updates this rank's experts."""
    broken = _run_broken(pretrain, "ep2-edp2-overlap", "leave_pre_hooks_unfired")
    assert worst_difference(broken, pretrain.run("ep2-edp2-overlap", "alltoall")) > 100 * FP32_TOLERANCE


def test_control_unset_grad_flag_is_noticed(pretrain: Pretrain) -> None:
    broken = _run_broken(pretrain, "ep2-fused-wgrad", "leave_grad_flag_unset")
    assert worst_difference(broken, pretrain.run("ep2-fused-wgrad", "alltoall")) > 100 * FP32_TOLERANCE


def test_a_value_that_is_no_number_agrees_with_nothing() -> None:
    right = [RankReport(losses=[{"lm loss": 2.0}, {"lm loss": 1.9}], grad_norms=[1.0, 1.0])]
    assert_same(right, right, FP32_TOLERANCE)
    for wrong in (
        [RankReport(losses=[{"lm loss": 2.0}, {"lm loss": float("nan")}], grad_norms=[1.0, 1.0])],
        [RankReport(losses=[{"lm loss": 2.0}, {"lm loss": 1.9}], grad_norms=[float("nan"), 1.0])],
    ):
        for got, expected in ((wrong, right), (right, wrong), (wrong, wrong)):
            with pytest.raises(pytest.fail.Exception, match="relative difference inf"):
                assert_same(got, expected, FP32_TOLERANCE)


def test_the_example_refuses_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    from examples import pretrain_gpt

    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: SimpleNamespace(context_parallel_size=2))
    with pytest.raises(ValueError, match="--context-parallel-size 2: this script does not split sequences"):
        pretrain_gpt.model_provider()
