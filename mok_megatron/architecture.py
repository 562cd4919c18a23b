"""What a model is: the architecture part of a model config. Sizes only; how it is trained is in model_config.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mok_megatron.config import Activation, MoeShape


def require_at_least(owner: object, minimum: int, *names: str) -> None:
    """Raise ValueError naming the first of the fields ``names`` that is set and below ``minimum``."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and value < minimum:
            raise ValueError(f"{name} must be >= {minimum}, got {value}")


@dataclass(frozen=True, kw_only=True)
class Gqa:
    """Grouped-query attention. ``output_gate``: the output is gated by a projection as wide as the queries."""

    kind: Literal["gqa"] = "gqa"
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    qkv_bias: bool = False
    output_gate: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, 1, "heads", "kv_heads", "head_dim")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Indexer of sparse attention (Megatron's ``dsa``): scores tokens and keeps the best ``top_k``.

    With ``share_every`` n > 1, layers 1 .. max(share_offset, 1) and every n-th after them choose (and own an indexer);
    the layers between reuse their choice.
    """

    heads: int
    head_dim: int
    top_k: int
    share_every: int = 1
    share_offset: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, 1, "heads", "head_dim", "top_k", "share_every")
        require_at_least(self, 0, "share_offset")

    def owned_by(self, layer: int) -> bool:
        """Whether the 1-based ``layer`` has an indexer of its own."""
        return max(layer - max(self.share_offset, 1), 0) % self.share_every == 0


@dataclass(frozen=True, kw_only=True)
class Mla:
    """Multi-latent attention; ``q_rank`` None projects queries straight from the hidden state."""

    kind: Literal["mla"] = "mla"
    heads: int
    q_rank: int | None = None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    indexer: Indexer | None = None

    def __post_init__(self) -> None:
        require_at_least(self, 1, "heads", "q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")
        if self.indexer is not None and self.q_rank is None:
            raise ValueError("indexer needs q_rank: its queries come from the low-rank queries")


@dataclass(frozen=True, kw_only=True)
class OtherAttention:
    """An attention that Megatron's flags cannot express.

    Attributes:
        note: what it is, in a few words; printed as a warning with the flags of ``stand_in``.
        params: parameters of the attention of all main layers together, from the model's own description.
        mtp_params: the same for one MTP layer.
        stand_in: the nearest attention that Megatron can run: the MoE layer beside it sees the same sizes.
        details: free mapping of the real numbers, for readers.
    """

    kind: Literal["other"] = "other"
    note: str
    params: int
    mtp_params: int = 0
    stand_in: Gqa | Mla
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        require_at_least(self, 1, "params")
        require_at_least(self, 0, "mtp_params")

    @property
    def heads(self) -> int:
        """Heads of the stand-in."""
        return self.stand_in.heads


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Gated delta net in all layers but every ``full_every``-th, which keeps the full attention."""

    full_every: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4

    def __post_init__(self) -> None:
        require_at_least(self, 1, "full_every", "key_heads", "value_heads", "key_dim", "value_dim", "conv")
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}")


@dataclass(frozen=True, kw_only=True)
class Router:
    """How tokens choose experts.

    Attributes:
        normalize: the chosen experts' probabilities are rescaled to sum to 1 (before ``scaling``).
        groups, group_top_k: experts are chosen from the best ``group_top_k`` of ``groups`` groups.
        expert_bias: a bias per expert, used for the choice only, balances the load.
        scaling: factor on the probabilities.
        hash_layers: leading MoE layers whose choice is a fixed function of the token id (no learned router there).
    """

    score: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    normalize: bool = True
    groups: int | None = None
    group_top_k: int | None = None
    expert_bias: bool = False
    scaling: float | None = None
    hash_layers: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, 1, "groups", "group_top_k")
        require_at_least(self, 0, "hash_layers")
        if (self.groups is None) != (self.group_top_k is None):
            raise ValueError(f"groups={self.groups} and group_top_k={self.group_top_k} go together: give both or none")
        if self.groups is not None and self.group_top_k is not None and self.group_top_k > self.groups:
            raise ValueError(f"group_top_k={self.group_top_k} exceeds groups={self.groups}")
        if self.expert_bias and self.score == "softmax":
            raise ValueError("expert_bias needs score sigmoid or sqrtsoftplus: Megatron refuses it with softmax")
        if not self.normalize and self.score != "softmax":
            raise ValueError(f"normalize: false has no Megatron flag for score {self.score}, only for softmax")


@dataclass(frozen=True, kw_only=True)
class Moe:
    """The routed and shared experts of a layer.

    ``shared_intermediate`` is the total width of the shared experts (None: there are none); ``latent`` the width that
    routed experts see where tokens are projected down first.
    """

    experts: int
    top_k: int
    intermediate: int
    router: Router
    shared_intermediate: int | None = None
    shared_gate: bool = False
    latent: int | None = None

    def __post_init__(self) -> None:
        require_at_least(self, 1, "experts", "top_k", "intermediate", "shared_intermediate", "latent")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} exceeds experts={self.experts}")
        if self.shared_gate and self.shared_intermediate is None:
            raise ValueError("shared_gate without shared_intermediate: there is no shared expert to gate")
        groups, group_top_k = self.router.groups, self.router.group_top_k
        if groups is not None and group_top_k is not None:
            if self.experts % groups:
                raise ValueError(f"experts={self.experts} is not divisible by router.groups={groups}")
            if self.top_k > self.experts // groups * group_top_k:
                raise ValueError(
                    f"top_k={self.top_k} exceeds the {self.experts // groups * group_top_k} experts of "
                    f"{group_top_k} of {groups} groups"
                )


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One decoder model with MoE layers.

    Attributes:
        layers: decoder layers, of which the first ``dense_layers`` have a dense MLP of width ``ffn_hidden``.
        vocab: rows of the embedding table.
        max_positions: longest context.
        mtp_layers: multi-token-prediction layers behind the decoder.
        swiglu_clamp, swiglu_offset: as in ``mok_megatron.config.Activation``.
        extra_params: parameters that no other field describes, all of them active, with a comment in the file.
    """

    layers: int
    dense_layers: int = 0
    hidden: int
    ffn_hidden: int
    vocab: int
    max_positions: int
    attention: Gqa | Mla | OtherAttention
    linear_attention: LinearAttention | None = None
    moe: Moe
    mtp_layers: int = 0
    tied_embeddings: bool = False
    norm_epsilon: float = 1e-6
    rope_base: int = 10000
    rope_fraction: float = 1.0
    swiglu_clamp: float | None = None
    swiglu_offset: float = 0.0
    extra_params: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, 1, "layers", "hidden", "ffn_hidden", "vocab", "max_positions", "rope_base")
        require_at_least(self, 0, "dense_layers", "mtp_layers", "extra_params")
        if self.dense_layers >= self.layers:
            raise ValueError(f"dense_layers={self.dense_layers} leaves no MoE layer of layers={self.layers}")
        if self.moe.router.hash_layers > self.moe_layers:
            raise ValueError(
                f"router.hash_layers={self.moe.router.hash_layers} exceeds the {self.moe_layers} MoE layers"
            )
        if not 0 < self.rope_fraction <= 1:
            raise ValueError(f"rope_fraction must be in (0, 1], got {self.rope_fraction}")
        if self.linear_attention is not None and self.linear_attention.full_every > self.layers:
            raise ValueError(
                f"linear_attention.full_every={self.linear_attention.full_every} exceeds layers={self.layers}"
            )
        if self.linear_attention is not None and isinstance(self.attention, Mla) and self.attention.indexer is not None:
            raise ValueError(
                "linear_attention and attention.indexer exclude each other: Megatron has one variant a model"
            )
        self.moe_shape()

    @property
    def moe_layers(self) -> int:
        """Decoder layers with routed experts (MTP layers not counted)."""
        return self.layers - self.dense_layers

    @property
    def flag_attention(self) -> Gqa | Mla:
        """The attention that Megatron's flags describe: the real one, or its stand-in."""
        return self.attention.stand_in if isinstance(self.attention, OtherAttention) else self.attention

    def is_full_attention(self, layer: int) -> bool:
        """Whether the 1-based ``layer`` has full attention rather than linear."""
        return self.linear_attention is None or layer % self.linear_attention.full_every == 0

    def moe_shape(self, ep_size: int = 1) -> MoeShape:
        """The layer that a backend sees. Raises ValueError where no backend can run it at this EP size."""
        return MoeShape(
            hidden=self.moe.latent or self.hidden,
            intermediate=self.moe.intermediate,
            num_experts=self.moe.experts,
            top_k=self.moe.top_k,
            ep_size=ep_size,
            activation=Activation(clamp=self.swiglu_clamp, linear_offset=self.swiglu_offset),
        )
