"""Options of Megatron's MoE layer that ``mok`` honours, and by what. refusals.py holds the others."""

from __future__ import annotations

_ROUTER = "Megatron's router, which is unchanged"
_SHARED = "Megatron's shared expert, which is unchanged"
_MODEL = "Megatron's model code, which is unchanged"
_WEIGHTS = "Megatron's expert modules, which keep the weights; mok reads them in this layout"
_NOTHING_LEFT = "mok has nothing separate to fuse: the kernel does this itself"

HONOURED: dict[str, str] = {
    "num_moe_experts": "any number that the expert-parallel size divides",
    "moe_token_dispatcher_type": "`mok` itself",
    "moe_ffn_hidden_size": _WEIGHTS,
    "moe_grouped_gemm": _WEIGHTS,
    "moe_single_grouped_weight": _WEIGHTS,
    "moe_use_grouped_tensor": _WEIGHTS,
    "moe_latent_size": "Megatron's projections around the layer; mok runs at the latent size",
    "moe_layer_freq": _MODEL,
    "moe_layer_recompute": "Megatron's recomputation of the whole layer",
    "moe_permute_fusion": _NOTHING_LEFT,
    "moe_per_layer_logging": _ROUTER,
    "moe_grad_scale_func": _ROUTER,
    "moe_router_topk": "up to the limit in the table of refusals",
    "moe_router_load_balancing_type": _ROUTER,
    "moe_router_topk_limited_devices": _ROUTER,
    "moe_router_num_groups": _ROUTER,
    "moe_router_group_topk": _ROUTER,
    "moe_router_pre_softmax": _ROUTER,
    "moe_router_topk_scaling_factor": _ROUTER,
    "moe_router_score_function": _ROUTER,
    "moe_router_dtype": "router weights in bf16, fp32 or fp64; applied in fp32",
    "moe_router_enable_expert_bias": _ROUTER,
    "moe_router_bias_update_rate": _ROUTER,
    "moe_router_quantile_balancing_ema": _ROUTER,
    "moe_router_force_load_balancing": _ROUTER,
    "moe_router_force_biased": _ROUTER,
    "moe_router_fusion": _ROUTER,
    "moe_enable_routing_replay": _ROUTER,
    "moe_aux_loss_coeff": _ROUTER,
    "moe_z_loss_coeff": _ROUTER,
    "moe_input_jitter_eps": _ROUTER,
    "moe_expert_capacity_factor": "Megatron's router, which drops routes; rows with fewer experts are legal",
    "moe_token_drop_policy": _ROUTER,
    "moe_shared_expert_intermediate_size": _SHARED,
    "moe_shared_expert_gate": _SHARED,
    "activation_func_clamp_value": "applied to gate from above and to up on both sides, forward and backward",
    "glu_linear_offset": "added to up, forward and backward",
    "bias_activation_fusion": _NOTHING_LEFT,
    "use_te_activation_func": _NOTHING_LEFT,
    "use_transformer_engine_op_fuser": _NOTHING_LEFT,
    "gradient_accumulation_fusion": "weight gradients are added into `main_grad`",
    "recompute_modules": "`moe` and `shared_experts` by Megatron; `moe_act` always: the activation is never kept",
    "cuda_graph_impl": "graphs that leave out the experts; graphs with the experts need the CUDA backend",
}
"""Field of TransformerConfig -> what honours it."""
