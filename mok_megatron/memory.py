"""Bytes that the backend needs on one rank: the one formula, used to allocate, to plan and to print.

Notation as in ``config.py``; ``C`` is the ring's row capacity. Two kinds of memory:

* the workspace, one per (EP group, shape), shared by all layers and allocated at model build;
* what one layer call keeps until its backward, once per layer and microbatch in flight.

Row counts. A token sends at most ``min(K, e)`` routes to one rank, so a rank receives at most ``W * T * min(K, e)``;
uniform routing gives it ``T * K``. Each expert's rows are padded to whole blocks, which adds at most
``block_rows - 1`` rows per local expert. Counts are unknown on the host, so every buffer has a size fixed by ``T`` and
``C`` alone: wide ones hold ``C`` rows, and more rows go through them as through a ring; tables hold the worst case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mok_megatron.config import MoeShape
from mok_megatron.tile_order import BLOCK_ROWS, MOST_BACKWARD_LAG, backward_ring

TOKENS_PER_BLOCK = 64
"""Tokens per thread block of the schedule kernels (kernels/params.h)."""

BACKWARD_TILE_COLUMNS = 256
"""Columns of a backward tile (kernels/sm90/mainloop.cuh): a row's weight gradient has a part per column tile of I."""

COUNTER_WORDS, COUNTERS_PER_BLOCK = 128, 5
"""Words of tickets, and counters per row block (kernels/params.h)."""

ALIGNMENT = 1024
"""Bytes at which every buffer starts: what tensor maps and 16-byte vectors need, and whole cache lines for flags."""

GUARD = 1024
"""Bytes left behind every buffer. Nothing writes them: tests fill them and look whether they stayed."""

RING_MARGIN = 1.25
"""Default capacity over the expected rows. A fuller rank still works: it passes through the ring more than once."""

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

_BF16 = 2
_INT32 = 4
_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """One buffer: ``shape`` in elements, ``symmetric`` if peers read or write it."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    symmetric: bool = False

    @property
    def bytes(self) -> int:
        """Size without alignment."""
        return math.prod(self.shape) * self.element_bytes


def placed(buffers: Sequence[Buffer]) -> tuple[dict[str, int], int]:
    """Offsets of the buffers by name in one allocation, and its bytes, with ``ALIGNMENT`` and ``GUARD``."""
    offsets, end = {}, 0
    for buffer in buffers:
        offsets[buffer.name] = end
        end += -(-buffer.bytes // ALIGNMENT) * ALIGNMENT + GUARD
    return offsets, end


def dtype_bytes(dtype: str) -> int:
    """Bytes per element of ``bf16``, ``fp16`` or ``fp32``. Raises ValueError for another name."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return DTYPE_BYTES[dtype]


def _require(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")


def worst_case_rows(shape: MoeShape, max_tokens: int, block_rows: int = BLOCK_ROWS) -> int:
    """Most rows R that one rank can hold after padding, when every rank routes all it can to it."""
    _require("max_tokens", max_tokens, 0)
    _require("block_rows", block_rows, 1)
    routes = shape.ep_size * max_tokens * min(shape.top_k, shape.experts_per_rank)
    busy_experts = min(shape.experts_per_rank, routes)
    return (routes + busy_experts * (block_rows - 1)) // block_rows * block_rows


def most_rows(shape: MoeShape, max_tokens: int) -> int:
    """The worst case, but at least one block: what tables and counters are made for."""
    return max(worst_case_rows(shape, max_tokens), BLOCK_ROWS)


def expected_rows(shape: MoeShape, tokens: int, block_rows: int = BLOCK_ROWS) -> int:
    """Rows R of a rank under uniform routing, with every expert's padding at its largest."""
    _require("tokens", tokens, 0)
    return tokens * shape.top_k + shape.experts_per_rank * (block_rows - 1)


def default_ring_rows(
    shape: MoeShape, max_tokens: int, block_rows: int = BLOCK_ROWS, margin: float = RING_MARGIN
) -> int:
    """Capacity C when the options leave it open: expected routes times ``margin``, padding, whole blocks.

    Never more than the worst case (W = 1 and small layers then never wrap) and never less than one block.
    """
    if not (math.isfinite(margin) and margin >= 1.0):
        raise ValueError(f"ring margin must be a finite number >= 1, got {margin!r}")
    _require("max_tokens", max_tokens, 0)
    wanted = math.ceil(max_tokens * shape.top_k * margin) + shape.experts_per_rank * (block_rows - 1)
    capped = min(math.ceil(wanted / block_rows) * block_rows, worst_case_rows(shape, max_tokens, block_rows))
    return max(capped, block_rows)


def capacity(shape: MoeShape, tokens: int, ring_rows: int) -> int:
    """Rows that wide buffers hold for calls of up to ``tokens`` tokens: C, but no more than these can have."""
    _require("ring_rows", ring_rows, 1)
    return min(ring_rows, most_rows(shape, tokens))


def symmetric_buffers(shape: MoeShape, max_tokens: int) -> tuple[Buffer, ...]:
    """The CUDA backend's buffers that peers read or write, in order: ``SymmetricLayout`` of kernels/params.h.

    Counts and FC2 counters exist twice, by parity of the call. What only peers read is absent where there are none:
    slot tables, router weights, and the copies ``x`` and ``replay_x`` of the layer input and of dY.
    """
    rows = most_rows(shape, max_tokens)
    world, slots = shape.ep_size, (max_tokens, shape.top_k)
    copied = max_tokens if world > 1 else 0
    published = (copied, shape.top_k)
    sizes: tuple[tuple[str, tuple[int, ...], int], ...] = (
        ("opened", (world,), _INT32),
        ("tables_ready", (world,), _INT32),
        ("abort", (1,), _INT32),
        ("replays", (world,), _INT32),
        ("counts", (2, world, shape.num_experts), _INT32),
        ("fc2_done", (2, rows // BLOCK_ROWS), _INT32),
        ("row_source", (rows, 2), _INT32),
        ("slot_dst_rank", published, _INT32),
        ("slot_dst_row", published, _INT32),
        ("weights", published, _FP32),
        ("d_weight_parts", (*slots, -(-shape.intermediate // BACKWARD_TILE_COLUMNS)), _FP32),
        ("y_slots", (*slots, shape.hidden), _BF16),
        ("x", (copied, shape.hidden), _BF16),
        ("replay_x", (copied, shape.hidden), _BF16),
    )
    return tuple(Buffer(name=n, shape=size, element_bytes=b, symmetric=True) for n, size, b in sizes)


def partial_tiles(shape: MoeShape, max_tokens: int, ring_rows: int, *, replays: bool) -> int:
    """Tiles of fp32 sums that backward keeps while it goes from piece to piece of one expert; 0 where none is cut.

    An expert is cut when rows go through backward's ring, which is so with ``replays`` or when the routing exceeds the
    capacity, and the expert alone exceeds a segment of it. A rank without peers has the capacity for the tokens of the
    call, so a call with fewer tokens may be the one that cuts.
    """
    largest = -(-shape.ep_size * max_tokens // BLOCK_ROWS)  # row blocks of one expert
    calls = [(largest, capacity(shape, max_tokens, ring_rows))]
    if shape.ep_size == 1:
        fewest = [(block, (block - 1) * BLOCK_ROWS + 1) for block in range(1, largest + 1)]
        calls = [(block, capacity(shape, tokens, ring_rows)) for block, tokens in fewest]
    smallest = [backward_ring(rows // BLOCK_ROWS, MOST_BACKWARD_LAG, 1, shape.ep_size).segment for _, rows in calls]
    cut = any(blocks > segment for (blocks, _), segment in zip(calls, smallest, strict=True))
    if not cut or not (replays or ring_rows < most_rows(shape, max_tokens)):
        return 0
    hidden, inner, both = (
        -(-size // BACKWARD_TILE_COLUMNS) for size in (shape.hidden, shape.intermediate, 2 * shape.intermediate)
    )
    return hidden * inner + both * hidden


def scratch_buffers(shape: MoeShape, max_tokens: int, ring_rows: int, *, replays: bool = False) -> tuple[Buffer, ...]:
    """The CUDA backend's buffers of one rank that only its own kernels touch.

    Backward uses forward's again: dY goes through ``x`` and ``x_rows``, dX through ``y_slots``, the weighted h through
    ``h``. Rows that backward replays share ``x_rows`` with dY, their gate and up have the place of ``d_gate_up``.

    ``replays``: options make forward keep less than backward needs (``recompute``, or not ``save_x``).
    """
    held = capacity(shape, max_tokens, ring_rows)
    token_blocks = max(1, -(-max_tokens // TOKENS_PER_BLOCK))
    row_blocks = most_rows(shape, max_tokens) // BLOCK_ROWS
    partials = partial_tiles(shape, max_tokens, ring_rows, replays=replays)
    sizes: tuple[tuple[str, tuple[int, ...], int], ...] = (
        ("epoch", (3,), _INT32),
        ("counters", (COUNTER_WORDS + COUNTERS_PER_BLOCK * row_blocks,), _INT32),
        ("tile_table", (shape.experts_per_rank + 1,), _INT32),
        ("route_base", (shape.num_experts,), _INT32),
        ("block_counts", (token_blocks, shape.num_experts), _INT32),
        ("token_order", (max_tokens,), _INT32),
        ("last_counts", (shape.experts_per_rank,), _INT32),
        ("last_next", (shape.experts_per_rank,), _INT32),
        ("h", (held, shape.intermediate), _BF16),
        ("x_rows", (max(held, 2 * BLOCK_ROWS), shape.hidden), _BF16),
        ("row_weights", (held,), _FP32),
        ("d_gate_up", (held, 2 * shape.intermediate), _BF16),
        ("partials", (partials, 2 * BLOCK_ROWS, BACKWARD_TILE_COLUMNS), _FP32),
    )
    return tuple(Buffer(name=n, shape=size, element_bytes=b) for n, size, b in sizes)


def workspace_bytes(shape: MoeShape, max_tokens: int, ring_rows: int, *, replays: bool = False) -> int:
    """Bytes that the CUDA backend allocates on one rank, exactly: its symmetric and its local allocation."""
    symmetric = symmetric_buffers(shape, max_tokens)
    return placed(symmetric)[1] + placed(scratch_buffers(shape, max_tokens, ring_rows, replays=replays))[1]


def saved_buffers(
    shape: MoeShape,
    tokens: int,
    ring_rows: int,
    dtype: str = "bf16",
    *,
    recompute: bool = False,
    save_x: bool = True,
) -> tuple[Buffer, ...]:
    """What one layer call keeps for its backward: the contents of ``backends.base.Saved``.

    ``gate_up`` and ``x_rows`` have the capacity's length, row tables that of the worst case: the host never learns R.
    ``recompute`` keeps neither, whatever ``save_x`` says. ``tokens`` is the largest number of any rank.
    """
    size = dtype_bytes(dtype)
    held = capacity(shape, tokens, ring_rows)
    kept = [
        Buffer(name="x", shape=(tokens, shape.hidden), element_bytes=size),
        Buffer(name="slot_tables", shape=(4, tokens, shape.top_k), element_bytes=_INT32),
        Buffer(name="row_tables", shape=(2, most_rows(shape, tokens)), element_bytes=_INT32),
        Buffer(name="expert_first_row", shape=(shape.experts_per_rank + 1,), element_bytes=_INT32),
    ]
    if not recompute:
        kept.append(Buffer(name="gate_up", shape=(held, 2 * shape.intermediate), element_bytes=size))
    if save_x and not recompute:
        kept.append(Buffer(name="x_rows", shape=(held, shape.hidden), element_bytes=size))
    return tuple(kept)


def saved_bytes(
    shape: MoeShape,
    tokens: int,
    ring_rows: int,
    dtype: str = "bf16",
    *,
    recompute: bool = False,
    save_x: bool = True,
) -> int:
    """Bytes that one layer call of ``tokens`` tokens keeps until its backward."""
    buffers = saved_buffers(shape, tokens, ring_rows, dtype, recompute=recompute, save_x=save_x)
    return sum(buffer.bytes for buffer in buffers)


def format_bytes(count: float) -> str:
    """Human-readable binary size: ``1.50 GiB``, ``12.0 MiB``, ``512 B``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}" if unit == "GiB" else f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def describe_workspace(shape: MoeShape, max_tokens: int, ring_rows: int, *, replays: bool = False) -> str:
    """One line for the log at model build: what is allocated, its symmetric part and the largest buffers."""
    symmetric = symmetric_buffers(shape, max_tokens)
    buffers = (*symmetric, *scratch_buffers(shape, max_tokens, ring_rows, replays=replays))
    largest = sorted(buffers, key=lambda buffer: buffer.bytes, reverse=True)[:4]
    parts = ", ".join(f"{buffer.name} {format_bytes(buffer.bytes)}" for buffer in largest)
    return (
        f"workspace {format_bytes(workspace_bytes(shape, max_tokens, ring_rows, replays=replays))} per rank "
        f"({format_bytes(placed(symmetric)[1])} symmetric) for T<={max_tokens}, "
        f"H={shape.hidden}, I={shape.intermediate}, K={shape.top_k}, W={shape.ep_size}, "
        f"ring {capacity(shape, max_tokens, ring_rows)} rows: "
        f"{parts}"
    )
