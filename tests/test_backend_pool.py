"""Workspaces are freed before the process group that they belong to, whoever destroys it."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mok_megatron import backend_pool
from mok_megatron.config import Activation, MoeShape, MokConfig
from tests.distributed import run_ranks

SHAPE = MoeShape(hidden=16, intermediate=8, num_experts=4, top_k=2, activation=Activation())


class _Backend:
    """Closing it needs its group, as freeing memory that peers have mapped does."""

    name = "fake"

    def __init__(self, group: dist.ProcessGroup | None, log: list[str]) -> None:
        self.group, self.log, self.closed = group, log, False

    def close(self) -> None:
        if self.closed:
            return
        ones = torch.ones(1)
        if self.group is not None:
            dist.all_reduce(ones, group=self.group)
        self.log.append(f"closed by {int(ones)}")
        self.closed = True


def _join(group: dist.ProcessGroup | None, log: list[str], shape: MoeShape = SHAPE) -> Any:
    backend_pool.create_backend = lambda *_: _Backend(group, log)  # type: ignore[attr-defined, assignment]
    return backend_pool.shared_backend(shape, MokConfig(), group, torch.device("cpu"), torch.float32)


def _destroy(rank: int, world: int, whose: str) -> tuple[list[str], float]:
    log: list[str] = []
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, other = pairs[rank // 2], dist.new_group(list(range(world)))
    held = [_join(mine, log), _join(other, log), _join(None, log)]
    started = time.monotonic()
    if whose == "one":
        dist.distributed_c10d.destroy_process_group(mine)
        log.append("pair destroyed")
        held.append(_join(mine := dist.new_group([rank]), log))
    elif whose == "keyword":
        dist.destroy_process_group(group=mine)
        log.append("pair destroyed")
    dist.destroy_process_group(dist.group.WORLD if whose == "world" else None)
    return log, time.monotonic() - started


@pytest.mark.parametrize("whose", ["all", "world", "one", "keyword"])
def test_closed_before_the_group_is_destroyed(whose: str) -> None:
    results = run_ranks(4, _destroy, whose, timeout_s=60)
    all_closed = ["closed by 1", "closed by 2", "closed by 4"]
    for log, seconds in results:
        assert seconds < 10
        if whose in ("one", "keyword"):
            assert log[:2] == ["closed by 2", "pair destroyed"], "the others stay"
            assert sorted(log[2:]) == ["closed by 1"] * (2 if whose == "one" else 1) + ["closed by 4"]
        else:
            assert sorted(log) == all_closed


def _patches(rank: int, world: int) -> tuple[bool, bool, int]:
    original, said = dist.destroy_process_group, []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    backend_pool.logger.addHandler(handler)
    backend_pool.logger.setLevel(logging.INFO)
    alone = _join(None, [])
    untouched = dist.destroy_process_group is original
    held = [_join(dist.group.WORLD, [], replace(SHAPE, hidden=hidden)) for hidden in (16, 32)]
    once = dist.destroy_process_group.__wrapped__ is original  # type: ignore[attr-defined]
    del alone, held
    return untouched, once, len([line for line in said if "destroy_process_group" in line])


def test_torch_is_touched_once_and_only_for_a_backend_with_peers() -> None:
    assert run_ranks(2, _patches) == [(True, True, 1)] * 2


def test_one_that_cannot_be_closed_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    monkeypatch.setattr(backend_pool, "create_backend", None)
    broken, fine = _join(None, log), _join(None, log, replace(SHAPE, hidden=32))
    broken.close = lambda: 1 // 0
    backend_pool.close_backends()
    assert log == ["closed by 1"] and fine.closed
    assert "could not be freed" in caplog.text and "ZeroDivisionError" in caplog.text
    backend_pool.close_backends()
    assert log == ["closed by 1"]
