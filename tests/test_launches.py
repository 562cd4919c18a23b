"""A backend's launches with stand-ins for the GPU: devices, streams, graphs, the workspace's life."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mok_megatron import memory
from mok_megatron.backends import cuda, failures
from mok_megatron.backends.abi import BackwardParams, ForwardParams, ReopenParams, ScheduleParams
from mok_megatron.backends.base import Saved, WeightGrads
from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.backends.launches import Launches
from mok_megatron.backends.workspace import Workspace
from mok_megatron.config import MokConfig
from tests.fake_gpu import CPU, SHAPE, FakeGpu, FakeLibrary, bf16, install


@pytest.fixture(name="gpu")
def _gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch)


def _backend(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[CudaBackend, FakeLibrary]:
    library = FakeLibrary(gpu)
    monkeypatch.setattr(cuda, "load_library", lambda _architecture: library)
    monkeypatch.setattr(cuda, "_announce", lambda _line: None)
    backend = CudaBackend.create(SHAPE, MokConfig(**options), None, CPU)
    for part in (backend, backend._launches, backend._weight_maps, backend._grad_tables):
        setattr(part, "device" if part is backend else "_device", CPU)  # without an index, as tensors have it
    return backend, library


def _call(backend: CudaBackend, tokens: int, *, backward: bool = True) -> Saved:
    x = bf16(tokens, 128)
    w1, w2 = [bf16(128, 128) for _ in range(2)], [bf16(128, 64) for _ in range(2)]
    probs, routing_map = torch.ones(tokens, 2), torch.ones(tokens, 2, dtype=torch.bool)
    schedule = backend.build_schedule(x, probs, routing_map, layer=1)
    y, saved = backend.forward(x, schedule, w1, w2, save=True, layer=1)
    assert saved is not None
    if backward:
        grads = WeightGrads(w1=[torch.zeros(128, 128)] * 2, w2=[torch.zeros(128, 64)] * 2, accumulate=True)
        backend.backward(y, saved, w1, w2, grads, needs_dx=True, dprobs=torch.empty_like(probs), layer=1)
    return saved


@pytest.fixture(name="made")
def _made(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> tuple[CudaBackend, FakeLibrary]:
    return _backend(gpu, monkeypatch)


def test_a_step_is_four_launches_on_one_stream(made: tuple[CudaBackend, FakeLibrary], gpu: FakeGpu) -> None:
    backend, library = made
    _call(backend, 8)
    kinds = [ScheduleParams, ForwardParams, ReopenParams, BackwardParams]
    assert [kind for kind, _, _ in library.launched] == kinds
    assert {stream for _, _, stream in library.launched} == {0}
    assert [line for line in gpu.said if "waits" in line] == []


@pytest.mark.parametrize(("comm_sms", "used"), [(None, 132), (1, 1), (16, 16), (500, 132)])
def test_as_many_sms_communicate_as_the_option_says(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, comm_sms: int | None, used: int
) -> None:
    backend, library = _backend(gpu, monkeypatch, comm_sms=comm_sms)
    _call(backend, 8)
    _, forward, _, backward = library.params
    assert (forward.sms, forward.comm_sms) == (backward.sms, backward.comm_sms) == (132, used)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@pytest.mark.parametrize(
    ("options", "keeps_gate_up", "keeps_x_rows"),
    [({}, True, True), ({"save_x": False}, True, False), ({"recompute": True}, False, False)],
)
def test_backward_is_told_what_forward_kept(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, options: dict[str, bool], keeps_gate_up: bool, keeps_x_rows: bool
) -> None:
    backend, library = _backend(gpu, monkeypatch, **options)
    saved = _call(backend, 8)
    space, (_, forward, reopen, backward) = backend.workspace, library.params
    assert space is not None and space.sizes.replays is not keeps_x_rows
    assert (saved.gate_up is not None, saved.x_rows is not None) == (keeps_gate_up, keeps_x_rows)
    assert forward.gate_up == backward.gate_up == _address(saved.gate_up)
    assert forward.x_rows == (saved.x_rows.data_ptr() if saved.x_rows is not None else space.scratch["x_rows"])
    assert backward.x_rows == _address(saved.x_rows)
    assert reopen.kept == keeps_x_rows
    assert reopen.x == backward.x == forward.x == saved.x.data_ptr()
    assert reopen.dy == backward.dy != saved.x.data_ptr()
    assert backward.w1_forward_maps == forward.w1_maps
    assert (forward.x_ring, forward.h) == (space.scratch["x_rows"], space.scratch["h"])
    rings = {name: getattr(backward, name) for name in ("dy_rows", "d_gate_up", "h_rows", "row_weights", "partials")}
    names = {"dy_rows": "x_rows", "h_rows": "h"}
    assert rings == {name: space.scratch[names.get(name, name)] for name in rings}


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_all_launches_work_on_the_schedules_tables(made: tuple[CudaBackend, FakeLibrary], tokens: int) -> None:
    backend, library = made
    schedule = _call(backend, tokens).schedule
    at = {
        name: getattr(schedule, name).data_ptr() or None
        for name in ("weights", "slot_dst_rank", "slot_dst_row", "row_src_rank", "row_src_slot", "expert_first_row")
    }
    made_by, *users = library.params
    assert made_by.out_experts == (schedule.experts.data_ptr() or None)
    outputs = at.keys() - {"row_src_rank", "row_src_slot"}  # which forward fills
    assert {name: getattr(made_by, f"out_{name}") for name in outputs} == {name: at[name] for name in outputs}
    for params in users:
        used = [name for name in at if hasattr(params, name)]
        assert {name: getattr(params, name) for name in used} == {name: at[name] for name in used}
        assert len(used) == (4 if isinstance(params, ReopenParams) else 6)


@pytest.mark.parametrize(
    ("ring_rows", "tokens", "capacity", "most"),
    [(None, 8, 256, 256), (128, 8, 128, 256), (128, 200, 128, 384), (130, 200, 256, 384), (1024, 200, 384, 384)],
)
def test_a_call_knows_its_capacity_and_the_most_rows(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, ring_rows: int | None, tokens: int, capacity: int, most: int
) -> None:
    """8 tokens reach 2 experts at most, one block each; 200 tokens are 2 blocks and one more where both are ragged."""
    backend, library = _backend(gpu, monkeypatch, ring_rows=ring_rows)
    backend.reserve(300)
    saved = _call(backend, tokens)
    assert [(params.call.capacity, params.call.max_rows) for params in library.params] == [(capacity, most)] * 4
    assert saved.gate_up is not None and saved.gate_up.shape[0] == capacity
    assert saved.x_rows is not None and saved.x_rows.shape[0] == capacity
    assert saved.schedule.row_src_rank.shape[0] == most == memory.most_rows(SHAPE, tokens)


def test_backward_works_in_the_capacity_of_its_forward(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the workspace has grown in between."""
    backend, library = _backend(gpu, monkeypatch, ring_rows=None)
    saved = _call(backend, 200, backward=False)
    forward = library.params[-1]
    _call(backend, 1000)
    grads = WeightGrads(w1=[torch.zeros(128, 128)] * 2, w2=[torch.zeros(128, 64)] * 2, accumulate=True)
    w1, w2 = [bf16(128, 128) for _ in range(2)], [bf16(128, 64) for _ in range(2)]
    backend.backward(bf16(200, 128), saved, w1, w2, grads, needs_dx=False, dprobs=None, layer=1)
    for params in library.params[-2:]:
        assert (params.call.capacity, params.call.max_rows) == (forward.call.capacity, forward.call.max_rows)
    assert library.params[-1].dx is None and not library.params[-1].wants_dx
    assert library.params[-1].d_probs is None


def test_launches_go_to_the_tensors_device(gpu: FakeGpu) -> None:
    library = FakeLibrary(gpu)
    launches = Launches(library, SHAPE, MokConfig(), torch.device("cuda", 3), rank=0, sms=132)  # type: ignore[arg-type]
    for current in (0, 3):
        gpu.current = current
        launches._launch(ReopenParams(), launches.begin(layer=1))
        assert gpu.current == current
    assert [device for _, device, _ in library.launched] == [3, 3]


def test_a_call_on_another_stream_waits_for_the_one_before(made: tuple[CudaBackend, FakeLibrary], gpu: FakeGpu) -> None:
    backend, _ = made
    _call(backend, 8)
    gpu.stream = gpu.streams[1]
    _call(backend, 8, backward=False)
    assert [line for line in gpu.said if "waits for 0" in line] == ["1 waits for 0"]
    gpu.stream, gpu.capturing = gpu.streams[2], True
    _call(backend, 8, backward=False)
    assert "2 waits for 1" not in gpu.said, "a capture may not wait for what is outside it"
    gpu.stream, gpu.capturing = gpu.streams[0], False
    _call(backend, 8, backward=False)
    waits = [line for line in gpu.said if "waits for" in line and "event" not in line]
    assert waits == ["1 waits for 0", "0 waits for 1"], "a capture does not stand between two calls"


def test_a_workspace_grows_and_is_kept_for_graphs(made: tuple[CudaBackend, FakeLibrary], gpu: FakeGpu) -> None:
    backend, _ = made
    _call(backend, 8)
    first = backend.workspace
    _call(backend, 4)
    assert backend.workspace is first
    _call(backend, 16)
    second = backend.workspace
    assert second is not first and not backend._retired, "nobody uses the first"
    gpu.capturing = True
    _call(backend, 16)
    with pytest.raises(ValueError, match="a workspace for 32 tokens cannot be made while a graph is captured"):
        _call(backend, 32)
    gpu.capturing = False
    _call(backend, 32)
    assert backend._retired == [second] and backend.workspace is not second
    _call(backend, 64)
    assert backend._retired == [second], "the third was not captured"
    assert [watched() for watched in failures._watched] == [second, backend.workspace]


def test_rows_are_those_of_the_workspace_in_use(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "load_library", lambda _architecture: FakeLibrary(gpu))
    backend = CudaBackend.virtual_ranks(replace(SHAPE, ep_size=2), MokConfig(), CPU, max_tokens=64)[0]
    found = []
    for max_tokens in (256, 16):
        backend._adopt(Workspace.local(backend.sizes(max_tokens), CPU)[0])
        found.append(backend._rows(16, layer=1))
        assert found[-1] == (backend.sizes(max_tokens).ring_rows, backend.sizes(max_tokens).max_rows)
    assert found[0] != found[1]
    with pytest.raises(ValueError, match="this call has 64 tokens but the workspace was made for 16"):
        backend._rows(64, layer=1)
    backend.close()
    with pytest.raises(RuntimeError, match="layer 5: the backend has no workspace"):
        backend._rows(16, layer=5)


def test_nothing_is_launched_after_close(made: tuple[CudaBackend, FakeLibrary], gpu: FakeGpu) -> None:
    backend, library = made
    x, w1, w2 = bf16(8, 128), [bf16(128, 128)] * 2, [bf16(128, 64)] * 2
    schedule = backend.build_schedule(x, torch.ones(8, 2), torch.ones(8, 2, dtype=torch.bool), layer=1)
    launched = len(library.launched)
    for _ in range(2):
        backend.close()
    assert failures._watched == [] and "synchronized" in gpu.said
    with pytest.raises(RuntimeError, match=r"layer 4: the backend has no workspace: call reserve\(max_tokens\)"):
        backend.forward(x, schedule, w1, w2, save=True, layer=4)
    assert len(library.launched) == launched


def test_a_dead_device_does_not_keep_a_backend_open(
    made: tuple[CudaBackend, FakeLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _ = made
    _call(backend, 8)

    def dead(_device: Any) -> None:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "synchronize", dead)
    with pytest.raises(RuntimeError, match="unspecified"):
        backend.close()
    assert failures._watched == [] and backend.workspace is None
    backend.close()


def test_a_failed_kernel_ends_the_next_call_and_no_record_is_an_address(
    made: tuple[CudaBackend, FakeLibrary],
) -> None:
    backend, _ = made
    _call(backend, 8)
    space = backend.workspace
    assert space is not None and space.failure() is None
    space.record[:] = torch.tensor([1, 3, 0, -1, 9, 128, 17, 2], dtype=torch.int32)
    record = space.failure()
    assert record is not None
    space.record.zero_()
    assert record.want == 128
    space.record[0] = 1
    with pytest.raises(RuntimeError, match=r"layer 0, phase routing, .*for rank 0 .*found at the next call, layer 1"):
        _call(backend, 8)
