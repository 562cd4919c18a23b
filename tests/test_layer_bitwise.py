"""What must not change a bit of the layer with ``mok``, and the orders in which Megatron may call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests import moe_layers
from tests.distributed import run_ranks
from tests.layer_run import poisoned_memory

_DEEPSEEK = moe_layers.LAYER_CASES["sigmoid, groups, expert bias"]
_SHARED = {**_DEEPSEEK, "moe_shared_expert_intermediate_size": 40}


def _ranks(rank: int, world: int) -> dict[str, list[str]]:
    moe_layers.start_megatron(expert_parallel=world)
    with poisoned_memory():
        return {
            "two runs": _two_runs(rank),
            "Megatron recomputes": _megatron_recomputes(rank),
            "the backend recomputes": _backend_recomputes(rank),
            "bf16 probs": _two_runs(rank, params_dtype=torch.bfloat16, bf16=True),
            "output freed before backward": _output_freed(rank),
            "backward in another order": _reversed_backward(rank),
            "no gradient asked for": _without_gradient(rank),
            "frozen weights": _frozen(rank),
        }


def test_bits_do_not_change() -> None:
    for rank, differing in enumerate(run_ranks(2, _ranks)):
        bad = {case: names for case, names in differing.items() if names}
        assert not bad, f"rank {rank}: {bad}"


def _two_runs(rank: int, **changes: Any) -> list[str]:
    layer = moe_layers.build(**_SHARED, **changes)
    x = moe_layers.tokens(rank, dtype=layer.config.params_dtype)
    return moe_layers.same_bits(moe_layers.run(layer, x), moe_layers.run(layer, x))


def _megatron_recomputes(rank: int) -> list[str]:
    x = moe_layers.tokens(rank)
    found = [moe_layers.run(moe_layers.build(**_SHARED), x)]
    for modules in (["moe"], ["shared_experts"]):
        layer = moe_layers.build(**_SHARED, recompute_granularity="selective", recompute_modules=modules)
        assert layer.moe_layer_recompute == (modules == ["moe"])
        found.append(moe_layers.run(layer, x))
        assert layer.token_dispatcher.routing_map is None
    return [name for other in found[1:] for name in moe_layers.same_bits(found[0], other)]


def _backend_recomputes(rank: int) -> list[str]:
    import mok_megatron

    x, found = moe_layers.tokens(rank), []
    changes: tuple[dict[str, Any], ...] = ({}, {"recompute": True}, {"save_x": False})
    for options in changes:
        mok_megatron.configure()
        mok_megatron.configure(**options)
        layer = moe_layers.build(**_SHARED)
        assert layer.fused_experts.backend.config == mok_megatron.MokConfig(**options)
        found.append(moe_layers.run(layer, x))
    mok_megatron.configure()
    return [name for other in found[1:] for name in moe_layers.same_bits(found[0], other)]


def _gradients(layer: Any, *leaves: Tensor) -> dict[str, Tensor]:
    found: dict[str, Any] = {f"dx {i}": leaf.grad for i, leaf in enumerate(leaves)}
    for name, parameter in layer.named_parameters():
        found[f"d {name}"], parameter.grad = parameter.grad, None
    return found


def _leaves(rank: int, count: int) -> list[Tensor]:
    return [moe_layers.tokens(rank, seed=seed).requires_grad_() for seed in range(count)]


def _output_freed(rank: int) -> list[str]:
    """Pipeline parallelism shrinks the output to one element before backward, through the engine itself."""
    layer, found = moe_layers.build(**_DEEPSEEK), []
    from megatron.core.pipeline_parallel.schedules import custom_backward

    for free in (False, True):
        (x,) = _leaves(rank, 1)
        y, _ = layer(x)
        dy = moe_layers.tokens(rank, seed=9)
        if free:
            y.data = torch.empty(1)
            custom_backward(y, dy)
        else:
            y.backward(dy)
        found.append(_gradients(layer, x))
    return moe_layers.same_bits(*found)


def _reversed_backward(rank: int) -> list[str]:
    """Three microbatches in flight; each input's gradient is the same in any order of their backwards."""
    layer, found = moe_layers.build(**_DEEPSEEK), []
    for order in ((0, 1, 2), (2, 0, 1)):
        leaves = _leaves(rank, 3)
        outputs = [layer(x)[0] for x in leaves]
        for i in order:
            outputs[i].square().sum().backward()
        found.append({name: grad for name, grad in _gradients(layer, *leaves).items() if name.startswith("dx")})
    return moe_layers.same_bits(*found)


def _without_gradient(rank: int) -> list[str]:
    layer = moe_layers.build(**_DEEPSEEK).eval()
    x = moe_layers.tokens(rank)
    with torch.no_grad():
        plain = layer(x)[0]
    return moe_layers.same_bits({"y": layer(x)[0].detach()}, {"y": plain})


def _frozen(rank: int) -> list[str]:
    """Each expert weight frozen in turn, and all: the others' gradients and dx do not change, the frozen has none."""
    (x,) = _leaves(rank, 1)
    layer, differing = moe_layers.build(**_DEEPSEEK), []
    expected = moe_layers.run(layer, x.detach())
    experts = [name for name, _ in layer.named_parameters() if name.startswith("experts.")]
    for frozen in ([experts[0]], [experts[1]], experts):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in frozen)
        found = moe_layers.run(layer, x.detach())
        assert all(found.pop(f"d {name}") is None for name in frozen)
        differing += moe_layers.same_bits(found, expected)
    return differing


def _twice_in_one_graph(rank: int, world: int) -> dict[str, float]:
    moe_layers.start_megatron(expert_parallel=world)
    found = {}
    for dispatcher, layer in moe_layers.build_twins(**_DEEPSEEK).items():
        (x,) = _leaves(rank, 1)
        layer(layer(x)[0])[0].square().sum().backward()
        found[dispatcher] = _gradients(layer, x)
    return moe_layers.relative_errors(found["mok"], found["alltoall"])


def test_a_layer_twice_in_one_graph() -> None:
    for errors in run_ranks(2, _twice_in_one_graph):
        assert moe_layers.worst(errors)[0] < 3e-6
