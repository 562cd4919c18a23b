"""Tables of addresses and tensor maps on the device, under streams, graphs and eviction; operands that are refused."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
import torch

from mok_megatron.backends import device_tables, streams
from mok_megatron.backends.base import WeightGrads
from mok_megatron.backends.device_tables import DeviceTables
from mok_megatron.backends.grad_tables import GradTables, GradTargets
from mok_megatron.backends.streams import Calling
from mok_megatron.backends.weight_maps import WeightMaps, check_operand
from tests.fake_gpu import CPU, SHAPE, FakeGpu, FakeLibrary, bf16, install


@pytest.fixture(name="gpu")
def _gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return install(monkeypatch)


def _calling(layer: int = 1) -> Calling:
    return Calling.on(CPU, layer)


def _table(number: int) -> torch.Tensor:
    return torch.tensor([number])


def test_a_table_is_made_once_per_set_of_addresses(gpu: FakeGpu) -> None:
    tables, made = DeviceTables(CPU), []
    first = [tables.of(key, lambda: made.append(1) or _table(1), _calling()) for key in ((1,), (2,), (1,))]  # type: ignore[func-returns-value]
    assert first[0] == first[2] != first[1] and len(made) == 2
    assert gpu.said == []


def test_another_stream_waits_for_the_copy_once(gpu: FakeGpu) -> None:
    tables = DeviceTables(CPU)
    for stream in (0, 1, 1, 0, 2):
        gpu.stream = gpu.streams[stream]
        tables.of((1,), lambda: _table(1), _calling())
    assert gpu.said == ["1 waits for event of 0", "kept for 1", "2 waits for event of 0", "kept for 2"]


def test_the_tables_used_longest_ago_go_first(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tables, "KEPT", 2)
    tables, made = DeviceTables(CPU), []
    for key in (1, 2, 1, 3, 1, 2):
        tables.of((key,), lambda key=key: made.append(key) or _table(key), _calling())  # type: ignore[misc, func-returns-value]
    assert made == [1, 2, 3, 2]


def test_a_table_made_for_a_graph_is_for_that_graph_alone(gpu: FakeGpu) -> None:
    """The captured copy runs at replay; an eager call, or another graph, would read memory that nobody has filled."""
    tables, made = DeviceTables(CPU), []

    def make() -> torch.Tensor:
        made.append(1)
        return _table(1)

    gpu.capturing = True
    captured = [tables.of((1,), make, _calling()), tables.of((1,), make, _calling())]
    gpu.capturing = False
    eager = tables.of((1,), make, _calling())
    assert len({*captured, eager}) == len(made) == 3


def test_a_table_that_a_graph_read_outlives_eviction(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tables, "KEPT", 1)
    tables = DeviceTables(CPU)
    kept = tables.of((1,), lambda: _table(1), _calling())
    gpu.capturing = True
    assert tables.of((1,), lambda: _table(1), _calling()) == kept
    gpu.capturing = False
    tables.of((2,), lambda: _table(2), _calling())
    assert [entry.device.data_ptr() for entry in tables._of_graphs.values()] == [kept]
    tables.clear()
    assert not tables._of_graphs and not tables._entries


def _grads(w1: Any, w2: Any, *, accumulate: bool = True) -> WeightGrads:
    return WeightGrads(w1=w1, w2=w2, accumulate=accumulate)


def _grad_tables(gpu: FakeGpu, library: FakeLibrary | None = None) -> GradTables:
    return GradTables(library or FakeLibrary(gpu), SHAPE, CPU)  # type: ignore[arg-type]


def test_gradient_tables_hold_addresses_and_zeros(gpu: FakeGpu) -> None:
    tables = _grad_tables(gpu)
    first, second = bf16(128, 128), bf16(128, 64)
    assert tables.of(_grads([None, None], [None, None]), _calling()) == GradTargets(None, None, None, None, 0, True)
    targets = tables.of(_grads([first, None], [None, second]), _calling())
    (entry,) = tables._tables._entries.values()
    assert entry.device.tolist() == [first.data_ptr(), 0, 0, second.data_ptr()]
    assert targets == GradTargets(entry.device.data_ptr(), entry.device.data_ptr() + 16, None, None, 1, True)
    assert tables.of(_grads([first, None], [None, None]), _calling()).w2 is None
    assert tables.of(_grads([None, None], [None, second]), _calling()).w1 is None


@pytest.mark.parametrize("accumulate", [False, True])
def test_fp32_gradients_have_maps(gpu: FakeGpu, accumulate: bool) -> None:
    library = FakeLibrary(gpu)
    tables, first, second = _grad_tables(gpu, library), torch.zeros(128, 128), torch.zeros(128, 64)
    targets = tables.of(_grads([first, None], [None, second], accumulate=accumulate), _calling())
    (entry,) = tables._tables._entries.values()
    assert entry.device.view(torch.int64)[:4].tolist() == [first.data_ptr(), 0, 0, second.data_ptr()]
    begin, (of_w1, of_w2) = entry.device.data_ptr(), library.encoded
    assert targets == GradTargets(begin, begin + 16, begin + 128, begin + 384, 0, accumulate)
    assert entry.device.numel() == 640 and of_w2[0] - of_w1[0] == 256
    assert of_w1[1:] == ([first.data_ptr(), 0], {"bytes_": 4, "rows": 128, "columns": 128, "box_rows": 64})
    assert of_w2[1:] == ([0, second.data_ptr()], {"bytes_": 4, "rows": 128, "columns": 64, "box_rows": 64})


def test_memory_used_again_with_another_dtype_is_checked_again(gpu: FakeGpu) -> None:
    """At one address: bf16 gradients that fit, then fp32 ones with rows of half the length."""
    tables, memory = _grad_tables(gpu), bf16(128, 128)
    assert tables.of(_grads([memory, None], [None, None]), _calling()).type == 1
    again = memory.view(torch.float32)
    with pytest.raises(ValueError, match=r"layer 3: the gradient of w1\[0\] must be contiguous \[128, 128\]"):
        tables.of(_grads([again, None], [None, None]), _calling(3))
    with pytest.raises(ValueError, match=r"must be all float32 or all bfloat16"):
        tables.of(_grads([memory, again], [None, None]), _calling())


def test_weight_maps_follow_the_addresses(gpu: FakeGpu) -> None:
    library = FakeLibrary(gpu)
    maps = WeightMaps(library, SHAPE, CPU)  # type: ignore[arg-type]
    w1, w2 = [bf16(128, 128) for _ in range(2)], [bf16(128, 64) for _ in range(2)]
    first = maps.of(w1, w2, _calling())
    assert maps.of(w1, w2, _calling()) == first and len(library.encoded) == 4
    starts = [start - library.encoded[0][0] for start, _, _ in library.encoded]
    assert starts == [0, 256, 512, 768]
    addresses = (first.w1_forward, first.w2_forward, first.w1_backward, first.w2_backward)
    assert [address - addresses[0] for address in addresses] == [0, 256, 512, 768]
    one, two = [w.data_ptr() for w in w1], [w.data_ptr() for w in w2]
    assert [matrices for _, matrices, _ in library.encoded] == [one, two, one, two]
    w1[1] = bf16(128, 128)
    assert maps.of(w1, w2, _calling()) != first and len(library.encoded) == 8


@pytest.mark.parametrize(
    ("w1", "w2", "message"),
    [
        ([bf16(128, 128)], [bf16(128, 64)] * 2, "layer 7: w1 has 1 experts, the rank holds 2"),
        ([bf16(128, 128)] * 2, [bf16(64, 128)] * 2, r"w2\[0\] must be \[128, 64\] torch.bfloat16 on cpu"),
        ([bf16(128, 128)] * 2, [bf16(64, 128).T] * 2, r"w2\[0\] must be contiguous and 16-byte aligned.*\(1, 128\)"),
    ],
)
def test_weights_that_do_not_fit_get_no_maps(gpu: FakeGpu, w1: Any, w2: Any, message: str) -> None:
    library = FakeLibrary(gpu)
    maps = WeightMaps(library, SHAPE, CPU)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            maps.of(w1, w2, _calling(7))
    assert library.encoded == []


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(4, 8), r"x must be \[4, 8\] torch.bfloat16 on cpu, got \[4, 8\] torch.float32"),
        (bf16(4, 9), r"got \[4, 9\]"),
        (torch.empty(4, 8, dtype=torch.bfloat16, device="meta"), "on meta"),
        (bf16(33)[1:].view(4, 8), r"16-byte aligned, got strides \(8, 1\) at address 0x"),
    ],
)
def test_operands_that_the_copy_engine_cannot_read(tensor: torch.Tensor, message: str) -> None:
    check_operand("x", bf16(4, 8), (4, 8), CPU, 3)
    with pytest.raises(ValueError, match=message):
        check_operand("x", tensor, (4, 8), CPU, 3)


@pytest.mark.parametrize(
    ("w1", "w2", "message"),
    [
        ([bf16(128, 128), None], [torch.zeros(128, 64), None], "layer 5: .* all float32 or all bfloat16, got torch.bf"),
        ([torch.zeros(128, 128).double(), None], [None, None], "got torch.float64"),
        ([None, torch.zeros(128, 64)], [None, None], r"gradient of w1\[1\] must be contiguous \[128, 128\]"),
        ([None, None], [torch.zeros(64, 128).T, None], r"w2\[0\] .* with strides \(1, 128\)"),
        ([torch.zeros(128, 128, device="meta"), None], [None, None], r"w1\[0\] .* on cpu .* got \[128, 128\] on meta"),
        ([None, None], [torch.zeros(128 * 64 + 2)[2:].view(128, 64), None], r"w2\[0\] .* 16-byte aligned"),
        ([torch.zeros(128, 128)], [None], "w1 has 1 gradients, the rank holds 2 experts"),
    ],
)
def test_gradients_that_the_kernel_cannot_write(gpu: FakeGpu, w1: Any, w2: Any, message: str) -> None:
    tables = _grad_tables(gpu)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            tables.of(_grads(w1, w2), _calling(5))
    assert tables.of(_grads([torch.zeros(128, 128), None], [None, None]), _calling()).type == 0


@pytest.mark.parametrize("current", [0, 3])
def test_a_call_asks_about_its_own_device(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, current: int) -> None:
    gpu.current = current
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.current == 3)
    assert Calling.on(torch.device("cuda", 3), 7) == Calling(layer=7, stream=0, captured=True, here=current == 3)
    assert gpu.current == current


def test_a_torch_without_the_private_question_is_asked_in_public(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.stream = gpu.streams[2]
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    assert runpy.run_path(streams.__file__)["_handle_of_current_stream"](0) == 2
