"""Two real ranks, each a process: bits against virtual ranks, and how the processes end.

On two GPUs they meet over NVLink. On one they share it and take turns, which is slow, but the same host code.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.rank_jobs import JOBS, ROUTINGS, routing
from tests.rank_pool import RankPool, group_backend

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]


@pytest.fixture(name="pool", scope="module")
def _pool() -> Iterator[RankPool]:
    pool = RankPool(2, group_backend(2))
    yield pool
    assert pool.close() in ([], [0, 0])


@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(pool: RankPool, name: str) -> None:
    pool.run(routing, name)


@pytest.mark.parametrize("name", JOBS)
def test_job(pool: RankPool, name: str) -> None:
    pool.run(JOBS[name], timeout_s=100.0)


PREAMBLE = """
import os, sys, time
import torch, torch.distributed as dist
from mok_megatron.backend_pool import shared_backend
from mok_megatron.backends.base import WeightGrads
from mok_megatron.config import MoeShape, MokConfig
from tests.rank_pool import group_backend, join_group
rank, folder = int(sys.argv[1]), sys.argv[2]
join_group(rank, 2, group_backend(2), folder + "/rendezvous")
device = torch.device("cuda", torch.cuda.current_device())
x = torch.randn(64, 64, device=device).bfloat16()
probs = torch.rand(64, 8, device=device)
routing = torch.zeros(64, 8, dtype=torch.bool, device=device)
routing[:, 3:5] = True
w1 = [torch.randn(128, 64, device=device).bfloat16() for _ in range(4)]
w2 = [torch.randn(64, 64, device=device).bfloat16() for _ in range(4)]
grads = WeightGrads(w1=[torch.empty_like(w) for w in w1], w2=[torch.empty_like(w) for w in w2], accumulate=False)
def backend_of(limit, group=None):
    shape = MoeShape(hidden=64, intermediate=64, num_experts=8, top_k=2, ep_size=2)
    config = MokConfig(backend="cuda", time_limit_s=limit)
    backend = shared_backend(shape, config, group or dist.group.WORLD, device, torch.bfloat16)
    backend.reserve(64)
    return backend
def forward(backend, layer=5):
    schedule = backend.build_schedule(x, probs, routing, layer=layer)
    return backend.forward(x, schedule, w1, w2, save=True, layer=layer)
def backward(backend, saved, layer=5):
    backend.backward(x, saved, w1, w2, grads, needs_dx=True, dprobs=None, layer=layer)
def step(backend, layer=5):
    backward(backend, forward(backend, layer)[1], layer)
    torch.cuda.synchronize()
"""
LATE = "waited longer than the time limit for rank"
Check = Callable[[list[int], list[str]], None]


def _both_say(first: str, second: str) -> Check:
    def check(codes: list[int], said: list[str]) -> None:
        assert first in said[0] and second in said[1], said
        assert 0 not in codes, codes

    return check


def _clean(codes: list[int], said: list[str]) -> None:
    assert codes == [0, 0], said


SCENARIOS: dict[str, tuple[str, Check]] = {
    "clean exit": ("step(backend_of(60.0))\ndist.destroy_process_group()\n", _clean),
    "exit without a word to the group": ("step(backend_of(60.0))\n", _clean),
    "each rank sees one GPU": ("step(backend_of(60.0))\ndist.destroy_process_group()\n", _clean),
    "a rank dies before its call": (
        "backend = backend_of(4.0)\nstep(backend)\nif rank == 1: os._exit(9)\nstep(backend)\n",
        _both_say(f"layer 5, phase opening, rank 0 of the expert-parallel group: {LATE} 1", ""),
    ),
    "a rank dies between forward and backward": (
        "backend = backend_of(4.0)\n_, saved = forward(backend)\ntorch.cuda.synchronize()\n"
        "if rank == 0: os.kill(os.getpid(), 9)\nbackward(backend, saved)\ntorch.cuda.synchronize()\n",
        _both_say("", f"rank 1 of the expert-parallel group: {LATE} 0"),
    ),
    "an exception on one rank": (
        "backend = backend_of(4.0)\nstep(backend)\nif rank == 1: raise ValueError('the data is bad')\nstep(backend)\n",
        _both_say(f"{LATE} 1", "ValueError: the data is bad"),
    ),
    "a rank is later than the limit": (
        "backend = backend_of(3.0)\nstep(backend)\nif rank == 1: time.sleep(10.0)\nstep(backend)\n",
        _both_say(f"{LATE} 1", "rank 0 failed and said so"),
    ),
    "a rank is late, but within the limit": (
        "backend = backend_of(60.0)\nstep(backend)\nif rank == 1: time.sleep(4.0)\nstep(backend)\n"
        "dist.destroy_process_group()\n",
        _clean,
    ),
    "two groups in another order on each rank": (
        "groups = [dist.new_group([0, 1]) for _ in range(2)]\nbackends = [backend_of(4.0, group) for group in groups]\n"
        "for layer in ((1, 2) if rank == 0 else (2, 1)): step(backends[layer - 1], layer)\n",
        _both_say("rank 0 of the expert-parallel group: ", "rank 1 of the expert-parallel group: "),
    ),
}


@pytest.fixture(name="ends", scope="module")
def _ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], list[str]]]:
    """Exit codes and standard errors of all scenarios, which run at once: most of their time is waiting."""
    running: dict[str, list[subprocess.Popen[str]]] = {}
    for name, (body, _) in SCENARIOS.items():
        folder = tmp_path_factory.mktemp("ranks")
        running[name] = []
        for rank in range(2):
            environment = dict(os.environ)
            script = PREAMBLE + body
            if name == "each rank sees one GPU" and torch.cuda.device_count() > 1:
                environment["CUDA_VISIBLE_DEVICES"] = str(rank)
                script = script.replace("group_backend(2), folder", "'nccl', folder")
            command = [sys.executable, "-c", script, str(rank), str(folder)]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            running[name].append(process)
    found = {}
    for name, processes in running.items():
        said = []
        for process in processes:
            try:
                said.append(process.communicate(timeout=90)[1])
            except subprocess.TimeoutExpired:
                process.kill()
                said.append(f"still there after 90 s; it had said: {process.communicate()[1]}")
        found[name] = ([process.returncode for process in processes], said)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_how_it_ends(ends: dict[str, tuple[list[int], list[str]]], name: str) -> None:
    SCENARIOS[name][1](*ends[name])
