"""What a failing kernel leads to: one message, a non-zero exit. Each case is a process of its own, which ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[1]
EXIT_CODE = 70

PREAMBLE = """
import torch
from mok_megatron.backends.cuda import CudaBackend, cuda_unavailable_reason
from mok_megatron.config import MoeShape, MokConfig
device = torch.device("cuda", 0)
def ranks(world, limit=2.0):
    shape = MoeShape(hidden=64, intermediate=64, num_experts=8, top_k=2, ep_size=world)
    assert cuda_unavailable_reason(device, shape, torch.bfloat16) is None
    return CudaBackend.virtual_ranks(shape, MokConfig(time_limit_s=limit), device, max_tokens=64)
x = torch.randn(64, 64, device=device).bfloat16()
probs = torch.rand(64, 8, device=device)
routing = torch.zeros(64, 8, dtype=torch.bool, device=device)
routing[:, :2] = True
w1 = [torch.randn(128, 64, device=device).bfloat16() for _ in range(8)]
w2 = [torch.randn(64, 64, device=device).bfloat16() for _ in range(8)]
def call(backend, local):
    schedule = backend.build_schedule(x, probs, routing, layer=5)
    return backend.forward(x, schedule, w1[:local], w2[:local], save=True, layer=5)
"""


def _end(body: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + body], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


def test_a_rank_that_never_comes_is_named() -> None:
    code, message = _end("backend = ranks(2)[0]\ncall(backend, 4)\ntorch.cuda.synchronize()\n")
    assert code != 0
    assert (
        "mok_megatron: layer 5, phase opening, rank 0 of the expert-parallel group: waited longer than the time limit "
        "for rank 1 (item 0, wanted 1, seen 0)" in message
    )


def test_the_message_comes_before_nccls_watchdog_ends_the_process() -> None:
    """As in training: a collective waits behind the layer, and fails with it."""
    body = """
import time
import torch.distributed as dist
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
grads = torch.ones(1 << 20, device=device)
dist.all_reduce(grads)
backend = ranks(2)[0]
backend.prepare(w1[:4], w2[:4])
torch.cuda.synchronize()
call(backend, 4)
work = dist.all_reduce(grads, async_op=True)
time.sleep(30)
"""
    code, message = _end(body)
    assert code != 0
    assert "phase opening, rank 0 of the expert-parallel group: waited longer than the time limit" in message


def test_a_late_rank_is_waited_for_within_the_limit() -> None:
    body = """
backends = ranks(2, limit=20.0)
streams = [torch.cuda.Stream() for _ in backends]
for backend in backends:
    backend.prepare(w1[:4], w2[:4])
torch.cuda.synchronize()
with torch.cuda.stream(streams[1]):
    torch.cuda._sleep(3_000_000_000)
for stream, backend in zip(streams, backends):
    with torch.cuda.stream(stream):
        y, _ = call(backend, 4)
torch.cuda.synchronize()
assert bool(torch.isfinite(y).all())
"""
    code, message = _end(body)
    assert code == 0, message


def test_a_row_with_too_many_experts_is_named() -> None:
    code, message = _end("routing[17, 3] = True\nbackend = ranks(1)[0]\ncall(backend, 8)\ntorch.cuda.synchronize()\n")
    assert code != 0
    assert "token 17 is routed to 3 experts, more than top_k=2" in message


def test_the_next_call_raises_when_the_process_still_lives() -> None:
    body = """
import contextlib, os, time
import mok_megatron.backends.failures as failures
failures._GRACE_S = 60.0
backend = ranks(1)[0]
call(backend, 8)
routing[17, 3] = True
with contextlib.suppress(RuntimeError):  # its own later launches may meet the CUDA error
    call(backend, 8)
time.sleep(2)
try:
    call(backend, 8)
except RuntimeError as error:
    assert "token 17 is routed to 3 experts" in str(error), error
    os._exit(7)
"""
    code, message = _end(body)
    assert code == 7, message
