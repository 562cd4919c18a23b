"""CUDA graphs of the TEGroupedMLP layer with ``mok``: replays with other data and routing give the bits of eager."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import Tensor

from tests import gpu_layers, moe_layers
from tests.gpu_layers import ROUTINGS, TE, build, tokens
from tests.gpu_training import MICROBATCHES, SETUPS, Training

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")

pytestmark = pytest.mark.gpu

REPLAYS = 100
WARM_UP_STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with gpu_layers.megatron(tmp_path_factory.mktemp("rendezvous")):
        yield


@pytest.fixture
def stream() -> Iterator[torch.cuda.Stream]:
    """Where everything happens: what autograd keeps for a parameter must not belong to the default stream."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        yield side
    torch.cuda.synchronize()


def _capture(stream: torch.cuda.Stream, step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    for _ in range(WARM_UP_STEPS):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = step()
    return graph, captured


@pytest.mark.parametrize("main_grad", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_behind_the_router_with_every_kind_of_routing(stream: torch.cuda.Stream, main_grad: torch.dtype) -> None:
    layer = build(**TE, gradient_accumulation_fusion=True)
    moe_layers.add_main_grads(layer, main_grad)
    main_grads = [parameter.main_grad for parameter in layer.experts.parameters()]
    x, dy = tokens(0).requires_grad_(), tokens(1)
    count = x.shape[0] * x.shape[1]
    sizes = {"experts": moe_layers.EXPERTS, "top_k": moe_layers.TOP_K}
    probs, routing_map = gpu_layers.routing("uniform", count, **sizes)
    probs.requires_grad_()

    def step() -> dict[str, Tensor]:
        for leaf in (x, probs):
            leaf.grad = None
        torch._foreach_zero_(main_grads)
        hidden, weights = layer.dispatch(*layer.preprocess(x, probs, routing_map))
        y = layer.postprocess(layer.combine(layer.routed_experts_compute(hidden, weights)[0]), None)
        y.backward(dy)
        for parameter in layer.experts.parameters():
            parameter.grad = None
        assert x.grad is not None and probs.grad is not None
        return {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad, **_numbered(main_grads)}

    graph, captured = _capture(stream, step)
    for replay in range(REPLAYS):
        kind = ROUTINGS[replay % len(ROUTINGS)]
        with torch.no_grad():
            x.copy_(tokens(2 * replay + 2))
            dy.copy_(tokens(2 * replay + 3))
            for old, new in zip(
                (probs, routing_map), gpu_layers.routing(kind, count, **sizes, seed=replay), strict=True
            ):
                old.copy_(new)
        expected = {name: tensor.clone() for name, tensor in step().items()}
        for tensor in captured.values():
            tensor.fill_(float("nan"))
        graph.replay()
        assert moe_layers.same_bits(captured, expected) == [], f"replay {replay}, {kind}"
        assert bool(expected["dx"].any()) == (kind != "nothing")


def _numbered(tensors: list[Tensor]) -> dict[str, Tensor]:
    return {f"main_grad {i}": tensor for i, tensor in enumerate(tensors)}


@pytest.mark.parametrize("name", ["fp32 gradients, fused", "bf16 gradients, fused", "fp32 gradients"])
def test_a_whole_step_under_ddp(stream: torch.cuda.Stream, name: str) -> None:
    """Zeroing the buffers, router, shared and routed experts of two microbatches, and the gradients' reduction."""
    training = Training("mok", SETUPS[name])
    leaves: list[Any] = [tokens(seed).requires_grad_() for seed in range(MICROBATCHES)]

    def found(outputs: list[Tensor]) -> dict[str, Tensor]:
        gradients = training.gradients()
        ys = {f"y {i}": y.clone() for i, y in enumerate(outputs)}
        return {**gradients, **ys, **{f"dx {i}": leaf.grad.clone() for i, leaf in enumerate(leaves)}}

    graph, outputs = _capture(stream, lambda: training.accumulate(leaves))
    captured_dx = [leaf.grad for leaf in leaves]
    different = set()
    for replay in range(REPLAYS):
        with torch.no_grad():
            for microbatch, leaf in enumerate(leaves):
                leaf.copy_(tokens(1000 + MICROBATCHES * replay + microbatch))
        expected = found(training.accumulate(leaves))
        for buffer in training.model.buffers + training.model.expert_parallel_buffers:
            buffer.grad_data.fill_(float("nan"))
        graph.replay()
        for leaf, dx in zip(leaves, captured_dx, strict=True):
            leaf.grad = dx
        assert moe_layers.same_bits(found(outputs), expected) == [], f"replay {replay}"
        different.add(float(expected["y 0"].float().sum()))
    assert len(different) > REPLAYS // 2, "the data changes"
