"""Model config -> Megatron flags, spelled for megatron-core 0.17 to 0.19."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version

from mok_megatron.architecture import Architecture, Gqa, Indexer, LinearAttention, Mla, OtherAttention
from mok_megatron.model_config import Layout, ModelConfig

Version = tuple[int, int]
Flag = tuple[str, tuple[str, ...]]

OLDEST: Version = (0, 17)
NEWEST: Version = (0, 19)
"""Newest version whose flags were checked; later ones are spelled as this one."""

ADDED_IN: dict[str, Version] = {
    "dsa-indexer-skip-topk-offset": (0, 19),
    "dsa-indexer-topk-freq": (0, 19),
    "moe-mlp-glu-interleave-size": (0, 18),
    "yarn-beta-fast": (0, 19),
    "yarn-beta-slow": (0, 19),
    "yarn-original-max-position-embeddings": (0, 19),
}
"""Flags that a config may need and the version that brought them."""

VALUES_ADDED_IN: dict[tuple[str, str], Version] = {
    ("moe-router-score-function", "sqrtsoftplus"): (0, 18),
    ("position-embedding-type", "yarn"): (0, 18),
}

RENAMED_IN: dict[str, tuple[Version, str]] = {"cuda-graph-scope": ((0, 18), "cuda-graph-modules")}
"""Old name -> the version that renamed it, and the new name. A config may use either."""


@dataclass(frozen=True)
class CommandLine:
    """Flags in printing order, without leading dashes, and what the reader should know about them."""

    flags: tuple[Flag, ...]
    notes: tuple[str, ...]

    def argv(self) -> list[str]:
        """The flags as a program receives them."""
        return [item for flag, values in self.flags for item in (f"--{flag}", *values)]


def parse_version(text: str) -> Version:
    """``0.17`` or ``0.17.1`` -> (0, 17). Raises ValueError for anything else and for versions before 0.17."""
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        raise ValueError(f"megatron-core version must look like 0.19 or 0.19.2, got {text!r}")
    version = int(parts[0]), int(parts[1])
    if version < OLDEST:
        raise ValueError(f"megatron-core {text} is too old: mok needs {_shown(OLDEST)} or newer")
    return version


def installed_version() -> Version:
    """Version of the installed megatron-core, or the newest known where none is installed as a package."""
    try:
        return parse_version(distribution_version("megatron-core"))
    except PackageNotFoundError:
        return NEWEST


def command_line(
    config: ModelConfig, layout_name: str | None = None, *, version: Version, dispatcher: str | None = None
) -> CommandLine:
    """All flags for one layout of ``config``; ``dispatcher`` replaces that of the layout.

    Raises ValueError for an unknown layout, a flag given both by the architecture and by ``training``, and a feature
    that this Megatron version lacks.
    """
    layout = config.layout(layout_name)
    arch = config.architecture_for(layout)
    type_flag = _flag("moe-token-dispatcher-type", dispatcher or layout.dispatcher)
    generated = [*_architecture(arch), *_layout(layout), type_flag]
    free = {**config.training, **layout.training}
    doubled = sorted(set(free) & {flag for flag, _ in generated})
    if doubled:
        raise ValueError(f"training gives --{doubled[0]}, which follows from the architecture or the layout: remove it")
    flags = [_spelled(flag, version) for flag in [*generated, *(_flag(name, value) for name, value in free.items())]]
    other = () if layout.dispatcher == "mok" else (f"this layout is made for {layout.dispatcher}: {layout.note}",)
    return CommandLine(flags=tuple(flags), notes=(*other, *_notes(arch), *config.notes))


def _flag(name: str, value: object = True) -> Flag:
    """A flag with its values as text; True stands for a bare flag."""
    if value is True:
        return name, ()
    items = value if isinstance(value, list | tuple) else [value]
    return name, tuple(str(item) for item in items)


def _spelled(flag: Flag, version: Version) -> Flag:
    """The flag under the name it has in ``version``. Raises ValueError where that version has no such thing."""
    name, values = flag
    for old, (since, new) in RENAMED_IN.items():
        if name in (old, new):
            name = new if version >= since else old
    needed = [ADDED_IN.get(name, OLDEST), *(VALUES_ADDED_IN.get((name, value), OLDEST) for value in values)]
    if max(needed) > version:
        raise ValueError(
            f"--{' '.join([name, *values])} needs megatron-core {_shown(max(needed))}, this is {_shown(version)}"
        )
    return name, values


def _shown(version: Version) -> str:
    return ".".join(map(str, version))


def _architecture(arch: Architecture) -> Iterator[Flag]:
    yield _flag("num-layers", arch.layers)
    yield _flag("hidden-size", arch.hidden)
    yield _flag("ffn-hidden-size", arch.ffn_hidden)
    yield _flag("vocab-size", arch.vocab)
    yield _flag("max-position-embeddings", arch.max_positions)
    yield _flag("normalization", "RMSNorm")
    yield _flag("norm-epsilon", arch.norm_epsilon)
    yield _flag("disable-bias-linear")
    yield _flag("swiglu")
    if not arch.tied_embeddings:
        yield _flag("untie-embeddings-and-output-weights")
    yield _flag("position-embedding-type", "rope")
    yield _flag("rotary-base", arch.rope_base)
    if arch.rope_fraction != 1:
        yield _flag("rotary-percent", arch.rope_fraction)
    yield from _attention(arch.flag_attention)
    if arch.linear_attention is not None:
        yield from _linear_attention(arch.linear_attention)
    yield from _moe(arch)
    if arch.swiglu_clamp is not None:
        yield _flag("activation-func-clamp-value", arch.swiglu_clamp)
    if arch.swiglu_offset:
        yield _flag("glu-linear-offset", arch.swiglu_offset)
    if arch.mtp_layers:
        yield _flag("mtp-num-layers", arch.mtp_layers)


def _attention(attention: Gqa | Mla) -> Iterator[Flag]:
    yield _flag("num-attention-heads", attention.heads)
    if isinstance(attention, Mla):
        yield from _mla(attention)
        return
    yield _flag("kv-channels", attention.head_dim)
    if attention.kv_heads != attention.heads:
        yield _flag("group-query-attention")
        yield _flag("num-query-groups", attention.kv_heads)
    if attention.qk_norm:
        yield _flag("qk-layernorm")
    if attention.qkv_bias:
        yield _flag("add-qkv-bias")
    if attention.output_gate:
        yield _flag("attention-output-gate")


def _mla(attention: Mla) -> Iterator[Flag]:
    yield _flag("multi-latent-attention")
    yield _flag("qk-layernorm")
    yield _flag("kv-channels", attention.v_dim)
    if attention.q_rank is not None:
        yield _flag("q-lora-rank", attention.q_rank)
    yield _flag("kv-lora-rank", attention.kv_rank)
    yield _flag("qk-head-dim", attention.nope_dim)
    yield _flag("qk-pos-emb-head-dim", attention.rope_dim)
    yield _flag("v-head-dim", attention.v_dim)
    if attention.indexer is not None:
        yield from _indexer(attention.indexer)


def _indexer(indexer: Indexer) -> Iterator[Flag]:
    yield _flag("experimental-attention-variant", "dsa")
    yield _flag("dsa-indexer-n-heads", indexer.heads)
    yield _flag("dsa-indexer-head-dim", indexer.head_dim)
    yield _flag("dsa-indexer-topk", indexer.top_k)
    if indexer.share_every > 1:
        yield _flag("dsa-indexer-topk-freq", indexer.share_every)
        yield _flag("dsa-indexer-skip-topk-offset", indexer.share_offset)


def _linear_attention(linear: LinearAttention) -> Iterator[Flag]:
    yield _flag("experimental-attention-variant", "gated_delta_net")
    yield _flag("linear-attention-freq", linear.full_every)
    yield _flag("linear-conv-kernel-dim", linear.conv)
    yield _flag("linear-key-head-dim", linear.key_dim)
    yield _flag("linear-value-head-dim", linear.value_dim)
    yield _flag("linear-num-key-heads", linear.key_heads)
    yield _flag("linear-num-value-heads", linear.value_heads)


def _moe(arch: Architecture) -> Iterator[Flag]:
    moe, router = arch.moe, arch.moe.router
    yield _flag("num-experts", moe.experts)
    if arch.dense_layers:
        yield _flag("moe-layer-freq", f"([0]*{arch.dense_layers}+[1]*{arch.moe_layers})")
    yield _flag("moe-ffn-hidden-size", moe.intermediate)
    yield _flag("moe-router-topk", moe.top_k)
    yield _flag("moe-router-score-function", router.score)
    if router.score == "softmax" and (not router.normalize or moe.top_k == 1):
        yield _flag("moe-router-pre-softmax")
    if router.groups is not None:
        yield _flag("moe-router-num-groups", router.groups)
        yield _flag("moe-router-group-topk", router.group_top_k)
    if router.expert_bias:
        yield _flag("moe-router-enable-expert-bias")
    if router.scaling is not None:
        yield _flag("moe-router-topk-scaling-factor", router.scaling)
    if moe.shared_intermediate is not None:
        yield _flag("moe-shared-expert-intermediate-size", moe.shared_intermediate)
    if moe.shared_gate:
        yield _flag("moe-shared-expert-gate")
    if moe.latent is not None:
        yield _flag("moe-latent-size", moe.latent)


def _layout(layout: Layout) -> Iterator[Flag]:
    yield _flag("tensor-model-parallel-size", layout.tp)
    if layout.tp > 1:
        yield _flag("sequence-parallel")
    yield _flag("pipeline-model-parallel-size", layout.pp)
    if layout.pipeline is not None:
        yield _flag("pipeline-model-parallel-layout", layout.pipeline)
    elif layout.vpp is not None and layout.vpp > 1:
        yield _flag("num-virtual-stages-per-pipeline-rank", layout.vpp)
    yield _flag("context-parallel-size", layout.cp)
    yield _flag("expert-model-parallel-size", layout.ep)
    yield _flag("expert-tensor-parallel-size", layout.etp)
    yield _flag("seq-length", layout.seq_length)
    yield _flag("micro-batch-size", layout.micro_batch)
    yield _flag("global-batch-size", layout.global_batch)
    if layout.recompute == "full":
        yield _flag("recompute-granularity", "full")
        yield _flag("recompute-method", "uniform")
        yield _flag("recompute-num-layers", 1)
    elif layout.recompute != "none":
        yield _flag("recompute-granularity", "selective")
        yield _flag("recompute-modules", layout.recompute)


def _notes(arch: Architecture) -> Iterator[str]:
    """What the flags do not say about the model."""
    if isinstance(arch.attention, OtherAttention):
        yield (
            f"the attention of this model ({arch.attention.note}) has no Megatron flags; "
            f"these describe the stand-in {arch.flag_attention.kind} attention"
        )
    if arch.moe.router.hash_layers:
        yield (
            f"the first {arch.moe.router.hash_layers} MoE layers of this model route by token id; "
            "Megatron has no flag for it, so they get the learned router"
        )
    if arch.extra_params:
        yield f"{arch.extra_params:,} parameters of this model have no Megatron flags and are left out"
