"""What is refused with ``mok``: for each field of Megatron's config, the values that are tried."""

from __future__ import annotations

from typing import Any

import torch

from mok_megatron.refusals import TRAINING_ARGUMENTS, flag_of
from tests import moe_layers

TRIGGERS: dict[str, list[dict[str, Any]]] = {
    "num_moe_experts": [{"num_moe_experts": 9, "expert_model_parallel_size": 2}],
    "moe_router_topk": [{"moe_router_topk": 9}, {"num_moe_experts": 32, "moe_router_topk": 17}],
    "gated_linear_unit": [{"gated_linear_unit": False}],
    "activation_func": [{"activation_func": torch.nn.functional.gelu}],
    "add_bias_linear": [{"add_bias_linear": True}],
    "activation_func_clamp_value": [
        {"activation_func_clamp_value": 7.0, "bias_activation_fusion": True},
        {"activation_func_clamp_value": 7.0, "use_te_activation_func": True},
        {"activation_func_clamp_value": 7.0, "use_transformer_engine_op_fuser": True},
    ],
    "glu_linear_offset": [{"glu_linear_offset": 1.0, "bias_activation_fusion": True}],
    "activation_func_fp8_input_store": [{"activation_func_fp8_input_store": True}],
    "moe_apply_probs_on_input": [{"moe_apply_probs_on_input": True}],
    "moe_mlp_glu_interleave_size": [{"moe_mlp_glu_interleave_size": 32}],
    "use_grouped_gemm_for_shared_expert": [{"use_grouped_gemm_for_shared_expert": True}],
    "moe_shared_expert_glu_interleave_size": [{"moe_shared_expert_glu_interleave_size": 32}],
    "moe_single_grouped_bias": [{"moe_single_grouped_bias": True}],
    "fp16": [{"fp16": True, "params_dtype": torch.float16}],
    "params_dtype": [{"params_dtype": torch.float64}],
    "fp8": [{"fp8": "hybrid"}],
    "fp4": [{"fp4": "e2m1"}],
    "quant_recipe": [{"quant_recipe": object()}],
    "use_kitchen": [{"use_kitchen": True}],
    "enable_autocast": [{"enable_autocast": True}],
    "moe_pad_expert_input_to_capacity": [{"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0}],
    "moe_pad_experts_for_cuda_graph_inference": [{"moe_pad_experts_for_cuda_graph_inference": True}],
    "moe_router_padding_for_quantization": [{"moe_router_padding_for_quantization": True}],
    "moe_router_padding_for_fp8": [{"moe_router_padding_for_fp8": True}],
    "moe_expert_rank_capacity_factor": [{"moe_expert_rank_capacity_factor": 1.5}],
    "moe_token_dropping": [{"moe_token_dropping": True}],
    "expert_tensor_parallel_size": [{"expert_tensor_parallel_size": 2}, {"tensor_model_parallel_size": 2}],
    "expert_gtp_weight_remat_size": [{"expert_tensor_parallel_num_weight_shards": 2}],
    "overlap_moe_expert_parallel_comm": [{"overlap_moe_expert_parallel_comm": True}],
    "ep_overlap_early_attn_memory_release": [{"ep_overlap_early_attn_memory_release": True}],
    "high_priority_a2a_comm_stream": [{"high_priority_a2a_comm_stream": True}],
    "delay_wgrad_compute": [{"delay_wgrad_compute": True}],
    "overlap_dispatch_backward_with_experts_wgrad": [{"overlap_dispatch_backward_with_experts_wgrad": True}],
    "moe_shared_expert_overlap": [
        {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": moe_layers.INTERMEDIATE}
    ],
    "cpu_offloading": [{"cpu_offloading": True}],
    "offload_modules": [{"fine_grained_activation_offloading": True, "offload_modules": ["attn_norm", "moe_act"]}],
    "moe_paged_stash": [{"moe_paged_stash": True}],
    "moe_paged_stash_page_size": [{"moe_paged_stash_page_size": 128}],
    "moe_paged_stash_buffer_size_factor_cuda": [{"moe_paged_stash_buffer_size_factor_cuda": 2.0}],
    "moe_paged_stash_buffer_size_factor_cpu": [{"moe_paged_stash_buffer_size_factor_cpu": 1.0}],
    "transformer_impl": [{"transformer_impl": "inference_optimized"}],
    "moe_megakernel_backend": [{"moe_megakernel_backend": "mok"}],
    "moe_enable_deepep": [{"moe_enable_deepep": True}],
    "moe_flex_dispatcher_backend": [{"moe_flex_dispatcher_backend": "hybridep"}],
    "moe_permute_fusion_into_hybridep": [{"moe_permute_fusion_into_hybridep": True}],
    "moe_hybridep_pad_uneven_dispatch_inputs": [{"moe_hybridep_pad_uneven_dispatch_inputs": True}],
    "moe_flex_dispatcher_num_sms": [{"moe_flex_dispatcher_num_sms": 24}],
    "moe_deepep_num_sms": [{"moe_deepep_num_sms": 24}],
    "moe_hybridep_num_sms": [{"moe_hybridep_num_sms": 24}],
    "moe_hybridep_num_blocks_permute": [{"moe_hybridep_num_blocks_permute": 24}],
    "moe_hybridep_num_blocks_unpermute": [{"moe_hybridep_num_blocks_unpermute": 24}],
    "moe_hybridep_num_sms_preprocessing": [{"moe_hybridep_num_sms_preprocessing": 24}],
    "moe_ncclep_static_shape": [{"moe_ncclep_static_shape": True}],
    "moe_ncclep_zero_copy": [{"moe_ncclep_zero_copy": True}],
    "moe_dispatch_fwd_dtype": [{"moe_dispatch_fwd_dtype": "mxfp8"}],
    "moe_combine_bwd_dtype": [{"moe_combine_bwd_dtype": "mxfp8"}],
}

NOT_YET_IN_A_RELEASE = {
    "moe_megakernel_backend": None,
    "moe_dispatch_fwd_dtype": "bf16",
    "moe_combine_bwd_dtype": "bf16",
}
"""Fields of Megatron's main branch with their defaults; tested on a stand-in for the config."""

ELSEWHERE: list[tuple[str, str, str]] = [
    (
        "`--cuda-graph-modules moe`",
        "moe cuda graph is only supported with drop-padding MoE (Megatron's message; mok refuses that padding, too). "
        "Leave --cuda-graph-modules out, which captures whole layers",
        "test_flags.py::test_a_graph_of_the_moe_module_alone_is_refused",
    ),
    *(
        (f"`{flag_of(name)}`", why, "test_layer_vs_alltoall.py::_refused_at_construction")
        for name, why in TRAINING_ARGUMENTS.items()
    ),
    (
        "`--cuda-graph-impl` with the experts in the graph, on the reference backend",
        "it reads row counts on the host. Capture other modules (--cuda-graph-modules attn moe_router), or use the "
        "CUDA backend",
        "test_layer_vs_alltoall.py::_refused_at_construction",
    ),
    (
        "expert modules with other parameters than the two weights (biases, adapters)",
        "remove these parameters, or use another dispatcher",
        "test_expert_reader.py",
    ),
    (
        "hooks on the expert modules, other than forward pre-hooks and those by which Transformer Engine prepares a "
        "CUDA graph",
        "hook the MoE layer",
        "test_expert_reader.py",
    ),
    ("subclasses of MoELayer", "use MoELayer itself in the layer spec, or another dispatcher", "test_plugin.py"),
]
"""What is refused but is no field of the config: what, a part of the message, and the test that sees it."""
