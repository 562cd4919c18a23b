"""The benchmark's peers without a GPU and without the peers: stand-ins with their signatures, layouts and limits."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from mok_megatron.config import Activation
from scripts.bench.implementations import registry
from scripts.bench.peers import liger_cute
from scripts.bench.torch_eager import grouped_experts
from tests.bench_case import measure, tiny_case


def _stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def _experts(x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The layer; ``experts`` and ``weights`` ``[T, K]``, ``w1 [e, 2I, H]`` (gate rows first), ``w2 [e, H, I]``."""
    tokens = torch.arange(len(x)).repeat_interleave(experts.shape[1])
    order = torch.argsort(experts.flatten(), stable=True)
    ends = torch.bincount(experts.flatten(), minlength=len(w1)).cumsum(0).to(torch.int32)
    rows = grouped_experts(x[tokens[order]], ends, w1, w2, Activation())
    return torch.zeros_like(x).index_add(0, tokens[order], rows * weights.flatten()[order, None].to(x.dtype))


def test_sonicmoe_is_called_as_its_signature_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def moe_general_routing_inputs(
        x: Tensor, router_scores: Tensor, token_indices: Tensor, expert_indices: Tensor, w1: Tensor, b1: None,
        w2: Tensor, b2: None, E: int, stream_id: int, activation_type: str, is_inference_mode_enabled: bool = False,
        concat_layout: bool = False,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert b1 is None and b2 is None and E == 8 and concat_layout and not is_inference_mode_enabled
        assert activation_type == "swiglu" and router_scores.dtype == torch.float32
        assert w1.stride(1) == 1 and w2.stride(1) == 1, "K-major per expert"
        assert torch.equal(token_indices, token_indices.sort().values) and token_indices.dtype == torch.int32
        experts, scores = (flat.view(len(x), -1) for flat in (expert_indices, router_scores))
        return _experts(x, experts, scores, w1.permute(2, 0, 1), w2.permute(2, 0, 1)), None

    _stand_in(monkeypatch, "sonicmoe")
    _stand_in(monkeypatch, "sonicmoe.enums", ActivationType=types.SimpleNamespace(SWIGLU="swiglu"))
    gather = types.SimpleNamespace(token_gather_sum_kernel=types.SimpleNamespace(configs=[]))
    _stand_in(
        monkeypatch,
        "sonicmoe.functional",
        moe_general_routing_inputs=moe_general_routing_inputs,
        reduction_over_k_gather=gather,
    )
    _stand_in(monkeypatch, "triton", Config=lambda blocks, num_warps, num_stages: (blocks, num_warps))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    results = measure(tiny_case(), [registry()["sonicmoe"]])
    assert [r.get("error") or r.get("unavailable") for r in results] == [None] * 3
    assert len(gather.token_gather_sum_kernel.configs) == 6
    assert gather.token_gather_sum_kernel.configs[0] == ({"BLOCK_H": 512, "BLOCK_K": 2}, 4)


def test_liger_cute_has_room_for_one_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heap holds what one forward keeps until its backward; forwards alone must leave nothing there."""
    kept: list[Tensor] = []
    configured: list[dict[str, Any]] = []
    taken = iter((100, 600))

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            assert not kept, "the heap is full"
            kept.append(y)
            return y.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            kept.pop()
            return grad

    def moe_fused(
        X: Tensor, expert_indices: Tensor, expert_weights: Tensor, all_B: Tensor, all_C: Tensor, all_A: Tensor,
        num_experts: int, top_k: int, pg: Any = None,
    ) -> Tensor:  # fmt: skip
        assert (num_experts, top_k, pg) == (8, 2, None) and expert_indices.dtype == torch.int32
        assert expert_weights.dtype == torch.bfloat16 and all_B.is_contiguous() and all_C.is_contiguous()
        y = _experts(X, expert_indices, expert_weights, torch.cat([all_B, all_C], dim=1), all_A)
        return Keep.apply(y) if torch.is_grad_enabled() else y

    def configure(device: torch.device, moe: dict[str, Any]) -> None:
        configured.append(moe)

    for name in ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.cute", "liger_kernel.ops.cute.ops"):
        _stand_in(monkeypatch, name)
    _stand_in(monkeypatch, "liger_kernel.ops.cute.ops.moe", moe_fused=moe_fused)
    _stand_in(monkeypatch, "liger_cute_kernels", configure=configure, MoEConfig=dict)
    monkeypatch.setattr(liger_cute, "require_process_group", lambda: None)
    monkeypatch.setattr(liger_cute, "_outside_torch", lambda: next(taken))
    monkeypatch.setattr(liger_cute.LigerCuteLayer, "heap_bytes", None)
    case = tiny_case()
    results = [result for _ in range(2) for result in measure(case, [registry()["liger-cute"]])]
    assert [r.get("error") or r.get("unavailable") for r in results] == [None] * 6
    assert configured == [
        {"max_tokens": 8192, "hidden_size": 7168, "num_experts": 128, "top_k": 8, "num_hosts": 1, "gpus_per_host": 1,
         "max_inflight": 1}
    ]  # fmt: skip
    assert results[1]["workspace_bytes"] == 500 and results[1]["saves"] is False
    split = 2 * case.copies[0].w1.numel() * 2
    assert results[1]["peak_bytes"] == 1000 - 400 + case.copies[0].bytes + 500 - split
