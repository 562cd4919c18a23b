"""Which options of Megatron ``mok`` honours, and which it refuses, with reason and remedy: the only list.

No option is accepted and then ignored. ``check_config`` runs when a TransformerConfig asks for ``mok``; docs/options.md
shows the tables, and a test compares it with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mok_megatron.config import MAX_TOP_K
from mok_megatron.honoured import HONOURED


def flag_of(name: str) -> str:
    """The command-line option that Megatron makes of a field or argument ``name``."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Refusal:
    """One configuration that ``mok`` does not honour.

    Attributes:
        field: field of TransformerConfig.
        values: the refused values, in words.
        refuses: whether this config is refused; called with the config and the field's value.
        reason: why.
        remedy: what to do.
        flag: how the command line sets it, where it is not the field's own name.
        resolved: whether the value is only known after Megatron's own ``__post_init__``.
    """

    field: str
    values: str
    refuses: Callable[[Any, Any], bool]
    reason: str
    remedy: str = "Leave it at its default"
    flag: str = ""
    resolved: bool = False

    @property
    def option(self) -> str:
        """The command-line option."""
        return self.flag or flag_of(self.field)

    def message(self, value: Any) -> str:
        """The text of the ValueError."""
        shown = getattr(value, "__name__", None) or repr(value)
        return (
            f"moe_token_dispatcher_type='mok' does not support {self.field}={shown} ({self.option}): "
            f"{self.reason}. {self.remedy}"
        )


def _on(_config: Any, value: Any) -> bool:
    return bool(value)


def _given(_config: Any, value: Any) -> bool:
    return value is not None


def _above_one(_config: Any, value: Any) -> bool:
    return value is not None and value > 1


def _is(refused: Any) -> Callable[[Any, Any], bool]:
    return lambda _config, value: value == refused


def _changed(name: str) -> Callable[[Any, Any], bool]:
    return lambda config, value: value != _defaults(config)[name]


def _not_silu(_config: Any, value: Any) -> bool:
    import torch.nn.functional

    return value is not torch.nn.functional.silu


def _other_dtype(_config: Any, value: Any) -> bool:
    import torch

    return value not in (torch.bfloat16, torch.float32)


def _fused_activation(config: Any) -> bool:
    # Transformer Engine's fuser knows the plain SwiGLU alone, as the two others do.
    names = ("bias_activation_fusion", "use_te_activation_func", "use_transformer_engine_op_fuser")
    return any(getattr(config, name, False) for name in names)


def _clamp_lost(config: Any, value: Any) -> bool:
    return value is not None and _fused_activation(config)


def _offset_lost(config: Any, value: Any) -> bool:
    return value != 0.0 and _fused_activation(config)


def _indivisible(config: Any, value: Any) -> bool:
    return bool(value % config.expert_model_parallel_size)


def _above_experts(config: Any, value: Any) -> bool:
    return bool(value > config.num_moe_experts)


def _above_max_top_k(_config: Any, value: Any) -> bool:
    return bool(value > MAX_TOP_K)


def _offloads_experts(config: Any, value: Any) -> bool:
    offloaded = {"expert_fc1", "moe_act", "fused_group_mlp"} & set(value or ())
    return bool(config.fine_grained_activation_offloading and offloaded)


def _defaults(config: Any) -> dict[str, Any]:
    """Field name -> default, of a config's own class."""
    return {
        field.name: field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        for field in dataclasses.fields(config)
    }


CONFIG_ONLY = "no flag, config only"
_LAYOUT = "the experts' weights are gate rows, then up rows, without a bias"
_PRECISION = "the experts run in bf16 (or fp32 on the reference backend)"
_ONE_KERNEL = "dispatch, experts and combine are one operation, which cannot be taken apart"
_KEPT = "what the layer keeps for backward stays on the device"
_FUSED_LOSES = "Megatron's fused SwiGLU ignores it and mok applies it, so the model would depend on the dispatcher"
_QUANTIZED_PADDING = "it routes padding rows, for quantized experts, which mok does not have"
_FLEX = "it tunes the flex dispatcher, which mok replaces"
_NO_FUSED_SWIGLU = (
    "Add --no-bias-swiglu-fusion and leave use_te_activation_func and use_transformer_engine_op_fuser off"
)
_WGRAD_HIDDEN = "Leave it off: the weight gradients already hide the combine of the input gradient"
_FUSED_ONLY = "set, together with bias_activation_fusion, use_te_activation_func or use_transformer_engine_op_fuser"


def _flex(name: str, values: str = "changed", remedy: str = "Leave it at its default") -> Refusal:
    return Refusal(name, values, _changed(name), _FLEX, remedy)


# fmt: off
REFUSALS: tuple[Refusal, ...] = (
    # Sizes.
    Refusal("num_moe_experts", "not divisible by the expert-parallel size", _indivisible,
            "every rank holds the same number of experts",
            "Choose an --expert-model-parallel-size that divides the number of experts", "--num-experts"),
    Refusal("moe_router_topk", "above num_moe_experts", _above_experts,
            "a token cannot go to more experts than there are", "Lower it, or raise --num-experts"),
    Refusal("moe_router_topk", f"above {MAX_TOP_K}", _above_max_top_k,
            f"a token goes to at most {MAX_TOP_K} experts", "Lower it, or use another dispatcher"),
    # The experts' arithmetic and weights.
    Refusal("gated_linear_unit", "False", _is(False), "the experts' activation is SwiGLU", "Add --swiglu", "--swiglu"),
    Refusal("activation_func", "anything but silu", _not_silu, "the experts' activation is SwiGLU",
            "Use --swiglu, or another dispatcher", "--swiglu"),
    Refusal("add_bias_linear", "True", _on, _LAYOUT, "Add --disable-bias-linear", "--disable-bias-linear"),
    Refusal("activation_func_clamp_value", _FUSED_ONLY, _clamp_lost, _FUSED_LOSES, _NO_FUSED_SWIGLU),
    Refusal("glu_linear_offset", _FUSED_ONLY, _offset_lost, _FUSED_LOSES, _NO_FUSED_SWIGLU),
    Refusal("activation_func_fp8_input_store", "True", _on,
            "gate and up are kept for backward in the layer's precision", "Use --mok-recompute to save that memory",
            CONFIG_ONLY),
    Refusal("moe_apply_probs_on_input", "True", _on,
            "the router weight is applied to the activation, between the two matrix products"),
    Refusal("moe_mlp_glu_interleave_size", "set", _given, _LAYOUT),
    Refusal("moe_single_grouped_bias", "True", _on, _LAYOUT),
    Refusal("use_grouped_gemm_for_shared_expert", "True", _on,
            "Megatron computes this shared expert in mxfp8 or nvfp4 only, and the experts run in bf16"),
    Refusal("moe_shared_expert_glu_interleave_size", "set", _given,
            "it belongs to use_grouped_gemm_for_shared_expert"),
    # Precision.
    Refusal("fp16", "True", _on, _PRECISION, "Use --bf16"),
    Refusal("params_dtype", "anything but bfloat16 and float32", _other_dtype, _PRECISION, "Use --bf16", "--bf16"),
    Refusal("fp8", "set", _given, _PRECISION, flag="--fp8-format"),
    Refusal("fp4", "set", _given, _PRECISION, flag="--fp4-format"),
    Refusal("quant_recipe", "set", _given, _PRECISION, flag="--te-precision-config-file"),
    Refusal("use_kitchen", "True", _on, _PRECISION, flag="--kitchen-config-file"),
    Refusal("enable_autocast", "True", _on,
            "the layer computes in the dtype of its weights, whatever torch.autocast says",
            "Use --bf16 instead of autocast", CONFIG_ONLY),
    # Padding and capacity.
    Refusal("moe_pad_expert_input_to_capacity", "True", _on, "rows are padded to the tile height only",
            "Leave it off; --moe-expert-capacity-factor alone drops tokens as with alltoall"),
    Refusal("moe_pad_experts_for_cuda_graph_inference", "True", _on,
            "it pads to capacity to avoid a host sync, which mok does not have"),
    Refusal("moe_router_padding_for_quantization", "True", _on, _QUANTIZED_PADDING),
    Refusal("moe_router_padding_for_fp8", "True", _on, _QUANTIZED_PADDING),
    Refusal("moe_expert_rank_capacity_factor", "set", _given, "mok drops no token",
            "Leave it unset; --mok-ring-rows bounds the memory"),
    Refusal("moe_token_dropping", "True", _on, "Megatron itself does not support it", flag=CONFIG_ONLY),
    # Parallelism.
    Refusal("expert_tensor_parallel_size", "above 1", _above_one,
            "every expert is whole on one rank (the default is the tensor-parallel size)",
            "Set --expert-tensor-parallel-size 1", resolved=True),
    Refusal("expert_gtp_weight_remat_size", "above 1", _above_one, "every expert is whole on one rank",
            flag="--expert-tensor-parallel-num-weight-shards", resolved=True),
    Refusal("overlap_moe_expert_parallel_comm", "True", _on, _ONE_KERNEL,
            "Leave it off: the kernel hides communication behind the experts itself"),
    Refusal("ep_overlap_early_attn_memory_release", "True", _on, "it belongs to overlap_moe_expert_parallel_comm"),
    Refusal("high_priority_a2a_comm_stream", "True", _on, "it belongs to overlap_moe_expert_parallel_comm"),
    Refusal("delay_wgrad_compute", "True", _on, _ONE_KERNEL, _WGRAD_HIDDEN),
    Refusal("overlap_dispatch_backward_with_experts_wgrad", "True", _on, _ONE_KERNEL, _WGRAD_HIDDEN),
    Refusal("moe_shared_expert_overlap", "True", _on, "there is no separate dispatch to run the shared expert beside",
            "Leave it off: the shared expert runs before the router"),
    # Memory.
    Refusal("cpu_offloading", "True", _on, _KEPT, "Use --mok-recompute, or recompute the layer",
            "--cpu-offloading-num-layers"),
    Refusal("offload_modules", "with expert_fc1, moe_act or fused_group_mlp", _offloads_experts, _KEPT,
            "Use --mok-recompute, or offload other modules"),
    Refusal("moe_paged_stash", "True", _on, _KEPT, "Use --mok-recompute, or recompute the layer"),
    Refusal("moe_paged_stash_page_size", "changed", _changed("moe_paged_stash_page_size"), _KEPT),
    Refusal("moe_paged_stash_buffer_size_factor_cuda", "changed", _changed("moe_paged_stash_buffer_size_factor_cuda"),
            _KEPT),
    Refusal("moe_paged_stash_buffer_size_factor_cpu", "changed", _changed("moe_paged_stash_buffer_size_factor_cpu"),
            _KEPT),
    # Other ways to run the layer.
    Refusal("transformer_impl", "'inference_optimized'", _is("inference_optimized"),
            "it brings a dispatcher and experts of its own", "Use transformer_engine or local"),
    Refusal("moe_megakernel_backend", "set", _given, "it replaces the same part of the layer", "Use one of the two"),
    _flex("moe_enable_deepep", "True"),
    _flex("moe_flex_dispatcher_backend"),
    _flex("moe_permute_fusion_into_hybridep", "True"),
    _flex("moe_hybridep_pad_uneven_dispatch_inputs", "True", "Leave it off: ranks may hold any number of tokens"),
    _flex("moe_flex_dispatcher_num_sms", remedy="Use --mok-comm-sms"),
    _flex("moe_deepep_num_sms", remedy="Use --mok-comm-sms"),
    _flex("moe_hybridep_num_sms", remedy="Use --mok-comm-sms"),
    _flex("moe_hybridep_num_blocks_permute"),
    _flex("moe_hybridep_num_blocks_unpermute"),
    _flex("moe_hybridep_num_sms_preprocessing"),
    _flex("moe_ncclep_static_shape", "True"),
    _flex("moe_ncclep_zero_copy", "True"),
    _flex("moe_dispatch_fwd_dtype"),
    _flex("moe_combine_bwd_dtype"),
)
# fmt: on


_SHARDED = "it shards the experts' weights. Use --use-distributed-optimizer"
_LOGGED = "it hooks the experts' linear layers, which are not called. Leave it off, or use another dispatcher"

TRAINING_ARGUMENTS: dict[str, str] = {
    "use_megatron_fsdp": _SHARDED,
    "use_torch_fsdp2": _SHARDED,
    "save_activations_interval": _LOGGED,
    "save_dgrads_interval": _LOGGED,
    "save_tokens_per_expert_interval": _LOGGED,
}
"""Arguments of Megatron's training that are no fields of the config, refused when they are given: reason and remedy."""


def check_training_arguments(arguments: Any) -> None:
    """Raise ValueError, naming the option, for one that ``mok`` cannot honour; None for a run without arguments."""
    for name, why in TRAINING_ARGUMENTS.items():
        if getattr(arguments, name, None):
            raise ValueError(f"moe_token_dispatcher_type='mok' does not support {flag_of(name)}: {why}")


def check_config(config: Any, *, resolved: bool) -> None:
    """Raise ValueError for a TransformerConfig that ``mok`` does not honour; nothing is changed.

    ``resolved`` says whether Megatron's own ``__post_init__`` has filled in the values that were left open. A config
    without experts is none of our business.
    """
    if config.num_moe_experts is None:
        return
    names = {field.name for field in dataclasses.fields(config)}
    for refusal in REFUSALS:
        if refusal.field in names and (resolved or not refusal.resolved):
            value = getattr(config, refusal.field)
            if refusal.refuses(config, value):
                raise ValueError(refusal.message(value))
    decided = {refusal.field for refusal in REFUSALS} | set(HONOURED)
    defaults = _defaults(config)
    for name in sorted(name for name in names if name.startswith("moe_") and name not in decided):
        value = getattr(config, name)
        if value != defaults[name]:
            raise ValueError(
                f"moe_token_dispatcher_type='mok' does not know the option {name}={value!r} of this megatron-core, and "
                f"does not guess whether it would be honoured: leave it at its default {defaults[name]!r}, use another "
                f"dispatcher, or a newer mok_megatron"
            )


def captures_experts(config: Any) -> bool:
    """Whether a CUDA graph of this (resolved) config would capture the routed experts."""
    if getattr(config, "cuda_graph_impl", "none") == "none":
        return False
    modules = getattr(config, "cuda_graph_modules", None)
    if modules is None:
        modules = config.cuda_graph_scope
    names = {getattr(module, "name", str(module)) for module in modules or ()}
    return not names or bool(names & {"moe", "full", "full_iteration"})
