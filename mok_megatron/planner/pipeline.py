"""Pipeline stages: layers, MTP and the loss over PP x VPP stages, as even as their costs allow.

A stage is a text in Megatron's notation: ``E`` embedding, ``t`` decoder layer, ``m`` MTP layer, ``L`` output head and
loss. Stage ``i`` of the text lies on pipeline rank ``i % pp``, as its chunk ``i // pp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One stage: its 0-based decoder layers, and what else it holds."""

    layers: range
    mtp: int
    embedding: bool
    loss: bool

    def dense(self, dense_layers: int) -> int:
        """How many of its layers are among the model's first ``dense_layers``."""
        return max(0, min(self.layers.stop, dense_layers) - self.layers.start)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The split: ``texts`` has pp * vpp entries."""

    pp: int
    vpp: int
    texts: tuple[str, ...]

    @cached_property
    def chunks(self) -> list[Chunk]:
        """What every stage holds, in model order."""
        result, first = [], 0
        for text in self.texts:
            layers = range(first, first + text.count("t"))
            first = layers.stop
            result.append(Chunk(layers=layers, mtp=text.count("m"), embedding="E" in text, loss="L" in text))
        return result

    @property
    def is_even(self) -> bool:
        """Whether Megatron makes this split by itself, without a layout."""
        counts = {len(chunk.layers) for chunk in self.chunks}
        return len(counts) == 1 and 0 not in counts and not any(chunk.mtp for chunk in self.chunks[:-1])

    def of_rank(self, rank: int) -> list[Chunk]:
        """Chunks on one pipeline rank, first one first."""
        return self.chunks[rank :: self.pp]

    def text(self) -> str:
        """Megatron's ``--pipeline-model-parallel-layout``, repeats written as ``(tt|)*n`` and ``t*n``."""
        parts = []
        for stage, run in groupby(self.texts[:-1]):
            count = len(list(run))
            parts.append(f"({stage}|)*{count}" if count > 1 and stage else f"{_runs(stage)}|" * count)
        return "".join(parts) + _runs(self.texts[-1])


def _runs(stage: str) -> str:
    """``Ettt`` -> ``Et*3``."""
    return "".join(f"{c}*{n}" if (n := len(list(run))) > 2 else c * n for c, run in groupby(stage))


def split(
    costs: Sequence[float], *, pp: int, vpp: int, mtp_cost: float = 0.0, mtp: int = 0, loss_cost: float = 0.0
) -> Stages | None:
    """Contiguous split of decoder layers of the given costs that makes the costliest stage as cheap as it can be.

    MTP layers stay together, in the last chunk. None where there are fewer layers than stages.
    """
    stages = pp * vpp
    if len(costs) < stages - (mtp > 0) - (loss_cost > 0) or stages < 1:
        return None
    if len(costs) % stages == 0 and not mtp:
        each = len(costs) // stages
        texts = ["t" * each] * stages
        return Stages(pp=pp, vpp=vpp, texts=_with_ends(texts))
    units = [(cost, "t") for cost in costs]
    if mtp:
        units.append((mtp_cost * mtp, "m" * mtp))
    units.append((loss_cost, "L"))
    tight, even = _tightest(units, stages), _even(units, stages)
    sizes = min(
        (filled for filled in (tight, even) if filled is not None), key=lambda s: _badness(units, s), default=None
    )
    if sizes is None:
        return None
    texts, first = [], 0
    for size in sizes:
        texts.append("".join(text for _, text in units[first : first + size]))
        first += size
    if pp > 1 and any("m" in text for text in texts[: stages - pp + 1]):
        return None
    return Stages(pp=pp, vpp=vpp, texts=("E" + texts[0], *texts[1:]))


def _with_ends(texts: list[str]) -> tuple[str, ...]:
    texts = list(texts)
    texts[0] = "E" + texts[0]
    texts[-1] += "L"
    return tuple(texts)


def _tightest(units: Sequence[tuple[float, str]], stages: int) -> list[int] | None:
    """Units per stage for the lowest limit on a stage's cost under which all units find a place."""
    low, high = max(cost for cost, _ in units), sum(cost for cost, _ in units)
    for _ in range(16):
        middle = (low + high) / 2
        if _fill(units, stages, middle) is None:
            low = middle
        else:
            high = middle
    return _fill(units, stages, high * (1 + 1e-9))


def _even(units: Sequence[tuple[float, str]], stages: int) -> list[int] | None:
    """Units per stage so that every stage comes close to the mean; units above the mean get a stage of their own."""
    rest, places = [cost for cost, _ in units], stages
    while places > 1 and max(rest) > sum(rest) / places:
        rest.remove(max(rest))
        places -= 1
        if not rest:
            return None
    mean = sum(rest) / places
    # A stage may end up to half a unit above the running mean: then the stages after it are not left too full.
    sizes, index, spent = [], 0, 0.0
    for stage in range(stages):
        later, goal, size = stages - stage - 1, (stage + 1) * mean, 0
        while index < len(units) - later and (size == 0 or later == 0 or spent + units[index][0] / 2 <= goal):
            if size and units[index][0] > mean:
                break
            spent += min(units[index][0], mean)
            index, size = index + 1, size + 1
        sizes.append(size)
    return sizes if index == len(units) else None


def _fill(units: Sequence[tuple[float, str]], stages: int, limit: float) -> list[int] | None:
    """Fill stage after stage up to ``limit``, leaving at least one unit for each later one; None if units are left."""
    sizes, index = [], 0
    for stage in range(stages):
        later, cost, size = stages - stage - 1, 0.0, 0
        while index < len(units) - later and (size == 0 or cost + units[index][0] <= limit):
            cost += units[index][0]
            index, size = index + 1, size + 1
        sizes.append(size)
    return sizes if index == len(units) else None


def _badness(units: Sequence[tuple[float, str]], sizes: Sequence[int]) -> tuple[float, float]:
    """Cost of the costliest stage, then the sum of squares."""
    costs, first = [], 0
    for size in sizes:
        costs.append(sum(cost for cost, _ in units[first : first + size]))
        first += size
    return round(max(costs), 3), sum(cost * cost for cost in costs)
