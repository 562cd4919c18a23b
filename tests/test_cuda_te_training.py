"""Training steps of the TEGroupedMLP layer in Megatron's own frame, and checkpoints: ``mok`` against ``alltoall``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import Tensor

from tests import gpu_layers, moe_layers
from tests.gpu_layers import DEEPSEEK, TE, build, tokens
from tests.gpu_training import SETUPS, Training

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")

pytestmark = pytest.mark.gpu

STEPS = 3
TOLERANCE = {"fp32": 0.015, "bf16": 0.02}
"""Of gradients, by the dtype that they are summed in; no router decides otherwise because of such differences."""
BOTH_WAYS = [("alltoall", "mok"), ("mok", "alltoall")]
OPTIMIZERS = ["fp32 gradients, fused", "distributed optimizer, overlaps, fp32"]


@pytest.fixture(scope="module", autouse=True)
def _megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with gpu_layers.megatron(tmp_path_factory.mktemp("rendezvous")):
        yield


def _train(dispatcher: str, name: str) -> list[dict[str, Tensor]]:
    """What each step gives, and the weights at the end, which are not those of the start."""
    training = Training(dispatcher, SETUPS[name])
    before = training.weights()
    found = [training.step(step) for step in range(STEPS)]
    after = training.weights()
    assert moe_layers.same_bits(before, after) == list(before), "every weight moves"
    return [*found, after]


@pytest.mark.parametrize("name", SETUPS)
def test_steps_are_those_of_alltoall(name: str) -> None:
    found, expected = _train("mok", name), _train("alltoall", name)
    tolerance = TOLERANCE["fp32" if "fp32" in name else "bf16"]
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        worst, quantity = moe_layers.worst(moe_layers.relative_errors(ours, theirs))
        assert worst < tolerance, f"step {step}: {quantity} differs by {worst}"
    assert {gradient.dtype for key, gradient in found[0].items() if key.startswith("d ")} == {
        torch.float32 if "fp32" in name else torch.bfloat16
    }
    for step, (once, again) in enumerate(zip(found, _train("mok", name), strict=True)):
        assert moe_layers.same_bits(once, again) == [], f"step {step} is not repeatable"


def _state(layer: Any) -> dict[str, Any]:
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in layer.state_dict().items()}


@pytest.mark.parametrize(("saver", "loader"), BOTH_WAYS)
def test_a_state_dict_loads_either_way(saver: str, loader: str) -> None:
    source, target = build(saver, **TE, **DEEPSEEK), build(loader, **TE, **DEEPSEEK, seed=2)
    state = _state(source)
    assert list(state) == list(target.state_dict())
    extra = [f"experts.{linear}._extra_state" for linear in ("linear_fc1", "linear_fc2")]
    assert [name for name in state if name.startswith("experts.") and "_extra_state" in name] == extra
    target.load_state_dict(state, strict=True)
    assert moe_layers.same_bits(gpu_layers.named_tensors(source), gpu_layers.named_tensors(target)) == []
    if loader == "mok":
        x = tokens()
        assert moe_layers.same_bits(moe_layers.run(target, x), moe_layers.run(build("mok", **TE, **DEEPSEEK), x)) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("saver", "loader"), [*BOTH_WAYS, ("mok", "mok")])
def test_a_checkpoint_resumes_either_way(saver: str, loader: str, optimizer: str, tmp_path: Path) -> None:
    """Weights and optimizer state are the saved ones, bit for bit; resumed by ``mok``, so is all that follows."""
    pytest.importorskip("psutil", reason="megatron-core's checkpoint writer imports it")
    from megatron.core import dist_checkpointing

    uninterrupted = Training(saver, SETUPS[optimizer])
    uninterrupted.step(0)
    saved = uninterrupted.weights()
    dist_checkpointing.save(_sharded(uninterrupted), tmp_path)
    resumed = Training(loader, SETUPS[optimizer])
    resumed.step(7)  # another state than the saved one, and Adam's moments exist
    loaded = dist_checkpointing.load(_sharded(resumed, is_loading=True), tmp_path)
    resumed.layer.load_state_dict(loaded["model"], strict=True)
    resumed.optimizer.load_state_dict(loaded["optimizer"])
    assert moe_layers.same_bits(resumed.weights(), saved) == []
    after, expected = resumed.step(1), uninterrupted.step(1)
    if saver == loader:
        assert moe_layers.same_bits(after, expected) == []
        assert moe_layers.same_bits(resumed.weights(), uninterrupted.weights()) == []
    worst, quantity = moe_layers.worst(moe_layers.relative_errors(after, expected))
    assert worst < TOLERANCE["fp32"], f"{quantity} differs by {worst}"


def _sharded(training: Training, *, is_loading: bool = False) -> dict[str, Any]:
    """What Megatron saves of a model and its optimizer."""
    metadata = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}
    model = training.layer.sharded_state_dict(metadata=metadata)
    state = training.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": state}
