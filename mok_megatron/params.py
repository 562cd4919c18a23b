"""Parameter counts of an architecture, by part."""

from __future__ import annotations

from dataclasses import dataclass

from mok_megatron.architecture import Architecture, Gqa, Indexer, LinearAttention, Mla, OtherAttention


@dataclass(frozen=True, kw_only=True)
class ParamCount:
    """Parameters by part, all layers together; ``mtp`` parts are apart because published totals differ on them."""

    embedding: int
    output: int
    attention: int
    dense_mlp: int
    router: int
    routed: int
    routed_active: int
    shared: int
    norms: int
    extra: int
    mtp: int
    mtp_active: int

    @property
    def other(self) -> int:
        """All that every token uses, without embedding, output head and MTP."""
        return self.attention + self.dense_mlp + self.router + self.shared + self.norms + self.extra

    @property
    def total(self) -> int:
        """All parameters, without MTP."""
        return self.embedding + self.output + self.other + self.routed

    @property
    def active(self) -> int:
        """Parameters that one token uses, without MTP; the embedding table counts in full."""
        return self.embedding + self.output + self.other + self.routed_active


def count_params(arch: Architecture) -> ParamCount:
    """Count the parameters of ``arch``.

    With H hidden, I expert width, E experts, K top-k, L MoE layers, D dense layers, V vocabulary::

        routed     = L * E * 3 * H * I                     (gate, up and down projection; K of E are active)
        shared     = L * (3 * H * I_shared + H if gated)
        router     = L * (E * H + E if it has a bias)      (hash layers have none)
        dense MLP  = D * 3 * H * F
        embedding  = V * H, and as much again for the output head unless tied
        norms      = (layers * 2 + 1) * H
        GQA        = H * d * (heads * (2, or 3 with an output gate) + 2 * kv_heads), and small norms and biases
        MLA        = H * q + q * heads * (nope + rope) + H * (kv + rope) + kv * heads * (nope + v) + heads * v * H
        gated delta net = H * (2 * keys + 2 * values + 2 * value_heads) + values * H + convolution and gates
        MTP layer  = one MoE layer with full attention and an indexer of its own + 2 * H * H + 3 * H

    With a latent width l, routed experts see l in place of H, and 2 * H * l is added per MoE layer.
    """
    moe, hidden = arch.moe, arch.hidden
    routed_hidden = moe.latent or hidden
    expert = 3 * routed_hidden * moe.intermediate
    latent = 2 * hidden * moe.latent if moe.latent else 0
    shared = 3 * hidden * (moe.shared_intermediate or 0) + (hidden if moe.shared_gate else 0) + latent
    router = hidden * moe.experts + (moe.experts if moe.router.expert_bias else 0)
    mtp_rest = _full_attention(arch, mtp=True) + shared + router + 2 * hidden + 2 * hidden * hidden + 3 * hidden
    return ParamCount(
        embedding=arch.vocab * hidden,
        output=0 if arch.tied_embeddings else arch.vocab * hidden,
        attention=_attention(arch),
        dense_mlp=arch.dense_layers * 3 * hidden * arch.ffn_hidden,
        router=(arch.moe_layers - moe.router.hash_layers) * router,
        routed=arch.moe_layers * moe.experts * expert,
        routed_active=arch.moe_layers * moe.top_k * expert,
        shared=arch.moe_layers * shared,
        norms=(2 * arch.layers + 1) * hidden,
        extra=arch.extra_params,
        mtp=arch.mtp_layers * (mtp_rest + moe.experts * expert),
        mtp_active=arch.mtp_layers * (mtp_rest + moe.top_k * expert),
    )


def _attention(arch: Architecture) -> int:
    """All main layers' attention."""
    if isinstance(arch.attention, OtherAttention):
        return arch.attention.params
    total = 0
    for layer in range(1, arch.layers + 1):
        if arch.is_full_attention(layer):
            total += _full_attention(arch)
            if isinstance(arch.attention, Mla) and arch.attention.indexer and arch.attention.indexer.owned_by(layer):
                total += _indexer(arch.hidden, arch.attention.q_rank or arch.hidden, arch.attention.indexer)
        elif arch.linear_attention is not None:
            total += _linear_attention(arch.hidden, arch.linear_attention)
    return total


def _full_attention(arch: Architecture, mtp: bool = False) -> int:
    """One layer of full attention, without its input norm; the indexer is counted apart, except for an MTP layer."""
    attention = arch.attention
    if isinstance(attention, OtherAttention):
        return attention.mtp_params if mtp else 0
    if isinstance(attention, Gqa):
        return _gqa(arch.hidden, attention)
    indexer = 0
    if mtp and attention.indexer is not None:
        indexer = _indexer(arch.hidden, attention.q_rank or arch.hidden, attention.indexer)
    return _mla(arch.hidden, attention) + indexer


def _gqa(hidden: int, a: Gqa) -> int:
    query = a.heads * a.head_dim * (2 if a.output_gate else 1)
    key_value = 2 * a.kv_heads * a.head_dim
    small = (2 * a.head_dim if a.qk_norm else 0) + (query + key_value if a.qkv_bias else 0)
    return hidden * (query + key_value + a.heads * a.head_dim) + small


def _mla(hidden: int, a: Mla) -> int:
    query = a.heads * (a.nope_dim + a.rope_dim)
    queries = hidden * query if a.q_rank is None else a.q_rank * (hidden + query + 1)
    key_value = hidden * (a.kv_rank + a.rope_dim) + a.kv_rank * (a.heads * (a.nope_dim + a.v_dim) + 1)
    return queries + key_value + a.heads * a.v_dim * hidden


def _indexer(hidden: int, q_rank: int, indexer: Indexer) -> int:
    query = q_rank * indexer.heads * indexer.head_dim
    return query + hidden * indexer.head_dim + 2 * indexer.head_dim + hidden * indexer.heads


def _linear_attention(hidden: int, a: LinearAttention) -> int:
    keys, values = a.key_heads * a.key_dim, a.value_heads * a.value_dim
    inputs = hidden * (2 * keys + 2 * values + 2 * a.value_heads)
    small = (2 * keys + values) * a.conv + 2 * a.value_heads + a.value_dim
    return inputs + values * hidden + small
