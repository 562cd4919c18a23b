"""Limits and options of the MoE layer: the only place that states what is supported.

Notation (used in every module): ``T`` tokens on this rank, ``K`` experts per token at most, ``H`` hidden size,
``I`` expert intermediate size, ``E`` experts in all, ``W`` expert-parallel (EP) size, ``e = E / W`` local experts,
``R`` routed rows held by this rank after padding, slot = ``t * K + k``, ``C`` row capacity of the routed buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

BackendName = Literal["auto", "cuda", "reference"]

MAX_TOP_K = 16
"""Most experts per token: one token's slots fit one warp-wide lookup of the CUDA backend."""


def _require_int(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Activation:
    """SwiGLU: ``silu(gate) * (up + linear_offset)``, with an optional clamp as Megatron defines it.

    With ``clamp`` set, gate is limited from above (``gate <= clamp``) and up on both sides (``|up| <= clamp``),
    before the activation; a clamped value passes no gradient.
    """

    clamp: float | None = None
    linear_offset: float = 0.0

    def check(self) -> None:
        """Raise ValueError for values that have no meaning."""
        if self.clamp is not None and not (math.isfinite(self.clamp) and self.clamp > 0):
            raise ValueError(f"activation clamp must be positive and finite, got {self.clamp!r}")
        if not math.isfinite(self.linear_offset):
            raise ValueError(f"activation linear_offset must be finite, got {self.linear_offset!r}")


@dataclass(frozen=True, kw_only=True)
class MoeShape:
    """Sizes of one MoE layer. ``check`` is called on construction."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    ep_size: int = 1
    activation: Activation = Activation()

    def __post_init__(self) -> None:
        self.check()

    @property
    def experts_per_rank(self) -> int:
        """e = E / W."""
        return self.num_experts // self.ep_size

    def check(self) -> None:
        """Raise ValueError, naming the values, for a layer that no backend can run."""
        for field in ("hidden", "intermediate", "num_experts", "top_k", "ep_size"):
            _require_int(field, getattr(self, field), 1)
        if self.num_experts % self.ep_size:
            raise ValueError(
                f"num_experts={self.num_experts} is not divisible by the expert-parallel size {self.ep_size}: "
                f"choose an expert-parallel size that divides {self.num_experts}"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k} exceeds num_experts={self.num_experts}")
        if self.top_k > MAX_TOP_K:
            raise ValueError(f"top_k={self.top_k} exceeds the supported {MAX_TOP_K} experts per token")
        self.activation.check()


@dataclass(frozen=True, kw_only=True)
class MokConfig:
    """Options of the backend (YAML keys and ``--mok-*`` flags have the same names).

    Attributes:
        backend: ``auto`` takes the CUDA backend where the device has one, else ``reference`` with a warning.
        comm_sms: SMs whose communication warps move rows; None uses every SM.
        ring_rows: row capacity C of the routed buffers; more rows pass through them as through a ring, with the same
            results in more time. None derives it from the expected rows with a margin.
        recompute: keep nothing per routed row for backward, which brings the rows and computes gate and up again.
        save_x: keep the dispatched rows for backward, which otherwise brings them again.
        time_limit_s: seconds a rank waits for a peer before every rank ends with an error.
        max_tokens: most tokens T of a rank in one call, which the workspace is made for; None takes what Megatron's
            training arguments say, or else what the first call brings.
    """

    backend: BackendName = "auto"
    comm_sms: int | None = None
    ring_rows: int | None = None
    recompute: bool = False
    save_x: bool = True
    time_limit_s: float = 900.0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ValueError, naming option and value, for an option out of range."""
        if self.backend not in get_args(BackendName):
            raise ValueError(f"backend must be one of {', '.join(get_args(BackendName))}, got {self.backend!r}")
        for name in ("comm_sms", "ring_rows", "max_tokens"):
            if getattr(self, name) is not None:
                _require_int(name, getattr(self, name), 1)
        for name in ("recompute", "save_x"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        limit = self.time_limit_s
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not (math.isfinite(limit) and limit > 0):
            raise ValueError(f"time_limit_s must be a positive number of seconds, got {limit!r}")

    @classmethod
    def from_mapping(cls, options: dict[str, Any], source: str) -> MokConfig:
        """Build from plain options; ``source`` names their origin in errors. Unknown keys are refused."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ValueError(f"{source}: unknown option(s) {', '.join(unknown)}; known options are {', '.join(known)}")
        return cls(**options)

    @classmethod
    def from_yaml(cls, path: str | Path) -> MokConfig:
        """Read a YAML mapping of options. Raises ValueError for a file that is not one, OSError if unreadable."""
        try:
            loaded = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not valid YAML: {error}") from error
        options = {} if loaded is None else loaded
        if not isinstance(options, dict):
            raise ValueError(f"{path}: expected a mapping of options, got {type(options).__name__}")
        return cls.from_mapping(options, source=str(path))
