"""Host time of the routed part with TEGroupedMLP. It measures time: run it with nothing else on the machine.

The bar is 150 us a forward, and ``mok`` misses it: 226, 172, 283 and 308 us with 8, 20, 32 and 128 experts a rank (one
H200, its host's CPU, 2026-11-30). So the test prints each number beside the bar, and fails only at the limit of a
regression, which says nothing of the bar.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from tests import gpu_layers, moe_layers
from tests.gpu_layers import TE, build, routing, tokens

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BATCHES, CALLS = 20, 8
"""The device has finished before each batch, and is not behind by more than a batch's few launches."""

EXPERTS_AND_TOP_K = {"mixtral-8x7b": (8, 2), "glm-4.5": (20, 8), "deepseek-v3": (32, 8), "qwen3-30b-a3b": (128, 8)}
"""Experts of a rank are what the host's time depends on; the matrices are small, so that the device keeps up."""
FORWARD, BACKWARD = "forward", "backward"
NO_GRAD, DDP = "forward without gradients", "backward with DDP's hooks"
BAR_US = {FORWARD: 150.0, NO_GRAD: 150.0}
"""What a call should take. Backward has no bar: there autograd visits every parameter and its hooks, which are
Megatron's."""
LIMITS_US = {FORWARD: 500.0, NO_GRAD: 500.0}
"""What a call takes at most, or something went wrong: nearly twice what was measured, for slower hosts."""


@pytest.fixture(scope="module", autouse=True)
def _megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with gpu_layers.megatron(tmp_path_factory.mktemp("rendezvous")):
        yield


class _Clock:
    """Microseconds of calls, by what they are."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        self.times.setdefault(name, []).append(1e6 * (time.perf_counter() - begin))
        return result

    def medians(self) -> dict[str, float]:
        """Of all but the first batch."""
        return {name: statistics.median(times[CALLS:]) for name, times in self.times.items()}


def _measure(experts: int, top_k: int, *, ddp: bool) -> dict[str, float]:
    layer = build(**TE, num_moe_experts=experts, moe_router_topk=top_k, gradient_accumulation_fusion=True)
    if ddp:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        wrapped = DistributedDataParallel(layer.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer)
        wrapped.zero_grad_buffer()
    else:
        moe_layers.add_main_grads(layer, torch.float32)
    x = tokens(sequence=64).flatten(0, 1)
    dy = torch.randn_like(x)
    probs, routing_map = routing("uniform", x.shape[0], experts=experts, top_k=top_k)
    parameters, clock = list(layer.parameters()), _Clock()

    def forward() -> Any:
        layer.token_dispatcher.routing_map = routing_map
        return lambda: layer.routed_experts_compute(x, probs)[0]

    x.requires_grad_()
    probs.requires_grad_()
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        for _ in range(CALLS):
            with torch.no_grad():
                clock.time(NO_GRAD, forward())
            y = clock.time(FORWARD, forward())
            clock.time(BACKWARD, partial(y.backward, dy))
            x.grad = probs.grad = None
            for parameter in parameters:
                parameter.grad = None
    return clock.medians()


def _shown(part: str, us: float) -> str:
    bar = BAR_US.get(part)
    verdict = "" if bar is None else f" (bar {bar:.0f} us: {'met' if us <= bar else 'MISSED'})"
    return f"{part} {us:.0f} us{verdict}"


def test_host_time_of_a_call_has_not_grown() -> None:
    too_long = []
    for name, (experts, top_k) in EXPERTS_AND_TOP_K.items():
        found = _measure(experts, top_k, ddp=False)
        found[DDP] = _measure(experts, top_k, ddp=True)[BACKWARD]
        print(f"host time {name} (e={experts}, K={top_k}): {', '.join(_shown(*part) for part in found.items())}")
        too_long += [
            f"{name} {part} {found[part]:.0f} > {limit:.0f} us"
            for part, limit in LIMITS_US.items()
            if found[part] > limit
        ]
    assert not too_long, "; ".join(too_long)
