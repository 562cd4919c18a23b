"""Thousands of layer calls of all kinds in one process: every value stays right and nothing grows."""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import Tensor

from tests import gpu_layers, moe_layers, reference_math
from tests.gpu_layers import ROUTINGS, build

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROUNDS = 10
SETTLED = 2
"""Rounds after which caches are filled: nothing may grow from there on."""
CALLS_PER_PHASE = 90
TOKENS = (1, 17, 128, 333, 512, 0)
GRAPH_TOKENS = 333
MODES = ("train", "train", "eval", "graph", "in flight")
LOOK_AT_WEIGHTS_EVERY = 8
GROWTH = {"allocated": 64 << 10, "reserved": 0, "gpu": 2 << 20, "descriptors": 0, "threads": 0, "resident": 8 << 20}
"""Of ``_Usage``, what is allowed. Allocated: a leak of the smallest block, 512 bytes, in one call of 30 is above it."""
TOLERANCE = 0.015
"""Of a bf16 result against fp64, relative."""

_GROUPED = gpu_layers.TE if importlib.util.find_spec("transformer_engine") else {}
LAYERS: tuple[tuple[dict[str, Any], bool], ...] = (
    ({"hidden_size": 320, "moe_ffn_hidden_size": 192, "num_moe_experts": 8, "moe_router_topk": 2, **_GROUPED}, True),
    ({"hidden_size": 256, "moe_ffn_hidden_size": 448, "num_moe_experts": 48, "moe_router_topk": 6}, False),
)
"""What is changed in the layer, and whether its gradients go into main_grad. TEGroupedMLP is there with its library."""


@pytest.fixture(scope="module", autouse=True)
def _megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import mok_megatron

    with gpu_layers.megatron(tmp_path_factory.mktemp("rendezvous")):
        mok_megatron.configure(max_tokens=max(TOKENS))
        yield
        mok_megatron.configure()


@dataclass
class _Case:
    """Inputs of a call and what it gives; ``golden`` comes from the first call, once it has been compared with fp64."""

    x: Tensor
    probs: Tensor
    routing_map: Tensor
    dy: Tensor
    golden: dict[str, Tensor] = field(default_factory=dict)

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.x.detach().requires_grad_(), self.probs.detach().requires_grad_()


class _Soaked:
    """One layer behind its router, its cases by kind of routing, and a graph of it."""

    def __init__(self, changes: dict[str, Any], fused: bool, seed: int, wrong: Tensor) -> None:
        self.layer = build(**changes)
        self.wrong, self._calls = wrong, 0
        self.parameters = dict(self.layer.experts.named_parameters())
        if fused:
            self.layer.fused_experts.fuse_grad_accumulation = True
            moe_layers.add_main_grads(self.layer, torch.float32)
        self.main_grads = [parameter.main_grad for parameter in self.parameters.values()] if fused else []
        self.cases = {kind: [self._case(kind, count, seed + i) for i, count in enumerate(TOKENS)] for kind in ROUTINGS}
        self._make_graph(self.cases["uniform"][TOKENS.index(GRAPH_TOKENS)])

    def _case(self, kind: str, count: int, seed: int) -> _Case:
        config = self.layer.config
        sizes = {"experts": config.num_moe_experts, "top_k": config.moe_router_topk}
        generator = torch.Generator().manual_seed(seed)
        x, dy = torch.randn(2, count, 1, config.hidden_size, generator=generator).to(gpu_layers.DEVICE, torch.bfloat16)
        case = _Case(x, *gpu_layers.routing(kind, count, **sizes, seed=seed), dy)
        found = self._run(case)
        exact = self._exact(case)
        errors = moe_layers.relative_errors({name: found[name] for name in exact}, exact)
        worst, name = moe_layers.worst(errors)
        assert worst < TOLERANCE, f"{kind}, {count} tokens: {name} is off by {worst}"
        case.golden = found
        return case

    def _exact(self, case: _Case) -> dict[str, Tensor]:
        names = {linear: moe_layers.expert_parameters(self.layer, linear) for linear in ("linear_fc1", "linear_fc2")}
        w1, w2 = (torch.stack(list(weights.values())).detach() for weights in names.values())
        x, dy = case.x.flatten(0, 1), case.dy.flatten(0, 1)
        result = reference_math.moe_layer(x, case.probs, case.routing_map, w1, w2, dy)
        gradients = zip(itertools.chain(*names.values()), (*result.dw1, *result.dw2), strict=True)
        flat = {"y": result.y.view(case.x.shape), "dx": result.dx.view(case.x.shape), "dprobs": result.dprobs}
        return {**flat, **dict(gradients)}

    def forward(self, x: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        hidden, weights = self.layer.dispatch(*self.layer.preprocess(x, probs, routing_map))
        y, _ = self.layer.routed_experts_compute(hidden, weights)
        out: Tensor = self.layer.postprocess(self.layer.combine(y), None)
        return out

    def backward(self, y: Tensor, dy: Tensor) -> None:
        """Weight gradients are those of this call alone."""
        if self.main_grads:
            torch._foreach_zero_(self.main_grads)
        for parameter in self.parameters.values():
            parameter.grad = None
        y.backward(dy)

    def _run(self, case: _Case) -> dict[str, Tensor]:
        x, probs = case.leaves()
        y = self.forward(x, probs, case.routing_map)
        self.backward(y, case.dy)
        weights = {name: self._gradient(parameter).clone() for name, parameter in self.parameters.items()}
        assert x.grad is not None and probs.grad is not None
        return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad, **weights}

    def _gradient(self, parameter: Any) -> Tensor:
        return parameter.main_grad if self.main_grads else parameter.grad

    def _make_graph(self, case: _Case) -> None:
        """A graph of forward and backward; ``_graph_case`` holds what it reads, ``_graph_results`` what it writes."""
        self._graph_case = _Case(case.x.clone(), case.probs.clone(), case.routing_map.clone(), case.dy.clone())
        x, probs = self._graph_case.leaves()
        stream, self._graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())

        def step() -> Tensor:
            x.grad = probs.grad = None
            y = self.forward(x, probs, self._graph_case.routing_map)
            self.backward(y, self._graph_case.dy)
            return y.detach()

        with torch.cuda.stream(stream):
            step()
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                y = step()
        torch.cuda.current_stream().wait_stream(stream)
        assert x.grad is not None and probs.grad is not None
        self._graph_results = {"y": y, "dx": x.grad, "dprobs": probs.grad}
        self._graph_gradients = {name: self._gradient(parameter) for name, parameter in self.parameters.items()}

    def train(self, case: _Case) -> None:
        x, probs = case.leaves()
        y = self.forward(x, probs, case.routing_map)
        self.backward(y, case.dy)
        self.compare(case, {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad})
        self._calls += 1
        if self._calls % LOOK_AT_WEIGHTS_EVERY == 0:
            self.compare(case, {name: self._gradient(parameter) for name, parameter in self.parameters.items()})

    def evaluate(self, case: _Case) -> None:
        self.layer.eval()
        with torch.no_grad():
            y = self.forward(case.x, case.probs, case.routing_map)
        self.layer.train()
        self.compare(case, {"y": y})

    def replay(self, kind: str) -> None:
        case = self.cases[kind][TOKENS.index(GRAPH_TOKENS)]
        held = self._graph_case
        for old, new in ((held.x, case.x), (held.probs, case.probs), (held.dy, case.dy)):
            old.copy_(new)
        held.routing_map.copy_(case.routing_map)
        self._graph.replay()
        self.compare(case, {**self._graph_results, **self._graph_gradients})

    def compare(self, case: _Case, found: dict[str, Any]) -> None:
        """Notes on the device whether any bit differs; nothing waits for it."""
        for name, tensor in found.items():
            if tensor.numel():
                self.wrong.logical_or_((tensor != case.golden[name]).any())


def _in_flight(soaked: list[_Soaked], kind: str, order: random.Random) -> None:
    """Several forwards of both layers before the first backward, in another order."""
    calls = []
    chosen = [(each, case) for each in soaked for case in order.sample(each.cases[kind], 2)]
    for layer, case in chosen:
        x, probs = case.leaves()
        calls.append((layer, case, x, probs, layer.forward(x, probs, case.routing_map)))
    order.shuffle(calls)
    for layer, case, x, probs, y in calls:
        layer.backward(y, case.dy)
        layer.compare(case, {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad})


def _one_round(soaked: list[_Soaked]) -> int:
    """A phase for every kind of routing; the same calls in every round. How many there were."""
    order, calls = random.Random(5), 0
    for kind in ROUTINGS:
        for _ in range(CALLS_PER_PHASE):
            layer, mode = order.choice(soaked), order.choice(MODES)
            if mode == "in flight":
                _in_flight(soaked, kind, order)
                calls += 2 * len(soaked)
                continue
            case = order.choice(layer.cases[kind])
            if mode == "train":
                layer.train(case)
            elif mode == "eval":
                layer.evaluate(case)
            else:
                layer.replay(kind)
            calls += 1
    return calls


@dataclass(frozen=True)
class _Usage:
    """What could grow: torch's memory on the GPU, all of the GPU's, file descriptors, threads, resident memory."""

    allocated: int
    reserved: int
    gpu: int
    descriptors: int
    threads: int
    resident: int


def _usage() -> _Usage:
    torch.cuda.synchronize()
    process = Path("/proc/self")
    free, total = torch.cuda.mem_get_info()
    return _Usage(
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        gpu=total - free,
        descriptors=len(list((process / "fd").iterdir())),
        threads=len(list((process / "task").iterdir())),
        resident=int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )


def test_thousands_of_calls() -> None:
    wrong = torch.zeros((), dtype=torch.bool, device=gpu_layers.DEVICE)
    soaked = [_Soaked(*layer, seed=100 * i, wrong=wrong) for i, layer in enumerate(LAYERS)]
    usages, calls = [], 0
    for number in range(ROUNDS):
        calls += _one_round(soaked)
        usages.append(_usage())
        assert not bool(wrong), f"a wrong value in round {number}"
    print(f"{calls} calls; {usages[SETTLED]} -> {usages[-1]}")
    assert calls > 5000
    settled = usages[SETTLED]
    for number, usage in enumerate(usages[SETTLED:], SETTLED):
        for name, growth in GROWTH.items():
            found, before = getattr(usage, name), getattr(settled, name)
            assert found <= before + growth, f"{name} grew from {before} to {found} by round {number}"
