"""The fused experts on their own: Megatron's three weight layouts, hooks, bad input, one backend for all layers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mok_megatron import backend_pool
from mok_megatron.backends.reference import ReferenceBackend
from mok_megatron.config import Activation, MoeShape, MokConfig
from mok_megatron.experts import fire_pre_hooks
from mok_megatron.fused import FusedExperts
from tests.moe_layers import same_bits

SHAPE = MoeShape(hidden=16, intermediate=8, num_experts=4, top_k=2, activation=Activation())
LAYOUTS = ("per expert", "sequential", "grouped")


class _Linear(nn.Module):
    """Holds weights under the names that Megatron and Transformer Engine give them; is never called."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone()))

    def forward(self, *_: Any) -> None:
        raise AssertionError("the fused experts must not call the modules that they replace")


class _Experts(nn.Module):
    def __init__(self, layout: str, weights: dict[str, Tensor]) -> None:
        super().__init__()
        if layout == "sequential":
            self.local_experts = nn.ModuleList(nn.Module() for _ in range(SHAPE.num_experts))
        for linear, stacked in weights.items():
            if layout == "per expert":
                self.add_module(linear, _Linear({f"weight{i}": weight for i, weight in enumerate(stacked)}))
            elif layout == "grouped":
                self.add_module(linear, _Linear({"weight": stacked}))
            else:
                for expert, weight in zip(self.local_experts, stacked, strict=True):
                    expert.add_module(linear, _Linear({"weight": weight}))


def _weights(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = {"linear_fc1": (4, 16, 16), "linear_fc2": (4, 16, 8)}
    return {name: (torch.randn(size, generator=generator) / 4).to(dtype) for name, size in sizes.items()}


def _fused(experts: nn.Module, **changes: Any) -> FusedExperts:
    arguments: dict[str, Any] = {
        "group": None,
        "dtype": torch.float32,
        "options": MokConfig(backend="reference"),
        "fuse_grad_accumulation": False,
        "layer_number": 3,
    }
    return FusedExperts(experts, changes.pop("shape", SHAPE), **{**arguments, **changes})


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    probs = torch.rand(11, 4, generator=generator)
    routing_map = torch.zeros(11, 4, dtype=torch.bool).scatter_(1, probs.topk(2).indices, True)
    return torch.randn(11, 16, generator=generator), probs * routing_map, routing_map


def _run(experts: nn.Module, **changes: Any) -> dict[str, Tensor]:
    hidden, probs, routing_map = _inputs()
    hidden.requires_grad_()
    probs.requires_grad_()
    y = _fused(experts, **changes)(hidden, probs, routing_map)
    y.square().sum().backward()
    assert hidden.grad is not None and probs.grad is not None
    return {"y": y.detach(), "dx": hidden.grad, "dprobs": probs.grad}


def _stacked_grads(layout: str, experts: Any, of: str) -> dict[str, Tensor]:
    found = {}
    for linear in ("linear_fc1", "linear_fc2"):
        if layout == "sequential":
            parameters = [getattr(expert, linear).weight for expert in experts.local_experts]
        elif layout == "per expert":
            parameters = [getattr(getattr(experts, linear), f"weight{i}") for i in range(4)]
        else:
            parameters = [getattr(experts, linear).weight]
        found[linear] = torch.cat([getattr(parameter, of).reshape(-1, parameter.shape[-1]) for parameter in parameters])
    return found


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_every_weight_layout_gives_the_same_bits(layout: str) -> None:
    results = []
    for each in (LAYOUTS[0], layout):
        experts = _Experts(each, _weights())
        results.append({**_run(experts), **_stacked_grads(each, experts, "grad")})
    assert results[0]["linear_fc1"].abs().sum() > 0
    assert same_bits(*results) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_accumulation_adds_to_main_grad_and_says_so(layout: str) -> None:
    plain = _Experts(layout, _weights())
    _run(plain)
    experts: Any = _Experts(layout, _weights())
    for parameter in experts.parameters():
        parameter.main_grad = torch.full_like(parameter, 0.25)
    _run(experts, fuse_grad_accumulation=True)
    assert all(p.grad_added_to_main_grad and p.grad.shape == p.shape for p in experts.parameters())
    grads, main_grads = _stacked_grads(layout, plain, "grad"), _stacked_grads(layout, experts, "main_grad")
    for linear, grad in grads.items():
        torch.testing.assert_close(main_grads[linear], grad + 0.25, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_pre_hooks_fire_once_before_the_weights_are_read(layout: str) -> None:
    """As with overlapped parameter all-gather: until its module's hook has run, a weight holds nothing of use."""
    experts, fired = _Experts(layout, _weights()), []
    expected = _run(_Experts(layout, _weights()))
    true_weights = {id(module): [p.detach().clone() for p in module.parameters(False)] for module in experts.modules()}

    def gather(module: nn.Module, *_unused: Any) -> None:
        fired.append(module)
        for parameter, weight in zip(module.parameters(False), true_weights[id(module)], strict=True):
            parameter.data.copy_(weight)

    for module in experts.modules():
        module.register_forward_pre_hook(gather)
    fused = _fused(experts)
    for parameter in experts.parameters():
        parameter.data.fill_(float("nan"))
    y = fused(*_inputs())
    assert torch.equal(y.detach(), expected["y"])
    assert sorted(map(id, fired)) == sorted(map(id, experts.modules()))


def test_pre_hooks_with_keyword_arguments_are_called_as_registered() -> None:
    experts: Any = _Experts("per expert", _weights())
    calls: list[Any] = []
    experts.linear_fc1.register_forward_pre_hook(lambda *given: calls.append(given), with_kwargs=True)
    fire_pre_hooks(experts)
    assert calls == [(experts.linear_fc1, (), {})]


def test_hooks_that_cannot_be_honoured_are_refused_by_name() -> None:
    def swap_input(_module: nn.Module, _inputs: Any) -> Tensor:
        return torch.zeros(1)

    def look_at_output(*_: Any) -> None: ...

    experts: Any = _Experts("per expert", _weights())
    fused = _fused(experts)
    handle = experts.linear_fc2.register_forward_pre_hook(swap_input)
    with pytest.raises(ValueError, match=r"linear_fc2: .*swap_input.* replaces"):
        fused(*_inputs())
    handle.remove()
    for register in ("register_forward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"):
        handle = getattr(experts.linear_fc1, register)(look_at_output)
        with pytest.raises(ValueError, match=r"linear_fc1 \(_Linear\).*look_at_output.*would never run"):
            fused(*_inputs())
        handle.remove()
    fused(*_inputs())


def _set(index: int, make: Any) -> Any:
    def change(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = list(inputs)
        changed[index] = make(inputs[index])
        return tuple(changed)

    return change


BAD_INPUTS = {
    "hidden width": (_set(0, lambda x: x[:, :15]), r"hidden=16\], got \[11, 15\]"),
    "hidden rank": (_set(0, lambda x: x[None]), r"got \[1, 11, 16\]"),
    "hidden dtype": (_set(0, lambda x: x.half()), r"layer 3: hidden states are torch.float16 .* torch.float32"),
    "probs rows": (_set(1, lambda p: p[:10]), r"probs must be \[tokens=11, experts=4\].* got \[10, 4\]"),
    "probs dtype": (_set(1, lambda p: p.half()), r"probs must be .* got torch.float16"),
    "probs device": (_set(1, lambda p: p.to("meta")), r"probs is on meta but x is on cpu"),
    "probs NaN": (_set(1, lambda p: p.masked_fill(p == p.max(), float("nan"))), r"probs\[\d+, \d\] = nan"),
    "probs negative": (_set(1, lambda p: -p), r"probs\[\d+, \d\] = -0\."),
    "map experts": (_set(2, lambda m: m[:, :3]), r"routing_map must be .* got \[11, 3\]"),
    "map dtype": (_set(2, lambda m: m.int()), r"routing_map must be bool, got torch.int32"),
    "map rows": (_set(2, torch.ones_like), r"token 0 to 4 experts, more than top_k=2"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_refused_before_anything_changes(name: str) -> None:
    change, message = BAD_INPUTS[name]
    experts: Any = _Experts("per expert", _weights())
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    with pytest.raises(ValueError, match=message):
        _fused(experts, fuse_grad_accumulation=True)(*change(_inputs()))
    assert all(p.grad is None and not hasattr(p, "grad_added_to_main_grad") for p in experts.parameters())
    assert all(not p.main_grad.any() for p in experts.parameters())


def test_weights_that_are_not_the_layers_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"linear_fc1 .*\[16, 16\] torch.bfloat16, expected \[16, 16\] torch.float32"):
        _fused(_Experts("per expert", _weights(torch.bfloat16)))
    weights = _weights()
    weights["linear_fc1"] = weights["linear_fc1"][:, :8]
    with pytest.raises(ValueError, match=r"layer 3: linear_fc1 .*\[8, 16\] .*expected \[16, 16\]"):
        _fused(_Experts("sequential", weights))
    with pytest.raises(ValueError, match=r"knows TEGroupedMLP and SequentialMLP"):
        _fused(nn.Sequential(nn.Linear(16, 16)))


def _add_adapter(experts: Any) -> None:
    experts.linear_fc1.register_parameter("adapter", nn.Parameter(torch.zeros(2)))


def _shard(experts: Any) -> None:
    experts.linear_fc1.weight0.get_main_grad = lambda: None


@pytest.mark.parametrize(
    ("change", "message"), [(_add_adapter, "also holds linear_fc1.adapter"), (_shard, "does not support FSDP")]
)
def test_more_than_two_plain_weights_is_refused(change: Any, message: str) -> None:
    experts = _Experts("per expert", _weights())
    fused = _fused(experts)
    change(experts)
    for use in (lambda: _fused(experts), lambda: fused(*_inputs())):
        with pytest.raises(ValueError, match=message):
            use()


def test_layers_share_a_backend_and_its_life_ends_with_them() -> None:
    layers = [_fused(_Experts("per expert", _weights())) for _ in range(64)]
    assert len({id(layer.backend) for layer in layers}) == 1
    other = _fused(_Experts("per expert", _weights()), options=MokConfig(backend="reference", recompute=True))
    assert other.backend is not layers[0].backend
    alive = len(backend_pool._backends)
    del layers
    gc.collect()
    assert len(backend_pool._backends) == alive - 1


def test_the_most_tokens_are_reserved_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    monkeypatch.setattr(ReferenceBackend, "reserve", lambda _backend, tokens: reserved.append(tokens))
    layers = [_fused(_Experts("per expert", _weights()), max_tokens=tokens) for tokens in (64, None, 64)]
    assert reserved == [64, 64]
    assert len({id(layer.backend) for layer in layers}) == 1


def test_an_explicit_backend_never_falls_back() -> None:
    with pytest.raises(ValueError, match="backend=cuda cannot run this layer on cpu"):
        _fused(_Experts("per expert", _weights()), options=MokConfig(backend="cuda"))
