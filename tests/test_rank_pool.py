"""The processes that the tests on several GPUs run in, here with gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import RankPool

pytestmark = pytest.mark.slow


@pytest.fixture(name="pool", scope="module")
def _pool() -> Iterator[RankPool]:
    pool = RankPool(2, "gloo")
    yield pool
    pool.close()


def _sum(rank: int, world_size: int, start: int) -> tuple[int, int]:
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    return int(total), os.getpid()


def _break(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        if how == "raises":
            raise ValueError("no luck")
        if how == "dies":
            os._exit(9)
        time.sleep(600)
    dist.barrier()


def test_jobs_run_in_the_same_processes(pool: RankPool) -> None:
    first, second = pool.run(_sum, 10), pool.run(_sum, 20)
    assert [value for value, _ in first] == [21, 21] and [value for value, _ in second] == [41, 41]
    assert [pid for _, pid in first] == [pid for _, pid in second]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "(?s)rank 1 failed:.*ValueError: no luck"),
        ("dies", "rank 1 failed:\nit ended with exit code 9"),
        ("hangs", r"ranks \[0, 1\] were not done after 5"),
    ],
)
def test_after_a_failure_there_are_new_processes(pool: RankPool, how: str, message: str) -> None:
    before = pool.run(_sum, 1)
    with pytest.raises(RuntimeError, match=message):
        pool.run(_break, how, timeout_s=5.0)
    after = pool.run(_sum, 1)
    assert not {pid for _, pid in before} & {pid for _, pid in after}


def test_a_clean_end(pool: RankPool) -> None:
    pool.run(_sum, 1)
    assert pool.close() == [0, 0]
