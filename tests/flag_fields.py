"""Fields of Megatron's config that do not reach the part of the MoE layer which ``mok`` replaces, and why."""

from __future__ import annotations

OUTSIDE: dict[str, str] = {
    "attention, embeddings, norms, residuals, loss and initialisation: Megatron's own code, outside the MoE layer": """
        num_query_groups kv_channels attention_backend flash_attention_version softmax_scale
        softmax_type hidden_dropout attention_dropout fp32_residual_connection add_qkv_bias rotary_interleaved
        apply_residual_connection_post_layernorm layernorm_epsilon layernorm_zero_centered_gamma window_size
        window_attn_skip_freq normalization qk_layernorm qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold
        log_max_attention_logit attention_output_gate no_rope_freq experimental_attention_variant
        experimental_attention_variant_loss_scale_func dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_topk_freq dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 apply_query_key_layer_scaling attention_softmax_in_fp32
        masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion apply_rope_fusion
        fused_single_qkv_rope fused_residual_rmsnorm mrope_section clone_scatter_output_in_embedding
        perform_initialization init_method output_layer_init_method
        init_method_std embedding_init_method embedding_init_method_std init_model_with_meta_device use_mup
        mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power
        cross_entropy_loss_fusion cross_entropy_fusion_impl mtp_loss_scaling_factor mtp_detach_heads mtp_standalone
        mtp_hybrid_override_pattern use_te_rng_tracker test_mode config_logger_dir disable_bf16_reduced_precision_matmul
        """,
    "layers of other kinds: linear attention, state spaces, dense MLPs, models of mixed blocks": """
        linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads
        linear_num_value_heads is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
        mamba_training_ssm_states_dtype use_mamba_mem_eff_path use_fused_weighted_squared_relu
        use_grouped_gemm_for_dense_mlp heterogeneous_block_specs hetereogenous_dist_checkpoint
        """,
    "how other modules' communication, pipeline stages and schedules run": """
        pipeline_model_parallel_comm_backend hierarchical_context_parallel_sizes cp_comm_type tp_comm_overlap
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs tp_comm_overlap_disable_qkv
        tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend pipeline_dtype overlap_p2p_comm batch_p2p_comm
        batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs defer_embedding_wgrad_compute
        wgrad_deferral_limit overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage barrier_with_L1_time
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage pipeline_model_parallel_layout
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split distribute_saved_activations
        num_microbatches_with_partial_activation_checkpoints tensor_parallel_num_weight_shards gtp_weight_remat_size
        timers finalize_model_grads_func grad_scale_func moe_grad_scale_func mtp_grad_scale_func
        no_sync_func grad_sync_func param_sync_func
        """,
    "details of fp8, fp4, Kitchen and autocast, which are refused themselves": """
        autocast_dtype fp8_recipe fp8_param fp8_quantizer_factory fp8_margin fp8_interval fp8_amax_history_len
        fp8_amax_compute_algo fp8_wgrad fp8_output_proj fp8_dot_product_attention fp8_multi_head_attention
        tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4_recipe
        fp4_param fp4_quantizer_factory use_kitchen_attention kitchen_attention_backend
        disable_parameter_transpose_cache
        """,
    "details of offloading the whole layer, which is refused, and of offloading other modules": """
        cpu_offloading_num_layers _cpu_offloading_context cpu_offloading_activations cpu_offloading_weights
        cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks activation_offload_fraction fine_grained_offloading_max_inflight_offloads
        """,
    "details of CUDA graphs, and old names that Megatron turns into cuda_graph_impl and cuda_graph_modules": """
        enable_cuda_graph external_cuda_graph cuda_graph_scope cuda_graph_use_single_mempool
        cuda_graph_retain_backward_graph inference_cuda_graph_scope
        """,
    "Megatron's inference engines, which are not tried with mok": """
        flash_decode batch_invariant_mode inference_rng_tracker inference_sampling_seed symmetric_ar_type
        nccl_all_reduce_for_prefill use_inference_optimized_layers inference_fuse_tp_communication
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type mlp_chunks_for_prefill
        """,
}
"""Why -> names."""


ARGUMENTS: dict[str, str] = {
    "other names of the config's fields": "num_experts",
    "what is built, before or beside the layers: dense layers made experts, blocks of other kinds": """
        moe_use_upcycling moe_upcycling_granularity hybrid_layer_pattern hybrid_override_pattern
        """,
    "hooks on the router, which is Megatron's own": """
        moe_routing_trace_path moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
        moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights
        """,
    "checkpoints and weights that are written between steps": """
        save_interval non_persistent_save_interval save_retain_interval save_params_interval save_wgrads_interval
        """,
    "details of FSDP, which is refused itself": """
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype
        megatron_fsdp_main_params_dtype megatron_fsdp_max_pool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail
        fsdp_double_buffer fsdp_manual_registration strict_fsdp_dtensor_load torch_fsdp2_reshard_after_forward
        enable_full_sharding_in_hsdp
        """,
    "reinforcement learning's own inference": """
        rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
        """,
}
"""Command-line arguments about experts or what is hooked and saved that are no fields of the config. Why -> names."""


def outside() -> set[str]:
    """The names of all these fields."""
    return {name for names in OUTSIDE.values() for name in names.split()}
