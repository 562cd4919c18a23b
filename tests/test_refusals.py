"""Which configurations are refused, with which message; every MoE option of Megatron is decided."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

import pytest
import torch

import mok_megatron  # noqa: F401 (installs the hooks)
from mok_megatron import refusals
from mok_megatron.honoured import HONOURED
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
    ],
    "glu_linear_offset": [{"glu_linear_offset": 1.0, "bias_activation_fusion": True}],
    "activation_func_fp8_input_store": [{"activation_func_fp8_input_store": True}],
    "moe_apply_probs_on_input": [{"moe_apply_probs_on_input": True}],
    "moe_mlp_glu_interleave_size": [{"moe_mlp_glu_interleave_size": 32}],
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

HONOURED_CHANGES: list[dict[str, Any]] = [
    *moe_layers.LAYER_CASES.values(),
    {"bf16": True, "params_dtype": torch.bfloat16},
    {"recompute_granularity": "selective", "recompute_modules": ["moe", "shared_experts"]},
    {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True},
    {"gradient_accumulation_fusion": True},
    {"moe_latent_size": 16},
    {"moe_layer_freq": [1]},
    {"num_moe_experts": None, "moe_ffn_hidden_size": None, "add_bias_linear": True},
    {"fine_grained_activation_offloading": False, "offload_modules": ["expert_fc1"]},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True},
    {"variable_seq_lengths": True},
]


def _config_fields() -> list[dataclasses.Field[Any]]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return list(dataclasses.fields(TransformerConfig))


def _with_field(field: str, default: Any) -> type:
    """TransformerConfig with one field more, as a newer Megatron may have it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return dataclasses.make_dataclass("NewerConfig", [(field, Any, default)], bases=(TransformerConfig,))


def test_every_refusal_has_its_trigger() -> None:
    counts: dict[str, int] = {}
    for refusal in refusals.REFUSALS:
        counts[refusal.field] = counts.get(refusal.field, 0) + 1
    assert set(TRIGGERS) == set(counts)
    assert all(len(TRIGGERS[field]) >= count for field, count in counts.items())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("field", "changes"), [(field, changes) for field, triggers in TRIGGERS.items() for changes in triggers]
)
def test_refused_with_option_value_reason_and_remedy(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="moe_token_dispatcher_type='mok' does not support") as caught:
        if field in NOT_YET_IN_A_RELEASE and field not in {f.name for f in _config_fields()}:
            newer = _with_field(field, NOT_YET_IN_A_RELEASE[field])
            newer(**moe_layers.config_arguments())
            newer(**moe_layers.config_arguments(**changes))
        else:
            moe_layers.make_config(**changes)
    message = str(caught.value)
    refusal = next(r for r in refusals.REFUSALS if r.field == field and r.reason in message)
    assert f" {field}=" in message
    assert f"({refusal.option})" in message
    assert message.endswith(refusal.remedy)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("changes", HONOURED_CHANGES, ids=str)
def test_honoured_configs_are_accepted(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = moe_layers.make_config(**changes)
    assert config.moe_token_dispatcher_type == "mok"
    refusals.check_config(config, resolved=True)


def test_other_dispatchers_are_left_alone() -> None:
    assert moe_layers.make_config("alltoall", add_bias_linear=True, gated_linear_unit=False)


def test_every_moe_option_of_this_megatron_is_decided_once() -> None:
    """A new option of Megatron must be looked at; with a value of its own it is refused until then."""
    refused = {refusal.field for refusal in refusals.REFUSALS}
    names = {field.name for field in _config_fields()}
    assert {name for name in names if name.startswith("moe_")} <= refused | set(HONOURED)
    # num_moe_experts and the like are honoured within limits, which the table of refusals states.
    limited = {"num_moe_experts", "moe_router_topk", "activation_func_clamp_value", "glu_linear_offset"}
    assert refused & set(HONOURED) == limited


def test_an_option_of_a_newer_megatron_is_refused_unless_default() -> None:
    newer = _with_field("moe_teleport", 3)
    assert newer(**moe_layers.config_arguments()).moe_teleport == 3
    with pytest.raises(ValueError, match=r"does not know the option moe_teleport=4 .*default 3"):
        newer(**moe_layers.config_arguments(moe_teleport=4))


def test_flags_of_the_table_are_flags_of_megatron() -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {flag for action in parser._actions for flag in action.option_strings}
    known |= {refusals.CONFIG_ONLY, "--kitchen-config-file"}  # the latter where Kitchen is installed
    named = {r.option for r in refusals.REFUSALS if r.field not in NOT_YET_IN_A_RELEASE}
    named |= {flag for r in refusals.REFUSALS for flag in re.findall(r"--[a-z0-9-]+", r.remedy)}
    assert named <= known, sorted(named - known)


class _Graphs:
    def __init__(self, impl: str, modules: Any) -> None:
        self.cuda_graph_impl, self.cuda_graph_modules = impl, modules


@pytest.mark.parametrize(
    ("impl", "modules", "captures"),
    [
        ("none", [], False),
        ("local", [], True),
        ("full_iteration", [], True),
        ("transformer_engine", ["moe"], True),
        ("transformer_engine", ["attn", "moe_router"], False),
        ("transformer_engine", ["attn", "moe_router", "moe_preprocess"], False),
    ],
)
def test_graphs_that_capture_the_experts(impl: str, modules: list[str], captures: bool) -> None:
    assert refusals.captures_experts(_Graphs(impl, modules)) is captures
