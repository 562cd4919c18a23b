"""Runs the layers of ``flag_cases`` on CPU ranks: ``mok`` against ``alltoall``."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests import moe_layers
from tests.flag_cases import CASES, FlagCase, Layout

SEED = 1


def cases_in(layout: Layout) -> list[FlagCase]:
    """The cases whose layer is tried in this layout."""
    return [case for case in CASES if case.layer and layout in case.layouts]


def layer_errors(rank: int, world: int, layout: Layout) -> dict[str, dict[str, float] | str]:
    """Title -> relative error of each quantity, or the traceback at which this rank stopped; for ``run_ranks``."""
    start(layout)
    moe_layers.stand_in_for_latent_projections()
    outcomes: dict[str, dict[str, float] | str] = {}
    for case in cases_in(layout):
        try:
            outcomes[case.title] = _errors(case, rank)
        except Exception:
            outcomes[case.title] = traceback.format_exc()
            break  # the ranks are out of step
    return outcomes


def start(layout: Layout) -> None:
    """The CPU shim, and Megatron's groups."""
    from tests.megatron_cpu import shim

    shim.install()
    from megatron.core import parallel_state

    import mok_megatron  # noqa: F401 (installs the hooks, whatever autoload does)

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.world,
        expert_tensor_parallel_size=1,
    )
    seed_everything()


def seed_everything() -> None:
    """Megatron's and torch's random states, as they are at the start of every run."""
    from megatron.core import tensor_parallel

    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)


def _errors(case: FlagCase, rank: int) -> dict[str, float]:
    # Tensor- and context-parallel ranks share a sequence evenly; plain expert-parallel ranks have any number of tokens.
    x = moe_layers.tokens(rank) if case.layouts == FlagCase.layouts else moe_layers.tokens(0, seed=rank)
    found: dict[str, dict[str, Tensor]] = {}
    for dispatcher in ("alltoall", "mok"):
        seed_everything()
        layer = moe_layers.build(dispatcher, **case.changes)
        seed_everything()
        found[dispatcher] = case.drive(layer, x)
    return moe_layers.relative_errors(found["mok"], found["alltoall"])


def behind_a_recomputed_norm(rank: int, world: int) -> dict[str, list[str]]:
    """What differs in any bit when Megatron drops the norm's output after forward; by the backend's options."""
    import mok_megatron

    start(Layout(world))
    _checkpoint_without_transformer_engine()
    differing = {}
    for options in ({}, {"save_x": False}, {"recompute": True}):
        mok_megatron.configure()
        mok_megatron.configure(**options)
        layer = moe_layers.build(moe_shared_expert_intermediate_size=40)
        plain, dropped = (_behind_norm(layer, moe_layers.tokens(rank), drop) for drop in (False, True))
        differing[str(options)] = moe_layers.same_bits(plain, dropped)
    mok_megatron.configure()
    return differing


def _behind_norm(layer: Any, x: Tensor, drop: bool) -> dict[str, Tensor]:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    norm, x = torch.nn.LayerNorm(x.shape[-1]), x.clone().requires_grad_()
    if drop:
        checkpoint = CheckpointWithoutOutput()
        normed = checkpoint.checkpoint(norm, x)
        y = layer(normed)[0]
        checkpoint.discard_output_and_register_recompute(y)
        assert normed.untyped_storage().nbytes() == 0
    else:
        y = layer(norm(x))[0]
    y.square().sum().backward()
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in [*layer.named_parameters(), *norm.named_parameters()]:
        found[f"d {name}"], parameter.grad = parameter.grad, None
    return found


def _checkpoint_without_transformer_engine() -> None:
    """Megatron's CheckpointWithoutOutput asks Transformer Engine about fp8, and shares storage by a compiled function.

    Here there is no fp8, and the storage is filled with a copy: the memory comes back elsewhere in both ways.
    """
    from megatron.core.tensor_parallel import random

    def fill_storage(target: Tensor, source: Tensor) -> None:
        storage = target.untyped_storage()
        storage.resize_(source.untyped_storage().nbytes())
        storage.copy_(source.untyped_storage())

    replaced: Any = random
    replaced.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    replaced.activation_recompute_forward = replaced.fp8_autocast = lambda **_: nullcontext()
    replaced._get_share_storage = lambda: fill_storage
