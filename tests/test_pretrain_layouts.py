"""Whole trainings with ``mok`` and with ``alltoall``, in every parallel layout: equal losses and gradient norms."""

from __future__ import annotations

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
