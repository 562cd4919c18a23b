"""The test helper itself: results by rank, the failing rank's traceback, and an end to hanging ranks."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_ranks


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return rank, total


def _rank_one_fails_or_hangs(rank: int, world_size: int, how: str) -> None:
    if rank == 1 and how == "fail":
        raise ValueError("the reason, with value 42")
    time.sleep(600)


def test_results_come_back_by_rank() -> None:
    results = run_ranks(2, _sum_of_ranks, 10)
    assert [rank for rank, _ in results] == [0, 1]
    assert all(int(total) == 21 for _, total in results)


def test_failure_names_the_rank_and_ends_the_others() -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 failed:(?s:.*)the reason, with value 42"):
        run_ranks(2, _rank_one_fails_or_hangs, "fail", timeout_s=100)
    assert time.monotonic() - started < 60


def test_a_hang_ends_at_the_time_limit() -> None:
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] ended without a result within 8 s"):
        run_ranks(2, _rank_one_fails_or_hangs, "hang", timeout_s=8)
