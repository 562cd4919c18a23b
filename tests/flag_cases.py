"""Every MoE-related option of Megatron that works with ``mok``, and how it is tried; docs/flags.md shows this list.

What is refused is in ``flag_refusals``; options that do not reach the MoE layer are in ``flag_fields``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests import moe_layers
from tests.moe_layers import EXPERTS, LAYER_CASES

Drive = Callable[[Any, Tensor], dict[str, Tensor]]
"""Runs a layer on x ``[S, B, H]``: quantity -> tensor."""


@dataclass(frozen=True)
class Layout:
    """Ranks of a layer test; every rank is one expert-parallel rank, and experts are whole on a rank."""

    world: int
    tensor: int = 1
    context: int = 1


@dataclass(frozen=True, kw_only=True)
class FlagCase:
    """Options that work together with ``mok``, and the trials that say so.

    Attributes:
        group: section of the page.
        title: what the options do; unique.
        options: as the page shows them, where that is not simply what is given below.
        changes: fields of TransformerConfig.
        layer: whether one layer is tried on the CPU against ``alltoall``, in ``layouts``.
        te: whether one layer is tried on a GPU with Transformer Engine's modules against ``alltoall``.
        layouts: of the layer test on the CPU.
        drive: how the layer is run; by default one forward and backward.
        exact: whether an fp32 layer without Transformer Engine can stand for the exact result; else ``mok`` is compared
            with ``alltoall`` itself.
        alltoall: fields that ``alltoall`` does not get in the trial with Transformer Engine, because it cannot run with
            them on every GPU.
        environment: variables that Megatron or Transformer Engine want, in the trials on a GPU.
        training: layout of tests/pretrain.py of a whole CPU training against ``alltoall``.
        gpu_training: arguments of a whole GPU training with Transformer Engine, against ``alltoall`` with ``model``.
        model: arguments that both dispatchers get in the GPU training, because they change the model.
        tests: other tests that try the options.
        note: what else is to say.
    """

    group: str
    title: str
    options: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    layer: bool = False
    te: bool = False
    layouts: tuple[Layout, ...] = (Layout(1), Layout(2))
    drive: Drive = moe_layers.run
    exact: bool = True
    alltoall: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    training: str = ""
    gpu_training: str | None = None
    model: str = ""
    tests: tuple[str, ...] = ()
    note: str = ""


def _padded(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """The last third of each sequence is padding: True, whatever the docstring of MoELayer says."""
    length, batch = x.shape[:2]
    padding = torch.arange(length, device=x.device).expand(batch, -1) >= 2 * length // 3
    return moe_layers.run(layer, x, padding_mask=padding)


def _packed(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """Packed sequences come as ``[T, 1, H]``, with another T in every call."""
    rows = x.reshape(-1, 1, x.shape[-1])
    found: dict[str, Tensor] = {}
    for call, tokens in enumerate((rows, rows[: len(rows) // 3], rows[1:])):
        found |= {f"{name}, call {call}": tensor for name, tensor in moe_layers.run(layer, tokens).items()}
    return found


def _replayed(layer: Any, x: Tensor) -> dict[str, Tensor]:
    """Record the routes, then replay others in forward and in a recomputation."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    replay = layer.router.router_replay
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    found = moe_layers.run(layer, x)
    others = (replay.get_recorded_indices() + 3) % EXPERTS
    replay.clear_indices()
    replay.set_target_indices(others)
    for action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD):
        replay.set_router_replay_action(action)
        found |= {f"{name}, {action.value}": tensor for name, tensor in moe_layers.run(layer, x).items()}
    return found


def _layers(group: str, cases: Mapping[str, Mapping[str, Any]], **common: Any) -> list[FlagCase]:
    return [FlagCase(group=group, title=t, changes=c, **{"layer": True, "te": True} | common) for t, c in cases.items()]


def _gpu_trainings(group: str, cases: Mapping[str, str], **common: Any) -> list[FlagCase]:
    return [FlagCase(group=group, title=title, gpu_training=args, **common) for title, args in cases.items()]


_SIGMOID = LAYER_CASES["sigmoid, groups, expert bias"]
_AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3}
_SHARED = {"moe_shared_expert_intermediate_size": 64}

ROUTER = [
    *_layers(
        "Router",
        {
            "softmax after the choice": {"moe_router_score_function": "softmax"},
            "softmax before the choice": LAYER_CASES["pre-softmax"],
            "one expert a token": LAYER_CASES["k1"],
            "every expert for every token": LAYER_CASES["all experts"],
            "sigmoid, groups, expert bias (DeepSeek-V3)": _SIGMOID,
            "square root of softplus": {"moe_router_score_function": "sqrtsoftplus", "moe_router_dtype": "fp32"},
            "square root of softplus with expert bias": {
                "moe_router_score_function": "sqrtsoftplus",
                "moe_router_enable_expert_bias": True,
                "moe_router_dtype": "fp32",
            },
            "scores in fp32": LAYER_CASES["router in fp32"],
            "scores in fp64": LAYER_CASES["router in fp64"],
            "no balancing": {"moe_router_load_balancing_type": "none"},
            "auxiliary loss": _AUX,
            "auxiliary loss per sequence": LAYER_CASES["sequence aux loss, sigmoid"],
            "auxiliary loss over all ranks": {**_AUX, "moe_router_load_balancing_type": "global_aux_loss"},
            "several auxiliary losses": {
                "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
                "moe_aux_loss_coeff": [0.3, 0.2, 0.1],
            },
            "z loss": {"moe_z_loss_coeff": 0.2},
            "losses per token": {**_AUX, "moe_z_loss_coeff": 0.2, "calculate_per_token_loss": True},
            "losses logged per layer": {**_AUX, "moe_per_layer_logging": True},
            "random routes for benchmarks": {"moe_router_force_load_balancing": True},
            "biased routes for benchmarks": {"moe_router_force_biased": 0.5},
            "dropping by capacity": LAYER_CASES["capacity drop"],
            "dropping by capacity and position": LAYER_CASES["capacity drop by position"],
            "quantile balancing": {
                "moe_router_load_balancing_type": "quantile_balancing",
                "moe_router_topk": 4,
                "moe_router_quantile_balancing_ema": 0.5,
            },
        },
    ),
    *_layers("Router", {"input jitter": {"moe_input_jitter_eps": 0.1}}, exact=False),
    *_layers(
        "Router", {"Sinkhorn": LAYER_CASES["sinkhorn"]},
        note="the TE layer with `alltoall` is given contiguous gradients in its router, which Megatron 0.19 forgets: "
        "without that `alltoall`'s gradient of the router's weight is wrong, that of `mok` is right",
    ),
    FlagCase(
        group="Router", title="groups by device", layer=True, layouts=(Layout(2),),
        changes={"moe_router_topk_limited_devices": 1, "expert_model_parallel_size": 2},
    ),
    FlagCase(
        group="Router", title="padding mask", options="`padding_mask`, an argument of the layer", changes=_AUX,
        layer=True, te=True, drive=_padded,
    ),
    FlagCase(
        group="Router", title="router replay", changes={"moe_enable_routing_replay": True}, layer=True, te=True,
        drive=_replayed,
    ),
    FlagCase(
        group="Router", title="fused router", te=True, options="`--moe-router-fusion`",
        changes={**_SIGMOID, **_AUX, "moe_router_topk": 2, "moe_router_fusion": True},
        note="Transformer Engine wants a --moe-router-topk that --moe-router-group-topk divides",
    ),
    FlagCase(group="Router", title="update of the expert bias", training="ep2-bias-update"),
]  # fmt: skip

LAYER = [
    *_layers(
        "Layer",
        {
            "shared expert": _SHARED,
            "shared expert with gate": {**_SHARED, "moe_shared_expert_gate": True},
            "shared expert beside latent experts": {"moe_latent_size": 64, **_SHARED},
            "clamped SwiGLU": LAYER_CASES["clamped swiglu"],
            "SwiGLU with offset": LAYER_CASES["swiglu with offset"],
            "fused SwiGLU": LAYER_CASES["fused swiglu"],
            "deterministic mode": {"deterministic_mode": True},
        },
    ),
    FlagCase(
        group="Layer", title="grouped GEMM experts", te=True, changes={"moe_grouped_gemm": True},
        note="every trial with TE has it",
    ),
    FlagCase(
        group="Layer", title="one grouped weight for all experts", changes={"moe_single_grouped_weight": True},
        tests=("test_cuda_te_layer.py::test_one_grouped_weight_gives_the_bits_of_one_weight_per_expert",),
    ),
    FlagCase(
        group="Layer", title="TE's operation fuser", te=True, changes={"use_transformer_engine_op_fuser": True},
        alltoall=("use_transformer_engine_op_fuser",), environment={"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"},
        note="nothing is left to fuse in the experts",
    ),
    FlagCase(group="Layer", title="TE's activation", te=True, changes={"use_te_activation_func": True}),
    FlagCase(
        group="Layer", title="fused permutation", te=True, changes={"moe_permute_fusion": True},
        note="nothing is left to fuse",
    ),
    FlagCase(
        group="Layer", title="gradients added into main_grad",
        options="`--no-gradient-accumulation-fusion` left out", training="ep2-fused-wgrad",
        tests=("test_cuda_te_training.py",), note="with that flag they are returned: training `ep2`",
    ),
    FlagCase(group="Layer", title="dense and MoE layers mixed", training="ep2", changes={"moe_layer_freq": [1]}),
    FlagCase(group="Layer", title="multi-token prediction", training="ep2-mtp", gpu_training="",
             model="--mtp-num-layers 1"),
    FlagCase(group="Layer", title="multi-token prediction by one repeated layer", training="ep1-mtp-repeated"),
    FlagCase(
        group="Layer", title="multi-latent attention", gpu_training="",
        model="--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 16 "
        "--v-head-dim 32 --rotary-scaling-factor 1",
    ),
    FlagCase(group="Layer", title="bf16", training="ep2", changes={"bf16": True},
             note="and fp32 on the reference backend",
             tests=("test_pretrain_layouts.py::test_equals_alltoall_in_bf16",)),
]  # fmt: skip

PARALLEL = [
    FlagCase(group="Parallelism", title="expert parallel", training="ep2", tests=("test_pretrain_checkpoint.py",),
             options="`--expert-model-parallel-size 2`", note="every layer trial on the CPU has it"),
    FlagCase(
        group="Parallelism", title="expert and expert-data parallel, distributed optimizer, overlapped communication",
        training="ep2-edp2-overlap",
    ),
    FlagCase(
        group="Parallelism", title="tensor parallel with sequence parallel", layer=True,
        options="`--tensor-model-parallel-size 2` `--sequence-parallel` `--expert-tensor-parallel-size 1`",
        changes={**_SIGMOID, **_AUX, **_SHARED, "moe_shared_expert_gate": True, "sequence_parallel": True,
                 "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        layouts=(Layout(2, tensor=2), Layout(4, tensor=2)),
        note="one layer only; without sequence parallel Megatron refuses to train MoE layers",
    ),
    FlagCase(
        group="Parallelism", title="context parallel", layer=True, options="`--context-parallel-size 2`",
        changes={**_SIGMOID, **_AUX, **_SHARED, "context_parallel_size": 2},
        layouts=(Layout(2, context=2),), note="one layer only",
    ),
    FlagCase(
        group="Parallelism", title="tensor, sequence and context parallel", layer=True, options="all of these",
        changes={**_SIGMOID, **_AUX, **_SHARED, "sequence_parallel": True, "tensor_model_parallel_size": 2,
                 "context_parallel_size": 2, "expert_tensor_parallel_size": 1},
        layouts=(Layout(4, tensor=2, context=2),), note="one layer only",
    ),
    FlagCase(group="Parallelism", title="pipeline parallel", training="pp2"),
    FlagCase(group="Parallelism", title="virtual pipeline stages", training="pp2-vpp2"),
    FlagCase(group="Parallelism", title="pipeline and expert parallel", training="ep2-pp2"),
    FlagCase(
        group="Parallelism", title="packed sequences (thd)", layer=True, te=True, drive=_packed,
        options="`PackedSeqParams`, variable_seq_lengths",
        changes={**_SIGMOID, "variable_seq_lengths": True},
        note="one layer: `[T, 1, H]` with another T in every call",
    ),
    FlagCase(
        group="Parallelism", title="sequences spread over a varying number of ranks",
        changes={"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 64}, tests=("test_most_tokens.py",),
        note="only the bound on a rank's tokens is tried; the layer takes any number",
    ),
    FlagCase(group="Parallelism", title="MLP in chunks", training="ep2-mlp-chunks"),
]  # fmt: skip

_SELECTIVE = "--recompute-granularity selective --recompute-modules"
_GRAPH = "--cuda-graph-warmup-steps 1 --cuda-graph-impl"
_OFFLOAD = "--fine-grained-activation-offloading --min-offloaded-tensor-size 0 --offload-modules"

MEMORY = [
    FlagCase(group="Recomputation", title="the MoE layer", gpu_training=f"{_SELECTIVE} moe",
             training="ep2-recompute-moe", tests=("test_layer_bitwise.py::test_bits_do_not_change",)),
    FlagCase(group="Recomputation", title="the shared expert", gpu_training=f"{_SELECTIVE} shared_experts",
             tests=("test_layer_bitwise.py::test_bits_do_not_change",)),
    FlagCase(group="Recomputation", title="everything",
             gpu_training="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
             training="ep2-recompute-full"),
    FlagCase(group="Recomputation", title="the experts' activation", gpu_training=f"{_SELECTIVE} moe_act",
             note="nothing is left to recompute: the activation is never kept"),
    FlagCase(group="Recomputation", title="the old flag for the MoE layer", gpu_training="--moe-layer-recompute "
             "--recompute-granularity selective"),
    FlagCase(group="Recomputation", title="the layer norms", gpu_training=f"{_SELECTIVE} layernorm",
             tests=("test_flags.py::test_a_recomputed_norm_before_the_layer_changes_no_bit",),
             note="with TE's graph of the router Megatron recomputes the norm before it for `alltoall` alone, and says "
             "so in a warning"),
    *_gpu_trainings(
        "Recomputation",
        {
            "the attention's core": f"{_SELECTIVE} core_attn",
            "dense MLPs": f"{_SELECTIVE} mlp",
        },
    ),
    FlagCase(group="Recomputation", title="MLA's up projections", gpu_training=f"{_SELECTIVE} mla_up_proj",
             model="--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 "
             "--qk-pos-emb-head-dim 16 --v-head-dim 32 --rotary-scaling-factor 1"),
    *_gpu_trainings(
        "CUDA graphs",
        {
            "TE: attention": f"{_GRAPH} transformer_engine --cuda-graph-modules attn",
            "TE: attention and dense MLPs": f"{_GRAPH} transformer_engine --cuda-graph-modules attn mlp",
            "TE: attention and router": f"{_GRAPH} transformer_engine --cuda-graph-modules attn moe_router",
            "TE: attention, router and preprocessing":
                f"{_GRAPH} transformer_engine --cuda-graph-modules attn moe_router moe_preprocess",
            "TE: whole layers": f"{_GRAPH} transformer_engine",
            "local: attention": f"{_GRAPH} local --cuda-graph-modules attn",
            "local: whole layers": f"{_GRAPH} local",
            "full iteration": f"{_GRAPH} full_iteration --no-check-for-nan-in-loss-and-grad",
        },
    ),
    *_gpu_trainings(
        "CUDA graphs",
        {
            "local: router and preprocessing": f"{_GRAPH} local --cuda-graph-modules moe_router moe_preprocess",
            "local: router and preprocessing, the MoE layer recomputed":
                f"{_GRAPH} local --cuda-graph-modules moe_router moe_preprocess {_SELECTIVE} moe",
        },
        note="Megatron 0.19 captures nothing with it in a GPT model, as is tried, only in hybrid models, which are not",
    ),
    *_gpu_trainings(
        "Offload",
        {
            "attention's activations": f"{_OFFLOAD} attn_norm qkv_linear core_attn attn_proj",
            "input of the norm before the experts": f"{_OFFLOAD} mlp_norm",
        },
        environment={"NVTE_CPU_OFFLOAD_V1": "1"},
        note="Megatron wants `NVTE_CPU_OFFLOAD_V1=1` in the environment",
    ),
]  # fmt: skip

CASES: tuple[FlagCase, ...] = (*ROUTER, *LAYER, *PARALLEL, *MEMORY)
