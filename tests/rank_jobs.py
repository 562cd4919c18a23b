"""What the ranks of tests/test_cuda_two_gpus.py do: real ranks against virtual ones on the rank's own GPU.

Each job is ``job(rank, world_size, *args)``, runs on both ranks at once and asserts. ``torchrun --nproc-per-node 2 -m
tests.rank_jobs`` runs all of them without pytest.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from mok_megatron import memory
from mok_megatron.autograd import ExpertParams, apply_experts
from mok_megatron.backend_pool import shared_backend
from mok_megatron.backends.base import WeightGrads
from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.backends.workspace import Workspace
from mok_megatron.config import MoeShape, MokConfig
from tests.layer_run import (
    QUANTITIES,
    assert_errs_at_most_twice_eager,
    assert_same_bits,
    of_rank,
    poisoned_memory,
    relative_error,
)
from tests.real_ranks import TIME_LIMIT_S, RealRank, own_device, share, virtual
from tests.reference_math import Result
from tests.routing_cases import CASES, RoutingCase, all_to
from tests.virtual_ranks import forward_backward, inputs_of

BUSY = RoutingCase(name="busy", tokens=(257, 200), num_experts=16, top_k=4)
ONE_SIDED = RoutingCase(name="one_sided", tokens=(300, 211), num_experts=8, top_k=4, pick=all_to(4, 5, 6, 7))


def routing(rank: int, world_size: int, name: str) -> None:
    """Real and virtual ranks agree in every bit, and with fp64 as eager torch does."""
    case = CASES[name]
    inputs = inputs_of(case)
    with poisoned_memory():
        whole = virtual(case, inputs)
        real = RealRank(case, inputs)
        assert_same_bits(real.call(real.parts(inputs)), share(whole, case.tokens, rank), name)
        real.settle()
        real.close()
    if rank == 0:
        assert_errs_at_most_twice_eager(Result(*(getattr(whole, quantity).cpu() for quantity in QUANTITIES)), inputs)


def options(rank: int, world_size: int) -> None:
    """Whatever the options say, the bits are the same."""
    inputs = inputs_of(BUSY)
    expected = share(virtual(BUSY, inputs), BUSY.tokens, rank)
    choices: tuple[dict[str, Any], ...] = (
        {},
        {"recompute": True},
        {"save_x": False},
        {"comm_sms": 1},
        {"comm_sms": 8},
        {"ring_rows": 256},
        {"ring_rows": 256, "recompute": True},
    )
    for choice in choices:
        real = RealRank(BUSY, inputs, **choice)
        assert_same_bits(real.call(real.parts(inputs)), expected, choice)
        real.settle()
        real.close()


def ring(rank: int, world_size: int) -> None:
    """All rows are rank 1's: it passes them through a ring, rank 0 has none; also both, and with random delays."""
    rng = random.Random(7 + rank)
    for case in (ONE_SIDED, replace(ONE_SIDED, name="other_side", pick=all_to(0, 1, 2, 3)), BUSY):
        inputs = inputs_of(case)
        expected = share(virtual(case, inputs), case.tokens, rank)
        for rows in (128, 384):
            real = RealRank(case, inputs, ring_rows=rows)
            parts = real.parts(inputs)
            assert_same_bits(real.call(parts), expected, (case.name, rows))
            for _ in range(5):
                delays = (rng.randrange(400_000), rng.randrange(400_000))
                assert_same_bits(real.call(parts, poison=False, delays=delays), expected, (case.name, rows, delays))
            real.settle()
            real.close()


def timing(rank: int, world_size: int, runs: int) -> None:
    """Random delays of host and GPU on each rank, which is up to a call ahead of the other."""
    rng = random.Random(rank)
    inputs = inputs_of(BUSY)
    expected = share(virtual(BUSY, inputs), BUSY.tokens, rank)
    real = RealRank(BUSY, inputs)
    parts = real.parts(inputs)
    for batch in range(runs // 5):
        real.call(parts)
        time.sleep(rng.random() * 0.005)
        delays = [(rng.randrange(1_000_000), rng.randrange(300_000)) for _ in range(5)]
        found = [real.call(parts, poison=False, delays=both) for both in delays]  # all are queued before one has ended
        for number, actual in enumerate(found):
            assert_same_bits(actual, expected, (batch, number, delays))
    real.settle()
    real.close()


def token_counts(rank: int, world_size: int) -> None:
    """Other numbers of tokens in each call, and other weights; nobody waits between the calls."""
    counts = [(128, 127), (1, 257), (0, 64), (257, 3), (0, 0), (16, 16), (64, 0)]
    cases = [RoutingCase(name=f"counts{n}", tokens=tokens) for n, tokens in enumerate(counts)]
    inputs = [inputs_of(case, seed=n) for n, case in enumerate(cases)]
    expected = [share(virtual(case, one), case.tokens, rank) for case, one in zip(cases, inputs, strict=True)]
    real = RealRank(RoutingCase(name="most", tokens=(257, 257)), inputs[0])
    parts = [real.parts(one, case.tokens) for case, one in zip(cases, inputs, strict=True)]
    for repeat in range(3):
        found = [real.call(one, poison=False) for one in parts]
        for case, actual, wanted in zip(cases, found, expected, strict=True):
            assert_same_bits(actual, wanted, (repeat, case.tokens))
    real.settle()
    real.close()


def graph(rank: int, world_size: int) -> None:
    """One graph of forward and backward on each rank; routings change, some exceed the capacity of rank 1."""
    case = RoutingCase(name="graph", tokens=(300, 211), num_experts=8, top_k=2)
    inputs = inputs_of(case)
    real = RealRank(case, inputs, ring_rows=768)
    x, probs, routing_map, dy, w1, w2 = real.parts(inputs)
    backend = real.backends[0]
    grads = [[torch.empty_like(w, dtype=torch.float32) for w in weights] for weights in (w1, w2)]

    def call() -> list[Tensor]:
        return forward_backward(backend, x, probs, routing_map, dy, w1, w2, grads)

    with torch.cuda.stream(torch.cuda.Stream()):
        call()
    real.settle()
    captured_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured_graph, capture_error_mode="thread_local"):
        captured = call()
    one_sided = replace(case, pick=all_to(5, 6))
    mine, _ = of_rank(rank, case.tokens, case.num_experts)
    for seed in range(12):
        new = inputs_of(one_sided if seed % 2 else case, seed=200 + seed)
        for target, source in ((x, new.x), (probs, new.probs), (routing_map, new.routing_map), (dy, new.dy)):
            target.copy_(source[mine])
        captured_graph.replay()
        if seed % 3 == rank:
            torch.cuda._sleep(300_000)
        replayed = [t.clone() for t in captured]
        again = call()
        assert all(torch.equal(a, b) for a, b in zip(replayed, again, strict=True)), f"replay {seed}"
        whole = replace(new, w1=inputs.w1, w2=inputs.w2)
        assert torch.equal(replayed[0], virtual(case, whole).y[mine]), f"replay {seed}"
    real.settle()
    real.close()


def main_grad(rank: int, world_size: int) -> None:
    """Gradients are added to what is there: by the backend, and through autograd into main_grad, twice."""
    inputs = inputs_of(BUSY)
    real = RealRank(BUSY, inputs)
    added = share(virtual(BUSY, inputs, accumulate=True), BUSY.tokens, rank)
    parts = real.parts(inputs)
    assert_same_bits(real.call(parts, accumulate=True), added, "accumulate")
    alone = share(virtual(BUSY, inputs), BUSY.tokens, rank)
    x, probs, routing_map, dy, *weights = parts
    parameters = [[torch.nn.Parameter(w) for w in of_kind] for of_kind in weights]
    for parameter in (*parameters[0], *parameters[1]):
        parameter.main_grad = torch.zeros(parameter.shape, device=x.device)  # type: ignore[attr-defined]
    w1, w2 = (ExpertParams(tuple(of_kind), len(of_kind)) for of_kind in parameters)
    leaves = [(x.clone().requires_grad_(), probs.clone().requires_grad_()) for _ in range(2)]
    ys = [
        apply_experts(real.backends[0], *leaf, routing_map, w1, w2, layer=1, fuse_grad_accumulation=True)
        for leaf in leaves
    ]
    for leaf, y in reversed(list(zip(leaves, ys, strict=True))):
        y.backward(dy)
        dx, dprobs = (tensor.grad for tensor in leaf)
        assert dx is not None and dprobs is not None
        assert torch.equal(y, alone.y) and torch.equal(dx, alone.dx)
        assert torch.equal(dprobs, alone.dprobs)
    for of_kind, expected in zip(parameters, (alone.dw1, alone.dw2), strict=True):
        sums = torch.stack([parameter.main_grad for parameter in of_kind])  # type: ignore[attr-defined]
        assert relative_error(sums, 2 * expected) < 1e-6
    real.settle()
    real.close()


def layers(rank: int, world_size: int, count: int) -> None:
    """Layers of one model share one workspace: forward through all, backward through all, twice the same bits."""
    case = CASES["uniform"]
    inputs = inputs_of(case)
    shape = MoeShape(hidden=320, intermediate=192, num_experts=8, top_k=2, ep_size=2)
    config, group = MokConfig(backend="cuda", time_limit_s=TIME_LIMIT_S), dist.group.WORLD
    dist.all_gather_object([0, 0], rank)
    dist.barrier()
    free = torch.cuda.mem_get_info()[0]
    backends = [shared_backend(shape, config, group, own_device(), torch.bfloat16) for _ in range(count)]
    for backend in backends:
        backend.reserve(128)
    assert len({id(backend) for backend in backends}) == 1
    taken = free - torch.cuda.mem_get_info()[0]
    ring_rows = backends[0].sizes(128).ring_rows  # type: ignore[attr-defined]
    assert taken < memory.workspace_bytes(shape, 128, ring_rows) + (128 << 20), f"{taken} bytes for {count} layers"
    mine, held = of_rank(rank, case.tokens, case.num_experts)
    probs, routing_map, dy = (t[mine].to(own_device()) for t in (inputs.probs, inputs.routing_map, inputs.dy))
    w1, w2 = (
        ExpertParams(tuple(torch.nn.Parameter(w) for w in weights[held].to(own_device())), 4)
        for weights in (inputs.w1, inputs.w2)
    )

    def step() -> list[Tensor]:
        x = start = inputs.x[mine].to(own_device()).requires_grad_()
        for number, backend in enumerate(backends):
            x = start + apply_experts(
                backend, x, probs, routing_map, w1, w2, layer=number, fuse_grad_accumulation=False
            )
        return [x, *torch.autograd.grad(x, (start, *w1.parameters, *w2.parameters), dy)]

    first, second = step(), step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(bool(t.isfinite().all()) for t in first)
    backends[0].close()


def two_groups(rank: int, world_size: int) -> None:
    """Two groups of the same ranks, in turn; where their memory lies and when it is freed differs between the ranks."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    cases = [BUSY, RoutingCase(name="other_group", tokens=(64, 129), num_experts=8, top_k=2)]
    inputs = [inputs_of(case) for case in cases]
    expected = [share(virtual(case, one), case.tokens, rank) for case, one in zip(cases, inputs, strict=True)]
    ahead = [symmetric_memory.empty(n << 20, dtype=torch.uint8, device=own_device()) for n in range(1, 2 + 3 * rank)]
    del ahead[::2]  # from here on, the ranks' allocations lie at other places
    real = [RealRank(case, one, group) for case, one, group in zip(cases, inputs, groups, strict=True)]
    parts = [one.parts(data) for one, data in zip(real, inputs, strict=True)]
    for turn in range(6):
        which = turn % 2
        assert_same_bits(real[which].call(parts[which], poison=turn < 2), expected[which], (turn, which))
    real[0].settle()
    for which in (0, 1) if rank == 0 else (1, 0):
        real[which].close()
    again = RealRank(cases[1], inputs[1], groups[0])
    assert_same_bits(again.call(parts[1]), expected[1], "again")
    again.settle()
    again.close()
    for group in groups:
        dist.destroy_process_group(group)
    del ahead


def beside_other_kernels(rank: int, world_size: int) -> None:
    """An all-reduce of another group that one rank queues before its call and the other behind; a kernel that sleeps.

    So one rank's call has to do with the SMs that NCCL leaves, while the other's holds all and keeps NCCL waiting.
    """
    group = dist.new_group([0, 1])
    inputs = inputs_of(BUSY)
    expected = share(virtual(BUSY, inputs), BUSY.tokens, rank)
    real = RealRank(BUSY, inputs)
    parts, side = real.parts(inputs), torch.cuda.Stream()
    ones = torch.ones(1 << 22, device=own_device())
    dist.all_reduce(ones.clone(), group=group)  # NCCL loads its kernels at the first
    for turn in range(12):
        summed = ones.clone()
        real.settle()

        def reduce(summed: Tensor = summed) -> None:
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000)
                dist.all_reduce(summed, group=group)

        if turn % 2 == rank:
            reduce()
        found = real.call(parts, poison=False)
        if turn % 2 != rank:
            reduce()
        torch.cuda.synchronize()
        assert_same_bits(found, expected, turn)
        assert bool((summed == world_size).all())
    real.settle()
    real.close()
    dist.destroy_process_group(group)


def current_device_elsewhere(rank: int, world_size: int) -> None:
    """Tensors on the rank's GPU while another one is current; nothing to see where there is only one GPU."""
    case = CASES["uniform"]
    inputs, device = inputs_of(case), own_device()
    expected = share(virtual(case, inputs), case.tokens, rank)
    real = RealRank(case, inputs)
    x, probs, routing_map, dy, w1, w2 = real.parts(inputs)
    real.settle()
    with torch.cuda.device((device.index + 1) % torch.cuda.device_count()):
        backend = CudaBackend.create(real.shape, real.backends[0].config, dist.group.WORLD, device)
        backend.reserve(128)
        schedule = backend.build_schedule(x, probs, routing_map, layer=1)
        y, saved = backend.forward(x, schedule, w1, w2, save=True, layer=1)
        assert saved is not None
        dw = [[torch.empty_like(w, dtype=torch.float32) for w in weights] for weights in (w1, w2)]
        grads = WeightGrads(w1=dw[0], w2=dw[1], accumulate=False)
        dx = backend.backward(dy, saved, w1, w2, grads, needs_dx=True, dprobs=None, layer=1)
        torch.cuda.synchronize(device)
    assert dx is not None and torch.equal(y, expected.y) and torch.equal(dx, expected.dx)
    assert torch.equal(torch.stack(dw[0]), expected.dw1) and torch.equal(torch.stack(dw[1]), expected.dw2)
    real.settle()
    backend.close()
    real.close()


def memory_comes_back(rank: int, world_size: int) -> None:
    """A workspace's symmetric memory is the device's again when it is closed, the peers' mappings too."""
    inputs = inputs_of(CASES["uniform"])
    RealRank(CASES["uniform"], inputs).close()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    for _ in range(4):
        group = dist.group.WORLD
        assert group is not None
        backend = CudaBackend.create(
            MoeShape(hidden=2048, intermediate=64, num_experts=8, top_k=2, ep_size=2), MokConfig(), group, own_device()
        )
        backend.reserve(8192)
        space = backend.workspace
        assert isinstance(space, Workspace) and space.layout.bytes > 100 << 20
        del space
        backend.close()
    torch.cuda.empty_cache()
    dist.barrier()
    assert free - torch.cuda.mem_get_info()[0] < 100 << 20


ROUTINGS = [
    name
    for name, case in CASES.items()
    if case.world == 2 and (not name.startswith("tokens_") or name in ("tokens_1", "tokens_17", "tokens_129"))
]

JOBS: dict[str, Callable[[int, int], None]] = {
    "options": options,
    "ring": ring,
    "timing": partial(timing, runs=200),
    "token_counts": token_counts,
    "graph": graph,
    "main_grad": main_grad,
    "layers": partial(layers, count=64),
    "two_groups": two_groups,
    "beside_other_kernels": beside_other_kernels,
    "current_device_elsewhere": current_device_elsewhere,
    "memory_comes_back": memory_comes_back,
}


def main() -> int:
    """All jobs, in a group that torchrun has described. Rank 0 prints; exit code 1 at the first failure."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=own_device())
    routings: dict[str, Callable[[int, int], None]] = {
        f"routing {name}": partial(routing, name=name) for name in ROUTINGS
    }
    for name, job in {**routings, **JOBS}.items():
        begin = time.perf_counter()
        job(rank, world_size)
        if rank == 0:
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
