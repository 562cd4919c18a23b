"""The CUDA backend through autograd: y, dx, dprobs and both weight gradients of one rank, each against fp64."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

# torch's own matrix products are deterministic only with this; cuBLAS reads it when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from mok_megatron.autograd import ExpertParams, apply_experts
from mok_megatron.backends.cuda import CudaBackend, cuda_unavailable_reason
from mok_megatron.config import Activation, MokConfig
from tests import routing_cases
from tests.layer_run import (
    PLAIN,
    QUANTITIES,
    Inputs,
    assert_errs_at_most_twice_eager,
    assert_same_bits,
    make_inputs,
    poisoned_memory,
    run_layer,
    shape_of,
)
from tests.reference_math import Result
from tests.routing_cases import RoutingCase
from tests.virtual_ranks import DEVICE

pytestmark = pytest.mark.gpu

HIDDEN, INTERMEDIATE = 320, 192
CASES = {
    **{case.name: dataclasses.replace(case, tokens=(sum(case.tokens),)) for case in routing_cases.CASES.values()},
    **{f"k{k}": RoutingCase(name=f"k{k}", tokens=(257,), num_experts=16, top_k=k) for k in (1, 6, 16)},
}
"""Every routing of the table, with all its tokens on the one rank."""

CLAMPED = Activation(clamp=0.5, linear_offset=0.5)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def _inputs(case: RoutingCase, activation: Activation = PLAIN) -> Inputs:
    return make_inputs(
        case, dtype=torch.bfloat16, hidden=HIDDEN, intermediate=INTERMEDIATE, seed=3, activation=activation
    )


def _backend(inputs: Inputs, **options: object) -> CudaBackend:
    shape = shape_of(inputs)
    reason = cuda_unavailable_reason(DEVICE, shape, torch.bfloat16)
    assert reason is None, reason
    return CudaBackend.create(shape, MokConfig(time_limit_s=20.0, **options), None, DEVICE)  # type: ignore[arg-type]


def _on_gpu(inputs: Inputs) -> Inputs:
    tensors = {name: getattr(inputs, name).to(DEVICE) for name in ("x", "probs", "routing_map", "w1", "w2", "dy")}
    return dataclasses.replace(inputs, **tensors)


def _run(inputs: Inputs, **options: object) -> Result:
    backend = _backend(inputs, **options)
    result = run_layer(_on_gpu(inputs), backend, (inputs.x.shape[0],))
    backend.close()
    return Result(*(getattr(result, name).cpu() for name in QUANTITIES))


@pytest.mark.parametrize("name", CASES)
def test_every_gradient(name: str) -> None:
    inputs = _inputs(CASES[name])
    result = _run(inputs)
    assert_errs_at_most_twice_eager(result, inputs)
    assert_same_bits(_run(inputs), result, "a second run")


def test_clamp_and_offset() -> None:
    inputs = _inputs(CASES["k6"], CLAMPED)
    assert_errs_at_most_twice_eager(_run(inputs), inputs)


def test_weights_of_zero_and_below() -> None:
    """The gradient of a router weight does not divide by it."""
    inputs = _inputs(CASES["k6"])
    probs = inputs.probs.clone()
    probs[::2] = 0
    probs[1::4] *= -1
    inputs = dataclasses.replace(inputs, probs=probs)
    assert_errs_at_most_twice_eager(_run(inputs), inputs)


@pytest.mark.parametrize("options", [{"recompute": True}, {"save_x": False}, {"comm_sms": 4}], ids=str)
def test_options_do_not_change_what_is_computed(options: dict[str, object]) -> None:
    inputs = _inputs(CASES["k6"])
    assert_errs_at_most_twice_eager(_run(inputs, **options), inputs)


def test_no_host_sync_in_forward() -> None:
    inputs = _on_gpu(_inputs(CASES["k6"]))
    backend, experts = _backend(inputs), inputs.w1.shape[0]
    w1, w2 = (ExpertParams(tuple(torch.nn.Parameter(w) for w in stack), experts) for stack in (inputs.w1, inputs.w2))

    def forward() -> None:
        apply_experts(
            backend, inputs.x, inputs.probs, inputs.routing_map, w1, w2, layer=1, fuse_grad_accumulation=False
        )

    forward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    backend.close()


def test_forwards_without_gradients_keep_nothing() -> None:
    inputs = _on_gpu(_inputs(CASES["k6"]))
    backend, experts = _backend(inputs), inputs.w1.shape[0]
    w1, w2 = (ExpertParams(tuple(stack.unbind()), experts) for stack in (inputs.w1, inputs.w2))
    held = []
    for _ in range(100):
        with torch.no_grad():
            y = apply_experts(
                backend, inputs.x, inputs.probs, inputs.routing_map, w1, w2, layer=1, fuse_grad_accumulation=False
            )
        held.append(torch.cuda.memory_allocated())
    assert len(set(held[1:])) == 1, held
    assert torch.equal(y.cpu(), _run(_inputs(CASES["k6"])).y)
    backend.close()
