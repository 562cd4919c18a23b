"""One whole ``pretrain()`` run on CPU processes: what is asked, and what each rank reports."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of ``examples/pretrain_gpt.py``.

    Attributes:
        world_size: number of processes.
        args: Megatron's command line.
        patch: ``module:function``, called in every rank before the script; it breaks something on purpose.
        start_order: ranks in the order in which they start, ``start_gap_s`` apart; by default all at once.
    """

    world_size: int
    args: tuple[str, ...]
    patch: str | None = None
    start_order: tuple[int, ...] | None = None
    start_gap_s: float = 0.7


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one rank saw.

    Attributes:
        losses: per iteration, every logged loss by name; empty on a pipeline stage that computes none.
        grad_norms: per iteration, before clipping.
        weights: SHA-256 of all parameters' bytes after the last iteration.
        dispatchers: class names of the MoE layers' token dispatchers on this rank.
        backends: names of the backends of its ``mok`` layers.
        megatron: version of megatron-core.
        counts: module calls, replays of CUDA graphs and offloaded tensors of the whole run: whether an option did
            anything. Not compared.
    """

    losses: list[dict[str, float]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: str = ""
    dispatchers: list[str] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    megatron: str = ""
    counts: dict[str, int] = field(default_factory=dict, compare=False)
