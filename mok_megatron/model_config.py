"""Model configs: YAML files that describe an architecture, its training flags and its layouts.

``load_model_config("deepseek-v3")`` reads a shipped config, ``load_model_config("path/to/file.yaml")`` any other.
Everything is checked on construction; a number that disagrees with another is a ValueError that names both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from mok_megatron.architecture import Architecture, Gqa, require_at_least
from mok_megatron.params import ParamCount, count_params
from mok_megatron.paths import configs_dir
from mok_megatron.schema import build, nearest

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


@dataclass(frozen=True, kw_only=True)
class Published:
    """Parameter counts as the model's authors give them, with what they count, to check ``num_params`` against.

    Attributes:
        total, active: parameters, e.g. 671.0e9.
        source: where the numbers are printed.
        total_unit, active_unit: unit of the last digit that the source prints, where it prints two digits or fewer:
            1e11 for "1.6T", 1e9 for "13B". Sources round and truncate, so the count may differ by as much.
        with_mtp: whether they include the MTP layers.
        total_embeddings: whether ``total`` counts the vocabulary tables.
        active_embeddings: which of the two vocabulary tables ``active`` counts.
    """

    total: float
    active: float
    source: str
    total_unit: float = 0.0
    active_unit: float = 0.0
    with_mtp: bool = False
    total_embeddings: bool = True
    active_embeddings: Literal["both", "one", "none"] = "both"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to spread the model over GPUs.

    Attributes:
        gpus: GPUs in all; dp = gpus / (tp * pp * cp), expert dp = gpus / (etp * ep * pp).
        vpp: virtual pipeline stages per pipeline rank (Megatron's interleaved schedule).
        pipeline: Megatron's ``--pipeline-model-parallel-layout``, for uneven stages.
        recompute: ``none``, ``full``, or the list of submodules to recompute.
        dispatcher: ``alltoall`` for a layout whose EP groups span NVLink domains, which mok refuses.
        note: for whom the layout is, in one line.
        training: flags for this layout only; they replace those of the config.
        overrides: changes of the architecture (nested mapping), e.g. fewer layers for a smoke run on one GPU.
    """

    gpus: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int = 1
    seq_length: int
    micro_batch: int = 1
    global_batch: int
    pipeline: str | None = None
    recompute: Literal["none", "full"] | tuple[str, ...] = "none"
    dispatcher: Literal["mok", "alltoall"] = "mok"
    note: str | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_at_least(self, 1, "gpus", "tp", "pp", "vpp", "cp", "ep", "etp", "seq_length", "micro_batch")
        self._require_divisible("gpus", self.gpus, "tp * pp * cp", self.tp * self.pp * self.cp)
        self._require_divisible("gpus", self.gpus, "etp * ep * pp", self.etp * self.ep * self.pp)
        self._require_divisible("global_batch", self.global_batch, "micro_batch * dp", self.micro_batch * self.dp)
        if self.cp > 1:
            self._require_divisible("seq_length", self.seq_length, "2 * cp", 2 * self.cp)
        if self.vpp is not None and self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1, got pp=1")
        if self.vpp is not None and self.pipeline is not None:
            raise ValueError(f"vpp={self.vpp} and pipeline={self.pipeline!r} exclude each other: pipeline implies vpp")
        if self.etp > 1:
            raise ValueError(
                f"etp={self.etp}: the mok dispatcher does not split an expert over GPUs; use etp 1, more ep"
            )
        for module in self.recompute if isinstance(self.recompute, tuple) else ():
            if module not in RECOMPUTE_MODULES:
                raise ValueError(
                    f"recompute: unknown module {module!r}{nearest(module, RECOMPUTE_MODULES)}; "
                    f"known are {', '.join(RECOMPUTE_MODULES)}"
                )

    def _require_divisible(self, name: str, value: int, by_name: str, by: int) -> None:
        if value < by or value % by:
            lower, upper = value // by * by, (value // by + 1) * by
            valid = f"{lower} and {upper}" if lower else str(upper)
            raise ValueError(f"{name}={value} is not a multiple of {by_name} = {by}; nearest valid: {valid}")

    @property
    def dp(self) -> int:
        """Data-parallel size of attention and dense parts."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Data-parallel size of the experts."""
        return self.gpus // (self.etp * self.ep * self.pp)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model config file.

    Attributes:
        name: the file's name without ``.yaml``.
        training: Megatron flags without the leading dashes: value true for a bare flag, a list for several values.
        layouts: by name; the first is the default.
        notes: what Megatron's flags leave out of this model and no other field says; printed with the flags.
    """

    name: str
    architecture: Architecture
    layouts: Mapping[str, Layout]
    training: Mapping[str, Any] = field(default_factory=dict)
    published: Published | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.layouts:
            raise ValueError("layouts: at least one is needed")
        _check_flags(self.training, "training")
        for name, layout in self.layouts.items():
            _check_flags(layout.training, f"layouts.{name}.training")
            try:
                _check_layout(self.architecture_for(layout), layout)
            except ValueError as error:
                raise ValueError(f"layouts.{name}: {error}") from error
        if self.published is not None:
            _check_published(self.published, *self.num_params())

    def layout(self, name: str | None = None) -> Layout:
        """The layout called ``name``; None is the first one of the file."""
        if name is None:
            return next(iter(self.layouts.values()))
        if name not in self.layouts:
            raise ValueError(
                f"{self.name} has no layout {name!r}{nearest(name, self.layouts)}; it has {', '.join(self.layouts)}"
            )
        return self.layouts[name]

    def architecture_for(self, layout: Layout) -> Architecture:
        """The architecture with the layout's overrides applied and checked again."""
        if not layout.overrides:
            return self.architecture
        return build(Architecture, _merged(asdict(self.architecture), layout.overrides), "overrides")

    @cached_property
    def params(self) -> ParamCount:
        """Parameters by part."""
        return count_params(self.architecture)

    def num_params(self) -> tuple[int, int]:
        """``(total, active)``, counted as ``published`` counts: see ``mok_megatron.params.count_params``.

        Without ``published``: MTP layers left out, both vocabulary tables active.
        """
        counts, arch = self.params, self.architecture
        total, active = counts.total, counts.active
        if self.published is not None:
            if self.published.with_mtp:
                total, active = total + counts.mtp, active + counts.mtp_active
            if not self.published.total_embeddings:
                total -= counts.embedding + counts.output
            if self.published.active_embeddings == "none":
                active -= counts.embedding + counts.output
            elif self.published.active_embeddings == "one" and not arch.tied_embeddings:
                active -= counts.embedding
        return total, active


def shipped_configs() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(path.stem for path in configs_dir().glob("*.yaml"))


def find_config(config: str | Path) -> Path:
    """Path of a config file, given its path or the name of a shipped one. Raises ValueError where there is none."""
    path = Path(config)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if not path.is_file():
            raise ValueError(f"{path}: no such config file")
        return path
    shipped = shipped_configs()
    if str(config) not in shipped:
        raise ValueError(
            f"no shipped config is called {str(config)!r}{nearest(str(config), shipped)}; shipped are "
            f"{', '.join(shipped)}; a file is named by its path, ending in .yaml"
        )
    return configs_dir() / f"{config}.yaml"


def load_model_config(config: str | Path) -> ModelConfig:
    """Read and check a config: a file's path or a shipped config's name. Raises ValueError for anything wrong in it."""
    path = find_config(config)
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path}: expected a mapping with architecture and layouts, got {type(loaded).__name__}")
    try:
        return build(ModelConfig, {"name": path.stem, **loaded})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_published(published: Published, total: int, active: int) -> None:
    """Refuse an architecture of another size than the published one: off by more than 5 % and the last digit given."""
    for name, counted, expected, unit in (
        ("total", total, published.total, published.total_unit),
        ("active", active, published.active, published.active_unit),
    ):
        if abs(counted - expected) > max(0.05 * expected, unit):
            raise ValueError(
                f"published.{name} is {expected:.4g} but the architecture has {counted:.4g} parameters: correct "
                f"what is wrong, or leave `published` out for a model of another size"
            )


def _check_flags(flags: Mapping[str, Any], where: str) -> None:
    """Refuse flags that could not be printed, or that say nothing."""
    for flag, value in flags.items():
        if flag.startswith("-") or "_" in flag:
            raise ValueError(f"{where}.{flag}: write the flag without leading dashes and with hyphens")
        items = value if isinstance(value, list) else [value]
        if not items or any(isinstance(item, Mapping | list) or item is None for item in items):
            raise ValueError(f"{where}.{flag}: expected a value, a list of values, or true, got {value!r}")
        if value is False:
            raise ValueError(f"{where}.{flag}: a flag that is not wanted is left out, got false")


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes`` applied, mapping by mapping."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = _merged(result[key], value) if both else value
    return result


def _check_layout(arch: Architecture, layout: Layout) -> None:
    """Refuse a layout whose numbers do not fit the architecture."""
    arch.moe_shape(layout.ep)
    attention = arch.flag_attention
    if attention.heads % layout.tp:
        raise ValueError(f"attention.heads={attention.heads} is not divisible by tp={layout.tp}")
    if isinstance(attention, Gqa) and attention.kv_heads % layout.tp and layout.tp % attention.kv_heads:
        raise ValueError(f"tp={layout.tp} neither divides attention.kv_heads={attention.kv_heads} nor is a multiple")
    if layout.pp > arch.layers:
        raise ValueError(f"pp={layout.pp} exceeds layers={arch.layers}")
    stages = layout.pp * (layout.vpp or 1)
    if layout.pipeline is None and arch.layers % stages:
        raise ValueError(
            f"layers={arch.layers} do not divide evenly over pp * vpp = {stages} stages: "
            "give the split as pipeline (Megatron's --pipeline-model-parallel-layout)"
        )
    if layout.seq_length > arch.max_positions:
        raise ValueError(f"seq_length={layout.seq_length} exceeds max_positions={arch.max_positions}")


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe loader that refuses a key given twice, and reads 1e-5 and 671e9 as numbers, as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Mapping of a node, after a check for doubled keys."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+"),
    list("-+.0123456789"),
)
