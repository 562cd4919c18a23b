"""The workspace's buffers, and what is said of kernels that failed in it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mok_megatron import memory
from mok_megatron.backends import failures
from mok_megatron.backends.abi import FailRecord
from mok_megatron.backends.workspace import Sizes, Workspace
from tests.distributed import run_ranks
from tests.fake_gpu import CPU, SHAPE, FakeGpu, install


@pytest.fixture(name="gpu")
def _gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch)


def _sizes(ep_size: int = 1, tokens: int = 40) -> Sizes:
    return Sizes(shape=replace(SHAPE, num_experts=4, ep_size=ep_size), max_tokens=tokens, ring_rows=256)


@pytest.mark.parametrize("ep_size", [1, 2, 4])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_buffers_are_aligned_and_apart(gpu: FakeGpu, ep_size: int, tokens: int) -> None:
    sizes = _sizes(ep_size, tokens)
    spaces = Workspace.local(sizes, CPU)
    assert len(spaces) == ep_size
    for space in spaces:
        assert space.peers.tolist() == [other.base for other in spaces]
        layout = {name: getattr(space.layout, name) for name, _ in space.layout._fields_ if name != "bytes"}
        local = {name: address - space.scratch_bytes.data_ptr() for name, address in space.scratch.items()}
        for offsets, buffers, whole in (
            (layout, sizes.symmetric_buffers(), space.symmetric_bytes),
            (local, sizes.scratch_buffers(), space.scratch_bytes),
        ):
            assert set(offsets) == {buffer.name for buffer in buffers}
            end = 0
            for buffer in buffers:
                assert offsets[buffer.name] % memory.ALIGNMENT == 0 and offsets[buffer.name] >= end
                end = offsets[buffer.name] + buffer.bytes + memory.GUARD
            assert end <= whole.numel() and not whole.any()


def _in_a_pool(rank: int, world: int, reached: bool) -> Any:
    """Rank r's buffer begins 1024 r bytes behind the base of its allocation."""
    import torch.distributed._symmetric_memory as symmetric_memory

    install(pytest.MonkeyPatch())
    pool = torch.full((1 << 20,), 7, dtype=torch.uint8)
    bases: list[Any] = [None] * world
    dist.all_gather_object(bases, pool.data_ptr())
    if not reached:
        bases[1] = 0
    symmetric_memory.empty = lambda size, **_: pool[1024 * rank : 1024 * rank + size]  # type: ignore[assignment]

    def rendezvous(*_: Any) -> SimpleNamespace:
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        return SimpleNamespace(buffer_ptrs=bases)

    symmetric_memory.rendezvous = rendezvous  # type: ignore[assignment]
    assert dist.group.WORLD is not None
    try:
        space = Workspace.symmetric(_sizes(world), dist.group.WORLD, CPU)
    except RuntimeError as error:
        return str(error)
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST" not in os.environ
    assert not space.symmetric_bytes.any() and space.base == space.symmetric_bytes.data_ptr()
    return [int(peer) - base for peer, base in zip(space.peers, bases, strict=True)]


def test_more_rows_or_slots_than_the_tables_can_number_are_refused() -> None:
    wide = replace(SHAPE, num_experts=64, top_k=8, ep_size=8)
    with pytest.raises(ValueError, match=r"17000000 tokens per rank can make 108800\d{4} rows .* and 136000000 slots"):
        Sizes(shape=wide, max_tokens=17_000_000, ring_rows=128)
    assert Sizes(shape=wide, max_tokens=16_000_000, ring_rows=128).max_rows < 1 << 30


def test_peers_are_found_inside_of_their_allocations() -> None:
    assert run_ranks(2, _in_a_pool, True) == [[0, 1024], [0, 1024]]


def test_a_peer_out_of_reach_is_named() -> None:
    for rank, message in enumerate(run_ranks(2, _in_a_pool, False)):
        assert message.startswith(f"rank {rank} of the expert-parallel group cannot reach the memory of rank(s) [1]")


def test_a_workspace_that_nobody_holds_is_not_watched(gpu: FakeGpu) -> None:
    (space,) = Workspace.local(_sizes(), CPU)
    failures.watch(space)
    assert failures._reports() == [None]
    del space
    assert failures._reports() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"code": 1, "peer": 3},
            "layer 5, phase FC1, rank 2 of the expert-parallel group: waited longer .* for rank 3 ",
        ),
        (
            {"code": 1, "phase": "weight gradients"},
            "phase weight gradients, .* for its own kernels .item 17, wanted 256, seen 128",
        ),
        ({"code": 2, "peer": 1}, "rank 1 failed and said so"),
        ({"code": 1, "phase": "ring"}, "phase ring, .* for its own kernels .item 17, wanted 256, seen 128"),
        ({"code": 3, "want": 8, "seen": 9}, "token 17 is routed to 9 experts, more than top_k=8"),
    ],
)
def test_messages_of_failures(changes: dict[str, Any], message: str) -> None:
    changes = {**changes, "phase": failures._PHASES.index(changes.get("phase", "FC1"))}
    fields = {"rank": 2, "peer": -1, "layer": 5, "want": 256, "seen": 128, "where": 17, **changes}
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(failures.describe(FailRecord(**fields)))


@pytest.mark.parametrize("end", ["sys.exit()", "failures.forget(space)", "raise KeyboardInterrupt"])
def test_the_message_comes_once_however_the_process_ends(end: str) -> None:
    """Also where it ends before the watcher looks, or lets go of the workspace first."""
    script = f"""
import sys
import pytest
from mok_megatron.backends import failures
from mok_megatron.backends.abi import FailRecord
from mok_megatron.backends.workspace import Sizes, Workspace
from tests.fake_gpu import CPU, SHAPE, install
failures._POLL_S = 1000.0
install(pytest.MonkeyPatch())
failures._thread = None
(space,) = Workspace.local(Sizes(shape=SHAPE, max_tokens=40, ring_rows=256), CPU)
failures.watch(space)
FailRecord.from_address(space.record.data_ptr()).code = 1
print("last words")
{end}
"""
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == failures.EXIT_CODE, done.stderr
    assert done.stderr.count("waited longer than the time limit") == 1 and done.stdout == "last words\n"


def _cannot_map(rank: int, world: int) -> str:
    import torch.distributed._symmetric_memory as symmetric_memory

    def rendezvous(*_: Any) -> None:
        raise RuntimeError("CUDA driver error: invalid argument")

    install(pytest.MonkeyPatch())
    symmetric_memory.empty = lambda size, **_: torch.empty(size, dtype=torch.uint8)  # type: ignore[assignment]
    symmetric_memory.rendezvous = rendezvous  # type: ignore[assignment]
    assert dist.group.WORLD is not None
    try:
        Workspace.symmetric(_sizes(world), dist.group.WORLD, CPU)
    except RuntimeError as error:
        return str(error)
    return ""


def test_what_torch_says_is_passed_on_with_a_remedy() -> None:
    for rank, message in enumerate(run_ranks(2, _cannot_map)):
        assert message.startswith(
            f"rank {rank} of the expert-parallel group cannot map the memory of its peers: CUDA dr"
        )
        assert "an EP group must lie inside one NVLink domain" in message
