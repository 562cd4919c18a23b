"""What one layer costs, by kind: parameters, forward FLOPs and saved activation bytes per token.

Averages over the layers of a kind, from the same parameter counts that the configs are checked with. Bytes are bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mok_megatron.architecture import Architecture, Gqa, Mla
from mok_megatron.params import count_params

BF16 = 2
FP32 = 4


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Per layer; ``*_saved`` are bytes kept per token for backward, before any recompute.

    Attributes:
        attention_params, dense_params, shared_params, router_params, expert_params: weights of one layer; the last is
            one expert's.
        core_flops_per_key: attention FLOPs per token and key that it sees.
        max_keys: keys that sparse attention keeps (None: all).
        core_layers_share: share of layers whose attention is quadratic.
        norm_saved: outputs of the two norms. residual_saved: inputs of the two halves of the layer.
        up_saved: per-head tensors that MLA rebuilds from its latents (0 for GQA).
        attention_saved: what else attention keeps.
    """

    hidden: int
    attention_params: float
    dense_params: float
    shared_params: float
    router_params: float
    expert_params: float
    norm_params: float
    mtp_extra_params: float
    core_flops_per_key: float
    max_keys: int | None
    core_layers_share: float
    norm_saved: float
    residual_saved: float
    up_saved: float
    attention_saved: float
    dense_saved: float
    shared_saved: float
    router_saved: float


@lru_cache(maxsize=32)
def layer_costs(arch: Architecture) -> LayerCosts:
    """Costs of the layers of ``arch``. An attention that Megatron cannot express costs what its stand-in does."""
    counts, moe, hidden = count_params(arch), arch.moe, arch.hidden
    attention = arch.flag_attention
    if isinstance(attention, Mla):
        wide = attention.heads * (2 * (attention.nope_dim + attention.rope_dim) + attention.v_dim)
        latents = 2 * ((attention.q_rank or 0) + attention.kv_rank + attention.rope_dim)
        out, pair = attention.heads * attention.v_dim, attention.nope_dim + attention.rope_dim + attention.v_dim
        up, kept = wide, latents + out
        max_keys = attention.indexer.top_k if attention.indexer else None
    else:
        assert isinstance(attention, Gqa)
        query, key_value = attention.heads * attention.head_dim, 2 * attention.kv_heads * attention.head_dim
        copies = 2 if attention.qk_norm else 1
        up, kept = 0, copies * query + key_value + query * (2 if attention.output_gate else 1)
        pair, max_keys = 2 * attention.head_dim, None
    full = sum(arch.is_full_attention(layer) for layer in range(1, arch.layers + 1))
    return LayerCosts(
        hidden=hidden,
        attention_params=counts.attention / arch.layers,
        dense_params=3 * hidden * arch.ffn_hidden,
        shared_params=counts.shared / arch.moe_layers,
        router_params=counts.router / arch.moe_layers,
        expert_params=counts.routed / arch.moe_layers / moe.experts,
        norm_params=2 * hidden,
        mtp_extra_params=2 * hidden * hidden + 3 * hidden,
        core_flops_per_key=2.0 * attention.heads * pair,
        max_keys=max_keys,
        core_layers_share=full / arch.layers,
        norm_saved=BF16 * hidden,
        residual_saved=BF16 * 2 * hidden,
        up_saved=BF16 * up,
        attention_saved=BF16 * (kept + hidden) + FP32 * attention.heads,
        dense_saved=BF16 * (3 * arch.ffn_hidden + hidden),
        shared_saved=BF16 * 3 * (moe.shared_intermediate or 0),
        router_saved=(2 * FP32 + 1) * moe.experts,
    )


def core_flops(costs: LayerCosts, seq_length: int) -> float:
    """Forward FLOPs of causal attention per token and layer: half of the sequence is seen on average."""
    keys = seq_length / 2 if costs.max_keys is None else min(seq_length / 2, costs.max_keys)
    return costs.core_flops_per_key * keys * costs.core_layers_share
