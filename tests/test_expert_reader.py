"""Reading the expert modules call after call: nothing is looked up twice, and nothing that changed is missed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mok_megatron import experts as experts_module
from mok_megatron.experts import ExpertReader

EXPERTS = 3


class _PerExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, size in (("linear_fc1", (8, 4)), ("linear_fc2", (4, 4))):
            linear = nn.Module()
            for i in range(EXPERTS):
                linear.register_parameter(f"weight{i}", nn.Parameter(torch.zeros(size)))
            self.add_module(name, linear)


class _Sequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.local_experts = nn.ModuleList(nn.Module() for _ in range(EXPERTS))
        for expert in self.local_experts:
            expert.linear_fc1 = nn.Linear(4, 8, bias=False)
            expert.linear_fc2 = nn.Linear(4, 4, bias=False)


@pytest.fixture(name="lookups")
def _lookups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each time that the weights were looked up."""
    seen: list[Any] = []
    original = experts_module.expert_weights

    def spy(*arguments: Any) -> Any:
        seen.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(experts_module, "expert_weights", spy)
    return seen


def _weights(experts: Any) -> list[nn.Parameter]:
    """In the order of w1, then w2."""
    if isinstance(experts, _Sequential):
        return [getattr(e, name).weight for name in ("linear_fc1", "linear_fc2") for e in experts.local_experts]
    return [*experts.linear_fc1.parameters(), *experts.linear_fc2.parameters()]


def _check(reader: ExpertReader, experts: nn.Module) -> None:
    w1, w2 = reader.read()
    assert [id(p) for p in (*w1.parameters, *w2.parameters)] == [id(p) for p in _weights(experts)]


@pytest.mark.parametrize("kind", [_PerExpert, _Sequential])
def test_weights_that_stay_are_looked_up_once(kind: Callable[[], nn.Module], lookups: list[Any]) -> None:
    experts = kind()
    reader = ExpertReader(experts, EXPERTS)
    for _ in range(3):
        _check(reader, experts)
        _weights(experts)[0].requires_grad_(False)  # of the parameters themselves; autograd looks at that
        _weights(experts)[1].data = torch.ones_like(_weights(experts)[1])
    assert len(lookups) == 1


def _replace_a_parameter(experts: nn.Module) -> None:
    module = experts.local_experts[1].linear_fc2 if isinstance(experts, _Sequential) else experts.linear_fc2
    name = "weight" if isinstance(experts, _Sequential) else "weight1"
    setattr(module, name, nn.Parameter(torch.zeros(4, 4)))


def _replace_a_module(experts: nn.Module) -> None:
    if isinstance(experts, _Sequential):
        experts.local_experts[2].linear_fc1 = nn.Linear(4, 8, bias=False)
    else:
        experts.linear_fc1 = _PerExpert().linear_fc1


def _replace_all_modules(experts: nn.Module) -> None:
    for name, module in type(experts)().named_children():
        setattr(experts, name, module)


@pytest.mark.parametrize("kind", [_PerExpert, _Sequential])
@pytest.mark.parametrize("change", [_replace_a_parameter, _replace_a_module, _replace_all_modules])
def test_what_is_replaced_is_seen_in_the_next_call(kind: Any, change: Any, lookups: list[Any]) -> None:
    experts = kind()
    reader = ExpertReader(experts, EXPERTS)
    for calls in range(1, 4):
        _check(reader, experts)
        assert len(lookups) == calls
        change(experts)


@pytest.mark.parametrize("kind", [_PerExpert, _Sequential])
def test_a_hook_may_replace_a_parameter(kind: Any) -> None:
    experts = kind()
    reader = ExpertReader(experts, EXPERTS)
    _check(reader, experts)
    next(reversed(list(experts.modules()))).register_forward_pre_hook(lambda *_: _replace_a_parameter(experts))
    for _ in range(3):
        _check(reader, experts)


@pytest.mark.parametrize("kind", [_PerExpert, _Sequential])
@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_a_hook_that_is_added_later_is_refused(kind: Any, register: str) -> None:
    experts = kind()
    reader = ExpertReader(experts, EXPERTS)
    reader.read()
    handle = getattr(next(reversed(list(experts.modules()))), register)(lambda *_: None)
    with pytest.raises(ValueError, match="would never run"):
        reader.read()
    handle.remove()
    _check(reader, experts)


def _hook_of_graph_capture(*_: Any) -> None:
    """What Transformer Engine hangs on every module while it warms up for a capture."""
    raise AssertionError("the module has not run")


_hook_of_graph_capture.__module__ = "transformer_engine.pytorch.graph"


@pytest.mark.parametrize("kind", [_PerExpert, _Sequential])
def test_what_notes_the_modules_for_a_graph_passes_uncalled(kind: Any) -> None:
    experts = kind()
    reader = ExpertReader(experts, EXPERTS)
    for module in experts.modules():
        module.register_forward_hook(_hook_of_graph_capture)
    _check(reader, experts)
    last = next(reversed(list(experts.modules())))
    foreign = last.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="would never run"):
        reader.read()
    foreign.remove()
    last.register_full_backward_hook(_hook_of_graph_capture)
    with pytest.raises(ValueError, match=r"backward_hooks.* would never run"):
        reader.read()


@pytest.mark.parametrize("kind", [_PerExpert, _Sequential])
def test_a_parameter_that_is_added_later_is_refused(kind: Any) -> None:
    experts = kind()
    reader = ExpertReader(experts, EXPERTS)
    reader.read()
    child = nn.Linear(2, 2)
    next(reversed(list(experts.modules()))).adapter = child
    for _ in range(2):
        with pytest.raises(ValueError, match=r"also holds .*adapter"):
            reader.read()


def test_weights_that_are_no_parameters_are_looked_up_in_every_call(lookups: list[Any]) -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves = [torch.zeros(8, 4)]

        @property
        def weight(self) -> torch.Tensor:
            return 2 * self.halves[0]

    experts = _Sequential()
    experts.local_experts[0].linear_fc1 = Doubled()
    reader = ExpertReader(experts, EXPERTS)
    reader.read()
    experts.local_experts[0].linear_fc1.halves[0] += 1
    assert bool((reader.read()[0].parameters[0] == 2).all())
    assert len(lookups) == 2
