"""The memory formulas against hand-computed values and against brute force over routings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron import memory
from mok_megatron.backends.workspace import Sizes, Workspace
from mok_megatron.config import MoeShape
from mok_megatron.tile_order import BLOCK_ROWS, backward_ring

SMALL = MoeShape(hidden=256, intermediate=128, num_experts=8, top_k=2, ep_size=2)


def test_workspace_bytes_by_hand() -> None:
    # T=128, C=1536 (more than R, so only R rows are held), H=256, I=128, E=8, e=4, K=2, W=2, R=896 (7 blocks)
    symmetric = 2 * 4 + 2 * 4 + 4 + 2 * 4 + 2 * 2 * 8 * 4 + 2 * 7 * 4  # flags, counts, FC2 counters
    symmetric += 896 * 2 * 4 + 2 * 128 * 2 * 4 + 128 * 2 * 4  # row_source, slot tables, weights
    symmetric += 128 * 2 * 1 * 4 + 128 * 2 * 256 * 2 + 2 * 128 * 256 * 2  # d_weight_parts, y_slots, x and replay_x
    token_blocks = 128 // memory.TOKENS_PER_BLOCK
    scratch = 3 * 4 + (128 + 5 * 7) * 4 + 5 * 4 + 8 * 4 + token_blocks * 8 * 4 + 128 * 4 + 4 * 4 + 4 * 4
    scratch += 896 * 128 * 2 + 896 * 256 * 2  # h, x_rows
    scratch += 896 * 4 + 896 * 256 * 2  # row_weights, d_gate_up
    assert sum(b.bytes for b in memory.symmetric_buffers(SMALL, 128)) == symmetric
    assert sum(b.bytes for b in memory.scratch_buffers(SMALL, 128, 1536)) == scratch
    placed = memory.workspace_bytes(SMALL, 128, 1536) - symmetric - scratch
    count = len(memory.symmetric_buffers(SMALL, 128)) + len(memory.scratch_buffers(SMALL, 128, 1536))
    assert count * memory.GUARD <= placed < count * (memory.GUARD + memory.ALIGNMENT)


def test_dy_and_x_have_a_block_each_in_the_smallest_ring() -> None:
    (x_rows,) = (b for b in memory.scratch_buffers(SMALL, 128, 128) if b.name == "x_rows")
    assert x_rows.shape == (256, 256)


PARTIALS = (1 * 1 + 1 * 1) * 256 * 256 * 4
"""Of SMALL: dW2 [256, 128] and dW1 [256, 256] are one tile of 256 x 256 each, in fp32."""


@pytest.mark.parametrize(
    ("tokens", "rows", "replays", "expected"),
    [
        (128, 1024, False, 0),  # more than R = 896: neither ring nor pieces
        (128, 896, False, 0),
        (128, 768, False, PARTIALS),  # R exceeds C, backward's ring is 3 blocks, a segment 1, an expert 2
        (64, 384, False, 0),  # likewise, but an expert is 1 block
        (128, 896, True, PARTIALS),  # replayed whatever the routing: ring 3, segment 1, expert 2
        (128, 3584, True, PARTIALS),  # likewise: R is 7 blocks, and no more are held
        (64, 640, True, 0),  # R is 5 blocks, ring 2, segment 1, expert 1
    ],
)
def test_partial_sums_where_an_expert_may_be_cut(tokens: int, rows: int, replays: bool, expected: int) -> None:
    with_them = memory.scratch_buffers(SMALL, tokens, rows, replays=replays)
    (partials,) = (buffer for buffer in with_them if buffer.name == "partials")
    assert partials.bytes == expected


def test_partial_sums_of_ragged_matrices() -> None:
    shape = MoeShape(hidden=320, intermediate=192, num_experts=8, top_k=2, ep_size=2)
    # dW2 [320, 192] is 2 x 1 tiles, dW1 [384, 320] is 2 x 2
    assert memory.partial_tiles(shape, 1024, 256, replays=False) == 6


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_call_cuts_an_expert_without_partial_sums(data: st.DataObject) -> None:
    """One rank's capacity follows the call's tokens: (6 experts, K=4, T=256) cuts none, 129 tokens of it cut one."""
    ranks = data.draw(st.sampled_from([1, 2, 4, 8]))
    experts = ranks * data.draw(st.integers(1, 16))
    top_k = data.draw(st.integers(1, min(experts, 16)))
    shape = MoeShape(hidden=8, intermediate=8, num_experts=experts, top_k=top_k, ep_size=ranks)
    tokens = data.draw(st.integers(1, 2048 // ranks))
    ring = data.draw(
        st.one_of(st.just(memory.default_ring_rows(shape, tokens)), st.integers(1, 256).map((128).__mul__))
    )
    replays = data.draw(st.booleans())
    if memory.partial_tiles(shape, tokens, ring, replays=replays) == 0:
        fewer = data.draw(st.integers(1, tokens))
        most = memory.most_rows(shape, fewer if ranks == 1 else tokens)  # peers hold the addresses of one workspace
        held = min(ring, most)
        blocks = -(-ranks * fewer // 128)
        uncut = blocks <= backward_ring(held // 128, data.draw(st.integers(0, 6)), 1, ranks).segment
        assert uncut or not (replays or most > held)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_buffer_holds_more_rows_than_a_call_can_have(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 8]))
    shape = MoeShape(hidden=64, intermediate=64, num_experts=ranks * 4, top_k=3, ep_size=ranks)
    tokens = data.draw(st.integers(1, 512))
    most = memory.most_rows(shape, tokens)
    enough, more = (
        (memory.scratch_buffers(shape, tokens, rows, replays=True), memory.saved_buffers(shape, tokens, rows))
        for rows in (most, most + 128 * data.draw(st.integers(1, 100)))
    )
    assert more == enough


def test_one_rank_takes_the_call_that_cuts_into_account() -> None:
    shape = MoeShape(hidden=8, intermediate=8, num_experts=6, top_k=4)
    assert memory.default_ring_rows(shape, 256) == 1664
    # 256 tokens: ring 6 of 13 blocks, segment 2, expert 2. 129 tokens: R is 9 blocks, ring 4, segment 1, expert 2.
    assert [memory.partial_tiles(shape, 256, 1664, replays=replays) for replays in (False, True)] == [0, 2]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_allocated_bytes_are_what_a_workspace_allocates(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # there may be no GPU to pin for
    for tokens, rows in ((0, 128), (1, 128), (100, 640), (1024, 2176)):
        shape = MoeShape(hidden=256, intermediate=192, num_experts=16, top_k=3, ep_size=ranks)
        replays = tokens == 100
        sizes = Sizes(shape=shape, max_tokens=tokens, ring_rows=rows, replays=replays)
        spaces = Workspace.local(sizes, torch.device("cpu"))
        expected = memory.workspace_bytes(shape, tokens, rows, replays=replays)
        assert [s.symmetric_bytes.numel() + s.scratch_bytes.numel() for s in spaces] == [expected] * ranks
        assert spaces[0].layout.bytes == spaces[0].symmetric_bytes.numel()


def test_workspace_does_not_grow_with_layers_and_little_with_ranks() -> None:
    """The wide buffers depend on T and C alone; a 95 GiB workspace once came from multiplying them by W."""
    sizes = []
    for ranks in (8, 64):
        shape = MoeShape(hidden=7168, intermediate=2048, num_experts=256, top_k=8, ep_size=ranks)
        sizes.append(memory.workspace_bytes(shape, 8192, 82432))
    assert sizes[1] < sizes[0] * 1.005  # tables hold the worst case


def test_saved_bytes_by_hand() -> None:
    # x, four slot tables, two row tables of the worst case (896 rows), expert_first_row
    base = 128 * 256 * 2 + 4 * 128 * 2 * 4 + 2 * 896 * 4 + 5 * 4
    gate_up, x_rows = 640 * 256 * 2, 640 * 256 * 2
    assert memory.saved_bytes(SMALL, 128, 640) == base + gate_up + x_rows
    assert memory.saved_bytes(SMALL, 128, 640, save_x=False) == base + gate_up
    assert memory.saved_bytes(SMALL, 128, 640, recompute=True) == base
    assert memory.saved_bytes(SMALL, 128, 640, recompute=True, save_x=False) == base


def test_deepseek_v3_ep64_is_about_what_the_buffers_add_up_to() -> None:
    shape = MoeShape(hidden=7168, intermediate=2048, num_experts=256, top_k=8, ep_size=64)
    ring = memory.default_ring_rows(shape, 8192)
    assert ring == 82432  # ceil((8192 * 8 * 1.25 + 4 * 127) / 128) * 128
    big = 8192 * 7168 * 2 * (8 + 2) + ring * (7168 + 2048 * 3) * 2  # y_slots, x, replay_x; x_rows, h, d_gate_up
    big += (28 * 8 + 16 * 28) * 256 * 256 * 4  # partials
    total = memory.workspace_bytes(shape, 8192, ring)
    assert big < total < big * 1.01
    assert total < 4 << 30
    text = memory.describe_workspace(shape, 8192, ring)
    assert text.startswith("workspace 3.32 GiB per rank (1.11 GiB symmetric) for T<=8192, H=7168, I=2048, K=8, W=64")
    assert text.endswith("ring 82432 rows: x_rows 1.10 GiB, y_slots 896.0 MiB, d_gate_up 644.0 MiB, h 322.0 MiB")


def test_worst_case_by_hand() -> None:
    # 2 ranks * 128 tokens * min(2, 4) = 512 routes, 4 experts * 127 padding -> 1020 -> 7 blocks
    assert memory.worst_case_rows(SMALL, 128) == 896


def test_one_rank_ring_is_never_more_than_the_worst_case() -> None:
    shape = MoeShape(hidden=64, intermediate=64, num_experts=4, top_k=2)
    assert memory.default_ring_rows(shape, 100) == memory.worst_case_rows(shape, 100)
    assert memory.default_ring_rows(shape, 0) == BLOCK_ROWS


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_worst_case_bounds_any_routing_and_is_reached(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 3))
    local = data.draw(st.integers(1, 4))
    top_k = data.draw(st.integers(1, ranks * local))
    tokens = data.draw(st.integers(0, 6))
    block = data.draw(st.sampled_from([1, 4, 8]))
    shape = MoeShape(hidden=8, intermediate=8, num_experts=ranks * local, top_k=top_k, ep_size=ranks)
    counts = [0] * shape.num_experts
    for _ in range(ranks * tokens):
        for expert in data.draw(st.permutations(range(shape.num_experts)))[:top_k]:
            counts[expert] += 1
    padded = sum(-(-count // block) * block for count in counts[:local])
    bound = memory.worst_case_rows(shape, tokens, block)
    assert padded <= bound
    per_expert = ranks * tokens * min(top_k, local)
    if local == 1:
        assert bound == -(-per_expert // block) * block


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory.workspace_bytes(SMALL, 128, 0), "ring_rows must be an integer >= 1, got 0"),
        (lambda: memory.workspace_bytes(SMALL, -1, 128), "max_tokens must be an integer >= 0, got -1"),
        (lambda: memory.saved_bytes(SMALL, 128, 128, "int8"), "dtype must be one of bf16, fp16, fp32, got 'int8'"),
        (lambda: memory.default_ring_rows(SMALL, 128, margin=0.5), "ring margin must be a finite number >= 1, got 0.5"),
    ],
)
def test_bad_values_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_format_bytes() -> None:
    assert [memory.format_bytes(n) for n in (5, 2048, 3 << 20, 3 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "3.00 GiB"]
