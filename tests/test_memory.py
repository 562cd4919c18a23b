"""The memory formulas against hand-computed values and against brute force over routings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron import memory
from mok_megatron.backends.workspace import Sizes, Workspace
from mok_megatron.config import MoeShape

SMALL = MoeShape(hidden=256, intermediate=128, num_experts=8, top_k=2, ep_size=2)


def test_workspace_bytes_by_hand() -> None:
    # T=128, C=640 (5 blocks), H=256, I=128, E=8, e=4, K=2, W=2
    symmetric = 2 * 4 + 2 * 4 + 4 + 2 * 2 * 8 * 4 + 2 * 5 * 4 + 640 * 2 * 4 + 2 * 128 * 2 * 4  # flags, counts, tables
    symmetric += 128 * 2 * 4 + 640 * 4  # weights, d_weight_parts
    symmetric += 640 * 256 * 2 + 128 * 256 * 2  # y_rows, x
    token_blocks = 128 // memory.TOKENS_PER_BLOCK
    scratch = 3 * 4 + (2 * 5 + 128 + 4) * 4 + 5 * 4 + 8 * 4 + token_blocks * 8 * 4 + 128 * 4 + 4 * 4 + 4 * 4
    scratch += 640 * 128 * 2 + 640 * 256 * 2  # h, x_rows
    scratch += 640 * 4 + 640 * 256 * 2  # row_weights, d_gate_up
    assert sum(b.bytes for b in memory.symmetric_buffers(SMALL, 128, 640)) == symmetric
    assert sum(b.bytes for b in memory.scratch_buffers(SMALL, 128, 640)) == scratch
    placed = memory.workspace_bytes(SMALL, 128, 640) - symmetric - scratch
    count = len(memory.workspace_buffers(SMALL, 128, 640))
    assert count * memory.GUARD <= placed < count * (memory.GUARD + memory.ALIGNMENT)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_allocated_bytes_are_what_a_workspace_allocates(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # there may be no GPU to pin for
    for tokens, rows in ((0, 128), (1, 128), (100, 640), (1024, 2176)):
        shape = MoeShape(hidden=256, intermediate=192, num_experts=16, top_k=3, ep_size=ranks)
        spaces = Workspace.local(Sizes(shape=shape, max_tokens=tokens, ring_rows=rows), torch.device("cpu"))
        expected = memory.workspace_bytes(shape, tokens, rows)
        assert [s.symmetric_bytes.numel() + s.scratch_bytes.numel() for s in spaces] == [expected] * ranks
        assert spaces[0].layout.bytes == spaces[0].symmetric_bytes.numel()


def test_rebuilt_bytes_are_those_that_forward_did_not_keep() -> None:
    assert memory.rebuilt_bytes(SMALL, 640, recompute=False, save_x=True) == 0
    assert memory.rebuilt_bytes(SMALL, 640, recompute=False, save_x=False) == 640 * 256 * 2
    assert memory.rebuilt_bytes(SMALL, 640, recompute=True, save_x=True) == 640 * (256 + 256) * 2


def test_workspace_does_not_grow_with_layers_and_little_with_ranks() -> None:
    """The large buffers depend on T and C alone; a 95 GiB workspace once came from multiplying them by W."""
    sizes = []
    for ranks in (8, 64):
        shape = MoeShape(hidden=7168, intermediate=2048, num_experts=256, top_k=8, ep_size=ranks)
        sizes.append(memory.workspace_bytes(shape, 8192, 82432))
    assert sizes[1] < sizes[0] * 1.001


def test_saved_bytes_by_hand() -> None:
    # x, four slot tables, two row tables, expert_first_row
    base = 128 * 256 * 2 + 4 * 128 * 2 * 4 + 2 * 640 * 4 + 5 * 4
    gate_up, x_rows = 640 * 256 * 2, 640 * 256 * 2
    assert memory.saved_bytes(SMALL, 128, 640) == base + gate_up + x_rows
    assert memory.saved_bytes(SMALL, 128, 640, recompute=True) == base + x_rows
    assert memory.saved_bytes(SMALL, 128, 640, recompute=True, save_x=False) == base


def test_deepseek_v3_ep64_is_about_what_the_buffers_add_up_to() -> None:
    shape = MoeShape(hidden=7168, intermediate=2048, num_experts=256, top_k=8, ep_size=64)
    ring = memory.default_ring_rows(shape, 8192)
    assert ring == 82432  # ceil((8192 * 8 * 1.25 + 4 * 127) / 128) * 128
    big = ring * (7168 * 2 + 2048 * 3) * 2 + 8192 * 7168 * 2
    total = memory.workspace_bytes(shape, 8192, ring)
    assert big < total < big * 1.002
    assert total < 4 << 30
    text = memory.describe_workspace(shape, 8192, ring)
    assert text.startswith("workspace 3.26 GiB per rank (1.21 GiB symmetric) for T<=8192, H=7168, I=2048, K=8, W=64")
    assert text.endswith("ring 82432 rows: y_rows 1.10 GiB, x_rows 1.10 GiB, d_gate_up 644.0 MiB, h 322.0 MiB")


def test_worst_case_by_hand() -> None:
    # 2 ranks * 128 tokens * min(2, 4) = 512 routes, 4 experts * 127 padding -> 1020 -> 7 blocks
    assert memory.worst_case_rows(SMALL, 128) == 896


def test_one_rank_ring_is_never_more_than_the_worst_case() -> None:
    shape = MoeShape(hidden=64, intermediate=64, num_experts=4, top_k=2)
    assert memory.default_ring_rows(shape, 100) == memory.worst_case_rows(shape, 100)
    assert memory.default_ring_rows(shape, 0) == memory.BLOCK_ROWS


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
