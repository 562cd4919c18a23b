"""MoELayer with ``mok`` against the same layer with ``alltoall``: every output and gradient on its own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from mok_megatron.refusals import TRAINING_ARGUMENTS, flag_of
from tests import moe_layers
from tests.distributed import run_ranks

FP32_TOLERANCE = 1e-6


def _layer_cases(rank: int, world: int) -> dict[str, dict[str, float]]:
    moe_layers.start_megatron(expert_parallel=world)
    moe_layers.stand_in_for_latent_projections()
    errors = {}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        name: (changes, {}) for name, changes in moe_layers.LAYER_CASES.items()
    }
    padded = torch.arange(24 - 7 * rank).expand(2, -1) >= 15  # True marks padding, whatever the docstring says
    cases["padding mask"] = ({"moe_router_load_balancing_type": "none"}, {"padding_mask": padded})
    cases["latent"] = ({"moe_latent_size": 16, "moe_shared_expert_intermediate_size": 40}, {})
    for name, (changes, arguments) in cases.items():
        x = moe_layers.tokens(rank)
        twins = moe_layers.build_twins(**changes)
        found = {dispatcher: moe_layers.run(layer, x, **arguments) for dispatcher, layer in twins.items()}
        errors[name] = moe_layers.relative_errors(found["mok"], found["alltoall"])
    return errors


@pytest.mark.parametrize("world", [1, 2])
def test_whole_layer_in_fp32(world: int) -> None:
    for rank, errors in enumerate(run_ranks(world, _layer_cases)):
        assert len(errors) == len(moe_layers.LAYER_CASES) + 2
        bad = {case: worst for case, found in errors.items() if (worst := moe_layers.worst(found))[0] > FP32_TOLERANCE}
        assert not bad, f"rank {rank}: {bad}"


def _behind_router_cases(rank: int, world: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Case -> quantity -> errors of ``mok`` and of ``alltoall`` against fp64."""
    moe_layers.start_megatron(expert_parallel=world)
    bf16 = {"params_dtype": torch.bfloat16, "bf16": True}
    cases = {
        "bf16, probs bf16": ({**bf16}, torch.bfloat16),
        "bf16, probs fp32": ({**bf16, "moe_router_dtype": "fp32"}, torch.float32),
        "bf16, probs fp64": ({**bf16, "moe_router_dtype": "fp64"}, torch.float64),
        "bf16, clamp and offset": (
            {**bf16, "moe_router_dtype": "fp32", "activation_func_clamp_value": 0.5, "glu_linear_offset": 0.5},
            torch.float32,
        ),
        "bf16, k1": ({**bf16, "moe_router_topk": 1, "moe_router_pre_softmax": True}, torch.bfloat16),
    }
    return {
        name: moe_layers.errors_behind_router(rank, world, changes, probs_dtype)
        for name, (changes, probs_dtype) in cases.items()
    }


@pytest.mark.parametrize("world", [1, 2])
def test_bf16_errors_at_most_twice_those_of_alltoall(world: int) -> None:
    for rank, cases in enumerate(run_ranks(world, _behind_router_cases)):
        for case, errors in cases.items():
            for quantity, (ours, theirs) in errors.items():
                assert 0 < theirs < 0.05, f"rank {rank}, {case}: alltoall's own error of {quantity} is {theirs}"
                assert ours <= 2 * theirs, f"rank {rank}, {case}: {quantity} is off by {ours}, alltoall by {theirs}"


def _training(rank: int, world: int) -> dict[str, dict[str, float]]:
    """3 steps of 2 microbatches under Megatron's DDP, gradients added straight into main_grad; the final weights."""
    moe_layers.start_megatron(expert_parallel=world)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ended = {}
    for dispatcher, layer in moe_layers.build_twins(**moe_layers.LAYER_CASES["sigmoid, groups, expert bias"]).items():
        model = DistributedDataParallel(
            layer.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True), layer
        )
        if dispatcher == "mok":
            # gradient_accumulation_fusion in the config would ask Megatron's own linears for a CUDA extension.
            layer.fused_experts.fuse_grad_accumulation = True
        norms = []
        for step in range(3):
            model.zero_grad_buffer()
            for microbatch in range(2):
                x = moe_layers.tokens(rank, seed=10 * step + microbatch)
                with model.no_sync() if microbatch == 0 else nullcontext():
                    model(x)[0].square().sum().backward()
            model.finish_grad_sync()
            norms.append(torch.stack([p.main_grad.norm() for p in layer.parameters()]))
            for parameter in layer.parameters():
                parameter.data.sub_(parameter.main_grad, alpha=1e-3)
        ended[dispatcher] = {name: p.detach().clone() for name, p in layer.named_parameters()}
        ended[dispatcher]["gradient norms"] = torch.stack(norms)
    return {"all": moe_layers.relative_errors(ended["mok"], ended["alltoall"])}


@pytest.mark.parametrize("world", [1, 2])
def test_three_steps_of_two_microbatches_under_ddp(world: int) -> None:
    for rank, errors in enumerate(run_ranks(world, _training)):
        worst, name = moe_layers.worst(errors["all"])
        assert worst < 3e-6, f"rank {rank}: {name} is off by {worst}"


def _marks_and_checkpoint_keys(rank: int, world: int) -> dict[str, list[Any]]:
    moe_layers.start_megatron(expert_parallel=world)
    twins = moe_layers.build_twins(**moe_layers.LAYER_CASES["shared expert with gate"])
    described: dict[str, list[Any]] = {}
    for dispatcher, layer in twins.items():
        marks = [(n, getattr(p, "allreduce", None), tuple(p.shape)) for n, p in layer.named_parameters()]
        sharded = layer.sharded_state_dict(prefix="mlp.")
        shards = [(k, s.key, getattr(s, "global_offset", None), s.replica_id) for k, s in sharded.items()]
        described[dispatcher] = [marks, list(layer.state_dict()), shards]
    assert any(allreduce is not None for _, allreduce, _ in described["alltoall"][0])
    if world == 2:
        _refused_at_construction()
    return described


def _refused_at_construction() -> None:
    """What only the process groups or the training arguments know; the config comes out as it went in."""
    from types import SimpleNamespace

    from megatron.training import global_vars

    config = moe_layers.make_config(num_moe_experts=7)
    with pytest.raises(ValueError, match="num_experts=7 is not divisible by the expert-parallel size 2"):
        moe_layers.build_layer(config)
    assert config.moe_token_dispatcher_type == "mok"

    config = moe_layers.make_config(recompute_granularity="selective", recompute_modules=["core_attn"])
    config.cuda_graph_impl, config.cuda_graph_modules = "full_iteration", []
    with pytest.raises(ValueError, match="reference backend does not support cuda_graph_impl='full_iteration'"):
        moe_layers.build_layer(config)

    for name in TRAINING_ARGUMENTS:
        global_vars._GLOBAL_ARGS = SimpleNamespace(**{**dict.fromkeys(TRAINING_ARGUMENTS), name: 100})
        with pytest.raises(ValueError, match=f"does not support {flag_of(name)}: "):
            moe_layers.build()
    global_vars._GLOBAL_ARGS = None

    from megatron.core.transformer.moe.moe_layer import MoELayer

    config = moe_layers.make_config()
    with pytest.raises(Exception, match="None"):
        MoELayer(config, submodules=None)  # ends inside the base class, which builds itself as allgather
    assert config.moe_token_dispatcher_type == "mok"

    config.add_bias_linear = True  # after the config was made
    with pytest.raises(ValueError, match="does not support add_bias_linear=True"):
        moe_layers.build_layer(config)


@pytest.mark.parametrize("world", [1, 2])
def test_marks_and_checkpoint_keys_are_those_of_alltoall(world: int) -> None:
    for described in run_ranks(world, _marks_and_checkpoint_keys):
        assert described["mok"] == described["alltoall"]
