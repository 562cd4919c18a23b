"""Megatron's MoELayer with Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..implementations import Gradients
from ..inputs import Case
from .base import PeerLayer, grad, leaf, require_process_group


class MegatronLayer(PeerLayer):
    """Megatron's MoELayer behind its router: alltoall dispatcher, TEGroupedMLP of Transformer Engine.

    With ``main_grad`` the experts' gradients are added to fp32 ``main_grad`` buffers in the products themselves.
    """

    def __init__(self, case: Case, *, main_grad: bool = False) -> None:
        super().__init__(case)
        self._fuse = main_grad
        self._layers = [self._make(case, index) for index in range(len(case.copies))]
        probs, self._routing_map = case.dense_routing()
        for copy, layer in zip(case.copies, self._layers, strict=True):
            self._sets.append([leaf(copy.x[:, None]), leaf(probs), *layer.parameters()])

    def _make(self, case: Case, index: int) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig

        shape = case.shape
        require_process_group()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=shape.ep_size,
                expert_tensor_parallel_size=1,
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=shape.hidden,
            num_attention_heads=8,
            ffn_hidden_size=shape.intermediate,
            moe_ffn_hidden_size=shape.intermediate,
            num_moe_experts=shape.num_experts,
            moe_router_topk=shape.top_k,
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=True,
            moe_permute_fusion=True,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=functional.silu,
            bias_activation_fusion=True,
            bf16=True,
            params_dtype=torch.bfloat16,
            gradient_accumulation_fusion=self._fuse,
            expert_model_parallel_size=shape.ep_size,
        )
        layer = get_moe_module_spec(use_te=True, num_experts=shape.num_experts, moe_grouped_gemm=True)(config)
        layer.set_layer_number(1)
        copy = case.copies[index]
        for expert in range(shape.experts_per_rank):
            for linear, weights in ((layer.experts.linear_fc1, copy.w1), (layer.experts.linear_fc2, copy.w2)):
                parameter = getattr(linear, f"weight{expert}")
                parameter.data = weights[expert]
                if self._fuse:
                    parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        return layer.cuda()

    def forward(self, index: int) -> Tensor:
        """See ``Layer.forward``."""
        layer, (x, probs, *_) = self._layers[index], self._sets[index]
        hidden, probs = layer.preprocess(x, probs, self._routing_map)
        rows, probs = layer.dispatch(hidden, probs)
        out, _ = layer.routed_experts_compute(rows, probs)
        y: Tensor = layer.postprocess(layer.combine(out), None)
        return y.view(self._case.tokens, -1)

    def gradients(self, index: int, expert: int) -> Gradients:
        """See ``Layer``."""
        x, probs, *_ = self._sets[index]
        experts = self._layers[index].experts
        w1, w2 = (getattr(linear, f"weight{expert}") for linear in (experts.linear_fc1, experts.linear_fc2))
        dw1, dw2 = (w1.main_grad, w2.main_grad) if self._fuse else (grad(w1), grad(w2))
        return Gradients(dx=grad(x)[:, 0], dprobs=grad(probs).gather(1, self._case.experts), dw1=dw1, dw2=dw2)

    def uncounted_bytes(self) -> int:
        """See ``Layer``: less the other sets' main_grad."""
        first = self._case.copies[0]
        fp32_bytes = 4 * (first.w1.numel() + first.w2.numel()) if self._fuse else 0
        return -(len(self._case.copies) - 1) * fp32_bytes
