"""Runs the layers of ``flag_cases`` on CPU ranks: ``mok`` against ``alltoall``."""

from __future__ import annotations

import traceback

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
