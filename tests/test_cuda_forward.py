"""The CUDA forward against fp64, against the torch schedule, and bit against bit; W virtual ranks on one GPU."""

from __future__ import annotations

import ctypes
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mok_megatron.backends.build import architecture_of, compile_library, find_nvcc
from mok_megatron.config import Activation
from mok_megatron.schedule import build_schedule, compact
from scripts.bench.inputs import Ranks
from scripts.bench.timing import CudaMeter
from tests.layer_run import Inputs, eager, exact, poisoned_memory, relative_error
from tests.reference_math import moe_layer
from tests.routing_cases import CASES, RoutingCase
from tests.virtual_ranks import DEVICE, HIDDEN, INTERMEDIATE, RankOutput, VirtualRanks, inputs_of, ranks_of

pytestmark = pytest.mark.gpu

_W8 = [
    RoutingCase(name="w8_uniform", tokens=(33, 1, 0, 65, 17, 128, 2, 64), num_experts=16, top_k=4),
    RoutingCase(name="w8_all_to_rank3", tokens=(16,) * 8, num_experts=16, pick=CASES["w4_all_to_rank2"].pick),
]
_LONG = [RoutingCase(name=f"w1_tokens_{t}", tokens=(t,), num_experts=12, top_k=3) for t in (255, 257, 1023)]
ALL = {**CASES, **{case.name: case for case in (*_W8, *_LONG)}}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with poisoned_memory():
        yield


def _run(ranks: VirtualRanks, inputs: Inputs, **kwargs: object) -> list[RankOutput]:
    tensors = (inputs.x, inputs.probs, inputs.routing_map, inputs.w1, inputs.w2)
    return ranks.forward(*(tensor.to(DEVICE) for tensor in tensors), **kwargs)  # type: ignore[arg-type]


def _y(outputs: list[RankOutput]) -> Tensor:
    return torch.cat([output.y for output in outputs]).cpu()


def _check_schedule(outputs: list[RankOutput], case: RoutingCase, inputs: Inputs) -> None:
    tables = [
        compact(p, m, case.top_k)
        for p, m in zip(*(t.split(case.tokens) for t in (inputs.probs, inputs.routing_map)), strict=True)
    ]
    for rank, output in enumerate(outputs):
        expected = build_schedule(
            [experts for experts, _ in tables], tables[rank][1], rank=rank, num_experts=case.num_experts, block_rows=128
        )
        for name in ("experts", "weights", "slot_dst_rank", "slot_dst_row", "expert_first_row"):
            assert torch.equal(getattr(output.schedule, name).cpu(), getattr(expected, name)), f"rank {rank}: {name}"
        for name in ("row_src_rank", "row_src_slot"):
            rows, used = getattr(output.schedule, name).cpu(), getattr(expected, name)
            assert torch.equal(rows[: used.numel()], used), f"rank {rank}: {name}"


def _check_saved(outputs: list[RankOutput], inputs: Inputs) -> None:
    """Dispatched rows are the tokens themselves, padding is 0; gate and up are near their fp32 products."""
    local, top_k = inputs.w1.shape[0] // len(outputs), inputs.top_k
    xs = inputs.x.split([output.y.shape[0] for output in outputs])
    for rank, output in enumerate(outputs):
        assert output.saved is not None and output.saved.x_rows is not None and output.saved.gate_up is not None
        first = output.schedule.expert_first_row.cpu().tolist()
        sources, slots = output.schedule.row_src_rank.cpu(), output.schedule.row_src_slot.cpu()
        rows = torch.zeros(first[-1], inputs.x.shape[1], dtype=torch.bfloat16)
        for source, x in enumerate(xs):
            here = (sources[: first[-1]] == source).nonzero()[:, 0]
            rows[here] = x[(slots[here] // top_k).long()]
        assert torch.equal(output.saved.x_rows[: first[-1]].cpu(), rows)
        for e in range(local):
            block = slice(first[e], first[e + 1])
            expected = rows[block].double() @ inputs.w1[rank * local + e].double().T
            assert relative_error(output.saved.gate_up[block].cpu(), expected) < 4e-3  # 2^-8: one rounding to bf16


MANY_EXPERTS = [
    RoutingCase(name="w1_e256_k8", tokens=(300,), num_experts=256, top_k=8),
    RoutingCase(name="w1_e257_k9", tokens=(129,), num_experts=257, top_k=9),
    RoutingCase(name="w1_e384_k8", tokens=(200,), num_experts=384, top_k=8),
    RoutingCase(name="w1_e512_k16", tokens=(65,), num_experts=512, top_k=16),
    RoutingCase(name="w2_e1024_k16", tokens=(64, 71), num_experts=1024, top_k=16),
    RoutingCase(name="w8_e1024_k9", tokens=(17, 1, 0, 33, 16, 8, 64, 5), num_experts=1024, top_k=9),
]


@pytest.mark.parametrize("name", ALL)
def test_forward_schedule_and_saved_rows(name: str) -> None:
    _check_forward(ALL[name], inputs_of(ALL[name]))


@pytest.mark.parametrize("case", MANY_EXPERTS, ids=lambda case: case.name)
def test_many_experts(case: RoutingCase) -> None:
    """The schedule looks at 256 experts at a time, and has room for 1024."""
    _check_forward(case, inputs_of(case, hidden=64, intermediate=64))


def _check_forward(case: RoutingCase, inputs: Inputs) -> None:
    ranks = ranks_of(case, inputs)
    ranks.poison()
    outputs = _run(ranks, inputs)
    ranks.check_canaries()
    expected = exact(inputs).y
    allowed = 2 * relative_error(eager(inputs).y, expected)
    error = relative_error(_y(outputs), expected)
    assert error <= allowed, f"relative error {error:.3g}, twice eager torch's is {allowed:.3g}"
    _check_schedule(outputs, case, inputs)
    _check_saved(outputs, inputs)
    ranks.close()


@pytest.mark.parametrize("sizes", [(64, 64), (256, 128), (512, 256), (576, 320), (1024, 64), (64, 1024)], ids=str)
def test_sizes(sizes: tuple[int, int]) -> None:
    case = RoutingCase(name="sizes", tokens=(300, 213), num_experts=6, top_k=3)
    inputs = inputs_of(case, hidden=sizes[0], intermediate=sizes[1])
    ranks = ranks_of(case, inputs)
    ranks.poison()
    y = _y(_run(ranks, inputs))
    expected = exact(inputs).y
    assert relative_error(y, expected) <= 2 * relative_error(eager(inputs).y, expected)
    ranks.check_canaries()
    ranks.close()


def test_clamp_and_offset() -> None:
    """A third of the gates lie beyond the limit."""
    case = CASES["k8_of_16"]
    inputs = inputs_of(case, Activation(clamp=0.5, linear_offset=1.0))
    ranks = ranks_of(case, inputs)
    y, expected = _y(_run(ranks, inputs)), exact(inputs).y
    assert relative_error(y, expected) <= 2 * relative_error(eager(inputs).y, expected)
    plain = exact(inputs_of(case)).y
    assert relative_error(y, plain) > 0.1, "the clamp has no effect, so the case tests nothing"
    ranks.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_probs_types_and_strides(dtype: torch.dtype) -> None:
    case = CASES["w1_uniform"]
    inputs = inputs_of(case)
    ranks = ranks_of(case, inputs)
    probs = inputs.probs.to(dtype)
    wide = torch.randn(probs.shape[0], 2 * probs.shape[1], dtype=dtype)
    wide[:, : probs.shape[1]] = probs
    tensors = [t.to(DEVICE) for t in (inputs.x, inputs.routing_map, inputs.w1, inputs.w2)]
    output = ranks.forward(tensors[0], wide.to(DEVICE)[:, : probs.shape[1]], *tensors[1:])[0]
    expected = compact(probs, inputs.routing_map, case.top_k)[1]
    assert torch.equal(output.schedule.weights.cpu(), expected)
    ranks.close()


def test_same_bits_in_every_run_whatever_the_timing() -> None:
    """200 runs with random delays per rank, which move the order in which rows and tiles arrive."""
    case = RoutingCase(name="timing", tokens=(257, 64, 129, 200), num_experts=16, top_k=4)
    inputs = inputs_of(case)
    ranks = ranks_of(case, inputs)
    rng = random.Random(0)
    first = _y(_run(ranks, inputs))
    tensors = [t.to(DEVICE) for t in (inputs.x, inputs.probs, inputs.routing_map, inputs.w1, inputs.w2)]
    for run in range(200):
        delays = [rng.randrange(0, 200_000) for _ in case.tokens]
        if run % 20 == 0:
            ranks.poison()
        again = torch.cat([output.y for output in ranks.forward(*tensors, delays=delays)])
        assert torch.equal(again.cpu(), first), f"run {run}, delays {delays}"
    ranks.close()


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_same_bits_for_any_number_of_ranks(world: int) -> None:
    tokens, experts = 512, 32
    whole = RoutingCase(name="ranks", tokens=(tokens,), num_experts=experts, top_k=6)
    inputs = inputs_of(whole)
    reference = VirtualRanks(hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=experts, top_k=6, tokens=(tokens,))
    expected = _y(_run(reference, inputs))
    reference.close()
    split = RoutingCase(name="ranks", tokens=(tokens // world,) * world, num_experts=experts, top_k=6)
    for options in ({}, {"comm_sms": 1}, {"comm_sms": 2}, {"comm_sms": 7}, {"recompute": True}, {"save_x": False}):
        ranks = ranks_of(split, inputs, **options)
        ranks.poison()
        assert torch.equal(_y(_run(ranks, inputs)), expected), options
        ranks.close()


def test_a_token_does_not_depend_on_other_tokens() -> None:
    """Tokens 100..139 keep their bits when all others and their routing change, and when they are moved."""
    case = RoutingCase(name="others", tokens=(300,), num_experts=8, top_k=3)
    one = inputs_of(case)
    other = inputs_of(case, seed=99)
    kept = slice(100, 140)
    x, probs, routing_map = (getattr(other, name).clone() for name in ("x", "probs", "routing_map"))
    for target, source in ((x, one.x), (probs, one.probs), (routing_map, one.routing_map)):
        target[kept] = source[kept]
    ranks = ranks_of(case, one)
    expected = _y(_run(ranks, one))[kept]
    weights = (one.w1.to(DEVICE), one.w2.to(DEVICE))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    changed = ranks.forward(x.to(DEVICE), probs.to(DEVICE), routing_map.to(DEVICE), *weights)[0].y.cpu()
    assert torch.equal(changed[kept], expected)
    x, probs, routing_map = (t[order].to(DEVICE) for t in (x, probs, routing_map))
    moved = ranks.forward(x, probs, routing_map, *weights)[0].y.cpu()
    assert torch.equal(moved[torch.argsort(order)][kept], expected)
    assert not torch.equal(changed, _y(_run(ranks, one)))
    ranks.close()


def test_row_offsets_beyond_32_bits() -> None:
    """More than 2^31 elements in the routed rows: rows near the end are as right as the first ones."""
    torch.use_deterministic_algorithms(False)  # filling 14 GB of outputs with NaN adds nothing here
    hidden, tokens, top_k = 4096, 8192 * 8, 9
    generator = torch.Generator(device=DEVICE).manual_seed(5)
    x = torch.randn(tokens, hidden, device=DEVICE, generator=generator).bfloat16()
    routing_map = torch.zeros(tokens, 12, dtype=torch.bool, device=DEVICE)
    routing_map[:, :top_k] = True
    probs = torch.rand(tokens, 12, device=DEVICE, generator=generator) * routing_map
    w1 = (torch.randn(12, 128, hidden, device=DEVICE, generator=generator) / hidden**0.5).bfloat16()
    w2 = (torch.randn(12, hidden, 64, device=DEVICE, generator=generator) / 8).bfloat16()
    ranks = VirtualRanks(hidden=hidden, intermediate=64, num_experts=12, top_k=top_k, tokens=(tokens,))
    output = ranks.forward(x, probs, routing_map, w1, w2)[0]
    assert int(output.schedule.expert_first_row[-1]) * hidden > 2**31
    for picked in (slice(0, 64), slice(tokens - 64, tokens)):
        few_x, few_probs, few_map = (t[picked].cpu() for t in (x, probs, routing_map))
        y = moe_layer(few_x, few_probs, few_map, w1.cpu(), w2.cpu(), torch.zeros_like(few_x)).y
        assert relative_error(output.y[picked].cpu(), y) < 1e-2
    ranks.close()


def test_no_grad_keeps_nothing() -> None:
    case = CASES["uniform"]
    inputs = inputs_of(case)
    ranks = ranks_of(case, inputs)
    outputs = _run(ranks, inputs, save=False)
    assert all(output.saved is None for output in outputs)
    assert torch.equal(_y(outputs), _y(_run(ranks, inputs)))
    ranks.close()


def test_changing_token_counts_and_weights() -> None:
    """Call by call other T, other routing, and weights that moved to other memory."""
    ranks = VirtualRanks(hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=8, top_k=2, tokens=(257, 257))
    for seed, counts in enumerate([(128, 127), (1, 257), (0, 64), (257, 3), (0, 0), (16, 16)]):
        case = RoutingCase(name="x" * (seed + 1), tokens=counts)
        inputs = inputs_of(case)
        outputs = _run(ranks, inputs, tokens=counts)
        expected = exact(inputs).y
        assert relative_error(_y(outputs), expected) <= 2 * relative_error(eager(inputs).y, expected)
        _check_schedule(outputs, case, inputs)
    ranks.close()


def _layer(tokens: int = 192) -> tuple[VirtualRanks, Inputs]:
    case = RoutingCase(name="layer", tokens=(tokens,), num_experts=8, top_k=2)
    inputs = inputs_of(case)
    return ranks_of(case, inputs), inputs


def _forward_of(ranks: VirtualRanks, inputs: Inputs) -> tuple[tuple[Tensor, Tensor, Tensor], Callable[[], Tensor]]:
    """x, probs and routing map on the GPU, and the one rank's forward of what they hold when it is called, prepared."""
    backend = ranks.backends[0]
    x, probs, routing_map, w1, w2 = (
        t.to(DEVICE) for t in (inputs.x, inputs.probs, inputs.routing_map, inputs.w1, inputs.w2)
    )
    first, second = list(w1), list(w2)
    backend.prepare(first, second)
    torch.cuda.synchronize()

    def call() -> Tensor:
        schedule = backend.build_schedule(x, probs, routing_map, layer=1)
        return backend.forward(x, schedule, first, second, save=True, layer=1)[0]

    return (x, probs, routing_map), call


def test_no_host_synchronisation() -> None:
    torch.use_deterministic_algorithms(False)
    ranks, inputs = _layer()
    _run(ranks, inputs)
    _, call = _forward_of(ranks, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mode is in beta
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    ranks.close()


def test_graph_replay_with_other_inputs() -> None:
    """Captured once, replayed 12 times with new x, probs and routing; each equals eager in every bit."""
    torch.use_deterministic_algorithms(False)
    ranks, inputs = _layer()
    (x, probs, routing_map), call = _forward_of(ranks, inputs)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    case = RoutingCase(name="layer", tokens=(192,), num_experts=8, top_k=2)
    for seed in range(12):
        new = inputs_of(case, seed=100 + seed)
        for target, source in ((x, new.x), (probs, new.probs), (routing_map, new.routing_map)):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        replayed = y.clone()
        assert torch.equal(replayed, call()), f"replay {seed}"
    ranks.close()


@pytest.fixture(scope="module")
def hold_sms(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tensor, int], None]:
    """Launches blocks on the current stream that keep so many SMs; ``state int32 [3]`` is described in the source."""
    nvcc = find_nvcc()
    assert nvcc is not None, "no nvcc"
    library = tmp_path_factory.mktemp("hold") / "hold_sms.so"
    architecture = architecture_of(torch.cuda.get_device_capability(DEVICE))
    assert architecture is not None
    compile_library(nvcc, architecture, [Path(__file__).parent / "native" / "hold_sms.cu"], library, what="hold_sms")
    function = ctypes.CDLL(str(library)).hold_sms
    function.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p)

    def hold(state: Tensor, sms: int) -> None:
        assert function(state.data_ptr(), sms, 10_000_000_000, torch.cuda.current_stream().cuda_stream) == 0

    return hold


@pytest.mark.parametrize("sms", [2, 32, 100])
def test_kernels_that_hold_sms_until_we_are_done_do_not_block_us(
    sms: int, hold_sms: Callable[[Tensor, int], None]
) -> None:
    """What holds them goes only when a launch behind ours says so: a kernel that needs all its CTAs would never end."""
    torch.use_deterministic_algorithms(False)
    ranks, inputs = _layer(tokens=1024)
    expected = _y(_run(ranks, inputs))
    _, call = _forward_of(ranks, inputs)
    state, side = torch.zeros(3, dtype=torch.int32, device=DEVICE), torch.cuda.Stream()
    state[1].fill_(0)  # a kernel of torch that is loaded at its first launch would wait for those that wait for it
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        hold_sms(state, sms)
    while int(state[0]) < sms:
        pass
    y = call()
    state[1].fill_(1)
    torch.cuda.synchronize()
    assert int(state[2]) == 0, "the forward did not end while the SMs were held"
    assert torch.equal(y.cpu(), expected)
    ranks.close()


def test_a_forward_is_four_kernels_and_nothing_else() -> None:
    torch.use_deterministic_algorithms(False)
    ranks, inputs = _layer()
    _, call = _forward_of(ranks, inputs)
    assert CudaMeter(Ranks(rank=0, world=1, device=DEVICE)).launches(lambda _: call()) == 4
    ranks.close()


def test_bad_tensors_are_refused_with_their_values() -> None:
    ranks, inputs = _layer()
    backend = ranks.backends[0]
    x, probs, routing_map = (t.to(DEVICE) for t in (inputs.x, inputs.probs, inputs.routing_map))
    first, second = list(inputs.w1.to(DEVICE)), list(inputs.w2.to(DEVICE))
    with pytest.raises(ValueError, match=r"layer 3: x must be \[192, 320\] torch.bfloat16"):
        backend.build_schedule(x.float(), probs, routing_map, layer=3)
    schedule = backend.build_schedule(x, probs, routing_map, layer=3)
    with pytest.raises(ValueError, match="w1 has 7 experts, the rank holds 8"):
        backend.forward(x, schedule, first[:7], second, save=False, layer=3)
    with pytest.raises(ValueError, match=r"w1\[0\] must be contiguous"):
        backend.forward(x, schedule, [w.T.contiguous().T for w in first], second, save=False, layer=3)
    with pytest.raises(ValueError, match=r"w2\[0\] must be \[320, 192\]"):
        backend.forward(x, schedule, first, first, save=False, layer=3)
    two = VirtualRanks(hidden=64, intermediate=64, num_experts=4, top_k=1, tokens=(8, 8))
    with pytest.raises(ValueError, match="this call has 9 tokens but the workspace was made for 8"):
        two.backends[0].build_schedule(x[:9, :64].contiguous(), probs[:9, :4], routing_map[:9, :4], layer=1)
    two.close()
    ranks.close()
