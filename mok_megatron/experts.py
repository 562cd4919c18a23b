"""Megatron's expert modules as the fused layer sees them: weights, and the hooks of modules that are not called."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mok_megatron.autograd import ExpertParams

_GRAPH_CAPTURE = "transformer_engine.pytorch.graph"
"""Python module whose forward hooks on the experts are left uncalled, because nothing is lost by that.

Before it captures graphs, Transformer Engine notes which of its modules run: a replay has to look after their fp8 state
and their delayed weight gradients. ``mok`` refuses both (fp8, delay_wgrad_compute), and these modules do not run.
"""


def expert_weights(experts: nn.Module, num_local_experts: int) -> tuple[ExpertParams, ExpertParams]:
    """The two weights of the rank's e experts, as Megatron's own parameters.

    Per expert ``linear_fc1`` ``[2I, H]`` (gate rows, then up) and ``linear_fc2`` ``[H, I]``; for TEGroupedMLP with one
    weight per expert or a single grouped one, or for SequentialMLP. Raises ValueError for any other module.
    """
    w1 = ExpertParams(_linear_weights(experts, "linear_fc1", num_local_experts), num_local_experts)
    w2 = ExpertParams(_linear_weights(experts, "linear_fc2", num_local_experts), num_local_experts)
    return w1, w2


def check_parameters(experts: nn.Module, found: tuple[ExpertParams, ExpertParams]) -> None:
    """Raise ValueError for what the two weights alone do not describe: other parameters, and FSDP's shards.

    Biases or adapters would silently take no part.
    """
    used = {id(parameter) for params in found for parameter in params.parameters}
    unused = [name for name, parameter in experts.named_parameters() if id(parameter) not in used]
    if unused:
        raise ValueError(
            f"moe_token_dispatcher_type='mok' computes the experts from the weights of linear_fc1 and linear_fc2 "
            f"alone, but {type(experts).__name__} also holds {', '.join(unused[:4])}"
            f"{' ...' if len(unused) > 4 else ''}: remove these parameters, or use another dispatcher"
        )
    # Megatron-FSDP puts get_main_grad on its parameters; torch's FSDP turns them into DTensors.
    if any(hasattr(p, "get_main_grad") or hasattr(p, "device_mesh") for params in found for p in params.parameters):
        raise ValueError(
            f"moe_token_dispatcher_type='mok' does not support FSDP, which shards the weights of "
            f"{type(experts).__name__}: use DistributedDataParallel with the distributed optimizer"
        )


def _linear_weights(experts: nn.Module, linear: str, num_local_experts: int) -> tuple[Tensor, ...]:
    local_experts = getattr(experts, "local_experts", None)
    if local_experts is not None:
        return tuple(getattr(expert, linear).weight for expert in local_experts)
    module = getattr(experts, linear, None)
    per_expert = tuple(getattr(module, f"weight{i}", None) for i in range(num_local_experts))
    if all(isinstance(weight, Tensor) for weight in per_expert):
        return tuple(weight for weight in per_expert if weight is not None)
    grouped = getattr(module, "weight", None)
    if isinstance(grouped, Tensor):
        return (grouped,)
    raise ValueError(
        f"moe_token_dispatcher_type='mok' finds no weights in {type(experts).__module__}.{type(experts).__name__}: it "
        f"knows TEGroupedMLP and SequentialMLP. Use Megatron's own expert modules in the layer spec"
    )


def fire_pre_hooks(experts: nn.Module) -> None:
    """Call the forward pre-hooks of every module that the fused layer computes in place of.

    DistributedDataParallel hangs the wait for overlapped parameter all-gather on them. The modules' inputs do not
    exist here, so the hooks get none. Raises ValueError for a hook that cannot be honoured for that reason: one that
    replaces its input, and any other kind of hook but those of ``_GRAPH_CAPTURE``.
    """
    for name, module in experts.named_modules():
        for identity, hook in list(module._forward_pre_hooks.items()):
            with_kwargs = identity in module._forward_pre_hooks_with_kwargs
            if _call(hook, module, with_kwargs) is not None:
                raise ValueError(
                    f"a forward pre-hook of the experts ({name or 'experts'}: {_describe(hook)}) replaces the "
                    f"module's input, which does not exist with moe_token_dispatcher_type='mok': hook the MoE layer"
                )
        for kind in ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks"):
            for hook in getattr(module, kind, {}).values():
                if kind == "_forward_hooks" and getattr(hook, "__module__", None) == _GRAPH_CAPTURE:
                    continue
                raise ValueError(
                    f"moe_token_dispatcher_type='mok' computes the experts without calling {name or 'experts'} "
                    f"({type(module).__name__}), so its hook {_describe(hook)} ({kind.strip('_')}) would never run: "
                    f"hook the MoE layer, or use another dispatcher"
                )


class ExpertReader:
    """Reads an expert module call after call: looks at everything that may have changed, and does again only that.

    Modules and parameters may be replaced, hooks be added, at any time after the model was built. Traversing the
    modules of 128 experts costs most of a millisecond; that nothing was replaced is seen in a twentieth of it.
    """

    def __init__(self, experts: nn.Module, num_local_experts: int) -> None:
        self._experts, self._num_local_experts = experts, num_local_experts
        self._modules = [vars(experts)]
        self._children: list[nn.Module | None] | None = None
        self._parameters: list[int] | None = None
        self._found: tuple[ExpertParams, ExpertParams] | None = None

    def read(self) -> tuple[ExpertParams, ExpertParams]:
        """The weights (``expert_weights``), checked (``check_parameters``), after the pre-hooks (``fire_pre_hooks``).

        Raises ValueError as these three do.
        """
        self._look_at_modules()
        if self._hooked():
            fire_pre_hooks(self._experts)
            self._look_at_modules()
        parameters = [id(p) for m in self._modules if m["_parameters"] for p in m["_parameters"].values()]
        if self._found is None or parameters != self._parameters:
            self._found = expert_weights(self._experts, self._num_local_experts)
            check_parameters(self._experts, self._found)
            # What was found is held, so no other parameter can get its identity. A weight that is no parameter (but
            # computed by a property, say) is looked up in every call.
            held = set(parameters)
            known = all(id(p) in held for params in self._found for p in params.parameters)
            self._parameters = parameters if known else None
        return self._found

    def _look_at_modules(self) -> None:
        if self._found_children() != self._children:
            self._modules = [vars(module) for module in self._experts.modules()]
            self._children = self._found_children()
            self._parameters = None

    def _found_children(self) -> list[nn.Module | None]:
        return [child for m in self._modules if m["_modules"] for child in m["_modules"].values()]

    def _hooked(self) -> bool:
        for m in self._modules:
            if m["_forward_pre_hooks"] or m["_forward_hooks"] or m["_backward_hooks"] or m["_backward_pre_hooks"]:
                return True
        return False


def _call(hook: Any, module: nn.Module, with_kwargs: bool) -> Any:
    return hook(module, (), {}) if with_kwargs else hook(module, ())


def _describe(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or repr(hook))
