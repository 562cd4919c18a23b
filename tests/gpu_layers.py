"""Whole MoELayers on one GPU: Megatron's groups for a module of tests, bf16 layers with ``mok`` on the CUDA backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import moe_layers

DEVICE, BACKEND, GROUP = "cuda", "cuda", "nccl"

BF16: dict[str, Any] = {
    "hidden_size": 320,  # multiples of 64, but not of the kernels' tiles
    "moe_ffn_hidden_size": 192,
    "params_dtype": torch.bfloat16,
    "bf16": True,
    "moe_router_dtype": "fp32",
}
DEEPSEEK: dict[str, Any] = {
    **moe_layers.LAYER_CASES["sigmoid, groups, expert bias"],
    "moe_shared_expert_intermediate_size": 192,
}
TE: dict[str, Any] = {"moe_grouped_gemm": True}
"""What makes ``build`` take the layer spec and the TEGroupedMLP of Transformer Engine."""


@contextmanager
def megatron(folder: Path) -> Iterator[None]:
    """A default group of this one process (it meets itself in ``folder``) and Megatron's groups on it."""
    dist.init_process_group(GROUP, init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    moe_layers.start_megatron(device=DEVICE)
    try:
        yield
    finally:
        from megatron.core import parallel_state

        from mok_megatron.backend_pool import close_backends

        close_backends()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(dispatcher: str = "mok", **changes: Any) -> Any:
    """A bf16 layer; with ``mok`` it is on the CUDA backend."""
    layer = moe_layers.build(dispatcher, **{**BF16, **changes})
    if dispatcher == "mok":
        assert layer.fused_experts.backend.name == BACKEND
    return layer


def exact_twin(layer: Any, **changes: Any) -> Any:
    """``alltoall`` with SequentialMLP in fp32 and the same weights: the router, in fp32 in both, decides the same."""
    exact = {"params_dtype": torch.float32, "bf16": False, "moe_grouped_gemm": False}
    twin = moe_layers.build("alltoall", **{**BF16, **changes, **exact})
    source = named_tensors(layer)
    with torch.no_grad():
        for name, tensor in named_tensors(twin).items():
            tensor.copy_(source[name])
    return twin


def named_tensors(layer: Any) -> dict[str, Tensor]:
    """Parameters and buffers; the experts' under the same names whichever module holds them (``common_names``)."""
    return common_names(dict([*layer.named_parameters(), *layer.named_buffers()]), layer)


def common_names(tensors: dict[str, Tensor], layer: Any) -> dict[str, Tensor]:
    """``tensors``, sorted, with ``experts.linear_fc1.0`` in place of each expert module's own name for a weight.

    What follows a comma in a name (which call of several) stays.
    """
    common = {
        f"experts.{name}": f"experts.{linear}.{i}"
        for linear in ("linear_fc1", "linear_fc2")
        for i, name in enumerate(moe_layers.expert_parameters(layer, linear))
    }
    common |= {f"d {name}": f"d {other}" for name, other in common.items()}
    renamed = {}
    for name, tensor in tensors.items():
        quantity, comma, call = name.partition(",")
        renamed[common.get(quantity, quantity) + comma + call] = tensor
    return dict(sorted(renamed.items()))


def tokens(seed: int = 0, *, sequence: int = 129) -> Tensor:
    """``[sequence, 2, H]`` in bf16."""
    return moe_layers.tokens(0, sequence=sequence, dtype=torch.bfloat16, seed=seed, hidden=BF16["hidden_size"])


ROUTINGS = ("uniform", "one expert", "few experts", "sparse", "nothing")


def routing(kind: str, count: int, *, experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``probs [count, experts]`` in fp32 and their map.

    ``one expert`` has every token, ``few experts`` have all (the others none), ``sparse`` rows have 0 to K routes.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(count, experts, generator=generator) + 0.1
    if kind == "one expert":
        scores[:, experts // 2] += 1
    if kind == "few experts":
        scores[:, top_k:] = 0
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(top_k).indices, True)
    if kind == "sparse":
        routing_map &= torch.rand(count, experts, generator=generator) < 0.5
    if kind == "nothing":
        routing_map.zero_()
    return (scores * routing_map).to(DEVICE), routing_map.to(DEVICE)
