"""The layer as it is trained: Megatron's Transformer Engine spec with TEGroupedMLP, ``mok`` against ``alltoall``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import Tensor

from tests import gpu_layers, moe_layers
from tests.gpu_layers import BF16, DEEPSEEK, TE, build, common_names, exact_twin, tokens

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")

pytestmark = pytest.mark.gpu

FUSED: dict[str, Any] = {"gradient_accumulation_fusion": True}
SINGLE_WEIGHT: dict[str, Any] = {"moe_single_grouped_weight": True, "use_transformer_engine_op_fuser": True}
SINGLE_WEIGHT_VARIABLES = ("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "NVTE_CUTEDSL_FUSED_GROUPED_MLP")
"""Without them Transformer Engine keeps one weight per expert, and Megatron does not build the fused experts."""


@pytest.fixture(scope="module", autouse=True)
def _megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with gpu_layers.megatron(tmp_path_factory.mktemp("rendezvous")):
        yield


def _grouped(dispatcher: str = "mok", **changes: Any) -> Any:
    layer = build(dispatcher, **{**TE, **changes})
    assert type(layer.experts).__name__ == "TEGroupedMLP"
    return layer


LAYERS: dict[str, dict[str, Any]] = {
    **{name: moe_layers.LAYER_CASES[name] for name in ("softmax", "k1", "aux and z loss", "capacity drop")},
    **{name: moe_layers.LAYER_CASES[name] for name in ("shared expert with gate", "clamped swiglu", "fused swiglu")},
    "deepseek": DEEPSEEK,
    "deepseek, all fusions": {
        **DEEPSEEK,
        "moe_router_topk": 2,  # Transformer Engine's router wants a multiple of moe_router_group_topk
        "bias_activation_fusion": True,
        "moe_permute_fusion": True,
        "moe_router_fusion": True,
    },
    "latent": {"moe_latent_size": 128},
}


@pytest.mark.parametrize("name", LAYERS)
def test_whole_layer_errs_at_most_twice_as_much_as_alltoall(name: str) -> None:
    changes, x = LAYERS[name], tokens()
    layers = {dispatcher: _grouped(dispatcher, **changes) for dispatcher in ("alltoall", "mok")}
    twin = exact_twin(layers["mok"], **changes)
    exact = common_names(moe_layers.run(twin, x.float()), twin)
    errors = {
        dispatcher: moe_layers.relative_errors(common_names(moe_layers.run(layer, x), layer), exact)
        for dispatcher, layer in layers.items()
    }
    for quantity, theirs in errors["alltoall"].items():
        ours = errors["mok"][quantity]
        assert theirs < 0.15, f"alltoall's own error of {quantity} is {theirs}"
        assert ours <= 2 * theirs + 1e-6, f"{quantity} is off by {ours}, alltoall by {theirs}"


BEHIND_ROUTER: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype | None]] = {
    "fresh gradients": ({}, torch.float32, None),
    "main_grad in fp32": (FUSED, torch.float32, torch.float32),
    "main_grad in bf16": (FUSED, torch.float32, torch.bfloat16),
    "main_grad in fp32, fused swiglu": ({**FUSED, "bias_activation_fusion": True}, torch.float32, torch.float32),
    "main_grad in fp32, probs in bf16": (FUSED, torch.bfloat16, torch.float32),
    "main_grad in fp32, clamp": ({**FUSED, "activation_func_clamp_value": 0.5}, torch.float32, torch.float32),
}


@pytest.mark.parametrize("name", BEHIND_ROUTER)
def test_behind_the_router_against_fp64(name: str) -> None:
    changes, probs_dtype, main_grad = BEHIND_ROUTER[name]
    errors = moe_layers.errors_behind_router(0, 1, {**BF16, **TE, **changes}, probs_dtype, main_grad)
    assert len(errors) == 3 + 2 * moe_layers.EXPERTS
    for quantity, (ours, theirs) in errors.items():
        assert 0 < theirs < 0.15, f"alltoall's own error of {quantity} is {theirs}"
        assert ours <= 2 * theirs, f"{quantity} is off by {ours}, alltoall by {theirs}"


def _run_into_main_grads(layer: Any, x: Tensor) -> dict[str, Tensor]:
    moe_layers.add_main_grads(layer, torch.float32)
    return moe_layers.run(layer, x)


def _move(tensor: Tensor) -> Tensor:
    """The same values elsewhere; NaN where they were, so that whoever looks there finds out."""
    moved = tensor.clone()
    assert moved.data_ptr() != tensor.data_ptr()
    tensor.fill_(float("nan"))
    return moved


def test_parameters_that_move_between_steps_and_between_forward_and_backward() -> None:
    x = tokens()
    expected = _run_into_main_grads(_grouped(**FUSED), x)
    layer = _grouped(**FUSED)
    assert moe_layers.same_bits(_run_into_main_grads(layer, x), expected) == []
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.data = _move(parameter.data)
    # Their main_grads move as well: the new ones are elsewhere while the old ones are still held.
    held = [parameter.main_grad for parameter in layer.experts.parameters()]
    assert moe_layers.same_bits(_run_into_main_grads(layer, x), expected) == []
    assert not any(main_grad.any() for main_grad in held)

    leaf = x.clone().requires_grad_()
    y = layer(leaf)[0]
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.data = _move(parameter.data)
    (y.float().square().sum() + y.float().sum()).backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, expected["dx"])
    for name, parameter in layer.experts.named_parameters():
        assert torch.equal(parameter.main_grad, expected[f"d experts.{name}"]), name


def test_a_layer_that_runs_twice_in_one_graph_adds_both_gradients() -> None:
    layer = _grouped(**FUSED)
    alone = [_run_into_main_grads(layer, tokens(seed)) for seed in (0, 1)]
    moe_layers.add_main_grads(layer, torch.float32)
    leaves = [tokens(seed).requires_grad_() for seed in (0, 1)]
    outputs = [layer(leaf)[0].float() for leaf in leaves]
    torch.stack([y.square().sum() + y.sum() for y in outputs]).sum().backward()
    for leaf, run in zip(leaves, alone, strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, run["dx"])
    for name, parameter in layer.experts.named_parameters():
        both = alone[0][f"d experts.{name}"] + alone[1][f"d experts.{name}"]
        assert moe_layers.relative_error(parameter.main_grad, both) < 1e-6, name


def test_frozen_experts_get_nothing_and_the_rest_stays_the_same() -> None:
    x = tokens()
    expected = _run_into_main_grads(_grouped(**FUSED), x)
    layer = _grouped(**FUSED)
    for parameter in layer.experts.linear_fc1.parameters():
        parameter.requires_grad_(False)
    found = _run_into_main_grads(layer, x)
    frozen = [name for name in expected if "linear_fc1" in name]
    assert len(frozen) == moe_layers.EXPERTS
    assert all(found[name] is None for name in frozen)
    assert moe_layers.same_bits(*({n: t for n, t in run.items() if n not in frozen} for run in (found, expected))) == []


@pytest.mark.parametrize("fuse", [False, True])
def test_one_grouped_weight_gives_the_bits_of_one_weight_per_expert(fuse: bool, monkeypatch: Any) -> None:
    """The kernels find the experts' matrices inside Transformer Engine's GroupedTensor."""
    changes: dict[str, Any] = {**DEEPSEEK, "gradient_accumulation_fusion": fuse}
    plain = _grouped(**changes)
    for variable in SINGLE_WEIGHT_VARIABLES:
        monkeypatch.setenv(variable, "1")
    layer = _grouped(**changes, **SINGLE_WEIGHT)
    assert [name for name, _ in layer.experts.named_parameters()] == ["linear_fc1.weight", "linear_fc2.weight"]
    with torch.no_grad():
        for linear in ("linear_fc1", "linear_fc2"):
            weights = moe_layers.expert_parameters(plain, linear).values()
            getattr(layer.experts, linear).weight.copy_(torch.stack(list(weights)))
    run = _run_into_main_grads if fuse else moe_layers.run
    found, expected = run(layer, tokens()), run(plain, tokens())
    for linear in ("linear_fc1", "linear_fc2"):
        each = [expected.pop(f"d experts.{name}") for name in moe_layers.expert_parameters(plain, linear)]
        assert torch.equal(found.pop(f"d experts.{linear}.weight").view(len(each), *each[0].shape), torch.stack(each))
    assert moe_layers.same_bits(found, expected) == []
