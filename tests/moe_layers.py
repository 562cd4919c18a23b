"""Small MoELayers of the imported megatron-core: ``mok`` and ``alltoall`` twins with the same weights.

On the CPU everything here belongs into a process of its own (``run_ranks``, a subprocess): ``alltoall`` needs the CPU
shim, which replaces functions of torch. On a GPU nothing is replaced.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.reference_math import moe_layer

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 32, 24, 8, 2

_BASE: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "ffn_hidden_size": 40,  # another size than the experts', so that SequentialMLP copies the config
    "moe_ffn_hidden_size": INTERMEDIATE,
    "num_moe_experts": EXPERTS,
    "moe_router_topk": TOP_K,
    "moe_router_load_balancing_type": "none",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
}

_LINEARS = ("linear_fc1", "linear_fc2")

_DEEPSEEK = {
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk": 3,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
}

LAYER_CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre-softmax": {"moe_router_pre_softmax": True},
    "k1": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all experts": {"moe_router_topk": EXPERTS},
    "sigmoid, groups, expert bias": _DEEPSEEK,
    "aux and z loss": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_z_loss_coeff": 0.2,
    },
    "sequence aux loss, sigmoid": {
        **_DEEPSEEK,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.3,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "capacity drop": {"moe_expert_capacity_factor": 0.5},
    "capacity drop by position": {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    "router in fp32": {"moe_router_dtype": "fp32"},
    "router in fp64": {"moe_router_dtype": "fp64"},
    "shared expert": {"moe_shared_expert_intermediate_size": 40},
    "shared expert with gate": {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True},
    "clamped swiglu": {"activation_func_clamp_value": 0.5},
    # bf16 holds this limit exactly; at one that it rounds, the precision of the comparison decides about gradients.
    "swiglu with offset": {"glu_linear_offset": 0.5, "activation_func_clamp_value": 0.75},
    "fused swiglu": {"bias_activation_fusion": True},
}
"""Name -> fields of TransformerConfig: what the router, the shared expert and the activation can be."""


_device = "cpu"


def start_megatron(expert_parallel: int = 1, *, device: str = "cpu") -> None:
    """Hooks, Megatron's process groups on the default group, and its random states; on the CPU the shim before."""
    global _device  # noqa: PLW0603 (one process builds its layers on one device)
    _device = device
    if device == "cpu":
        from tests.megatron_cpu import shim

        shim.install()
    from megatron.core import parallel_state, tensor_parallel

    import mok_megatron  # noqa: F401 (installs the hooks, whatever autoload does)

    parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


class _Projection(torch.nn.Linear):
    """Stands in for Transformer Engine's linear, which alone can be a latent projection and does not run on the CPU."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **_ignored: Any) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def stand_in_for_latent_projections() -> None:
    """Let MoELayer build its latent projections without Transformer Engine, for the rest of this process."""
    from megatron.core.transformer.moe import moe_layer as megatron_layer

    megatron_layer.HAVE_TE, megatron_layer.TELinear = True, _Projection


def make_config(dispatcher: str = "mok", **changes: Any) -> Any:
    """A TransformerConfig of one small MoE layer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(**config_arguments(dispatcher, **changes))


def config_arguments(dispatcher: str = "mok", **changes: Any) -> dict[str, Any]:
    """What ``make_config`` gives to TransformerConfig."""
    return {
        **_BASE,
        "use_cpu_initialization": _device == "cpu",
        "moe_token_dispatcher_type": dispatcher,
        **changes,
    }


def build(dispatcher: str = "mok", *, seed: int = 1, **changes: Any) -> Any:
    """One MoELayer, with SequentialMLP experts unless ``moe_grouped_gemm`` asks for Transformer Engine's TEGroupedMLP.

    Weights have unit gain; experts differ from rank to rank, everything else is the same on all ranks.
    """
    config = make_config(dispatcher, **changes)
    layer = build_layer(config)
    layer.set_layer_number(1)
    if not config.use_cpu_initialization:
        layer.to(_device)  # Megatron makes the router's and the shared expert's gate on the CPU and moves whole models
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            if name.startswith("experts."):
                continue
            if tensor.dim() == 2:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[1] ** -0.5)
            elif name == "router.expert_bias":
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
        generator.manual_seed(seed + 100 * (1 + layer.ep_group.rank()))
        for tensor in layer.experts.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[1] ** -0.5)
    return layer


def build_layer(config: Any) -> Any:
    """MoELayer as Megatron's own layer spec makes it: the one of Transformer Engine with ``moe_grouped_gemm``."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.spec_utils import build_module

    grouped = config.moe_grouped_gemm
    spec = get_moe_module_spec(use_te=grouped, num_experts=config.num_moe_experts, moe_grouped_gemm=grouped)
    # 0.19 hands out a partial of MoELayer, earlier versions a ModuleSpec.
    return spec(config=config) if callable(spec) else build_module(spec, config=config)


def build_twins(**changes: Any) -> dict[str, Any]:
    """The two layers, with the same weights."""
    return {dispatcher: build(dispatcher, **changes) for dispatcher in ("alltoall", "mok")}


def expert_parameters(layer: Any, linear: str) -> dict[str, Tensor]:
    """Name among the experts' parameters -> weight ``[out, in]`` of each local expert, for either expert module."""
    experts = layer.experts
    if hasattr(experts, "local_experts"):
        local = enumerate(experts.local_experts)
        return {f"local_experts.{i}.{linear}.weight": getattr(expert, linear).weight for i, expert in local}
    module = getattr(experts, linear)
    return {f"{linear}.weight{i}": getattr(module, f"weight{i}") for i in range(layer.num_local_experts)}


def add_main_grads(layer: Any, dtype: torch.dtype) -> None:
    """Give every parameter a zero ``main_grad`` of ``dtype``, as DistributedDataParallel does."""
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        parameter.grad_added_to_main_grad = False


def take_gradient(parameter: Any) -> Tensor | None:
    """The gradient of the last backward, out of ``main_grad`` where it went there; both are cleared."""
    found, parameter.grad = parameter.grad, None
    if getattr(parameter, "grad_added_to_main_grad", False):
        found = parameter.main_grad.clone()
        parameter.main_grad.zero_()
        parameter.grad_added_to_main_grad = False
    return found


def tokens(
    rank: int, *, sequence: int = 24, dtype: torch.dtype = torch.float32, seed: int = 0, hidden: int = HIDDEN
) -> Tensor:
    """``[S, 2, H]`` of unit scale on the layers' device; S differs from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(sequence - 7 * rank, 2, hidden, generator=generator).to(_device, dtype)


def run(layer: Any, x: Tensor, **forward_arguments: Any) -> dict[str, Tensor]:
    """One forward and backward of the whole layer: y, dx, dprobs and each parameter's gradient.

    The gradient of y depends on y, so that an error of the forward reaches the gradients as well.
    """
    routed: list[Tensor] = []

    def keep_probs(_module: Any, _inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
        if outputs[0].requires_grad:  # the first forward of a recomputed layer has no gradients
            outputs[0].retain_grad()
            routed.append(outputs[0])

    handle = layer.router.register_forward_hook(keep_probs)
    x = x.clone().requires_grad_()
    y, bias = layer(x, **forward_arguments)
    assert bias is None
    (y.float().square().sum() + y.float().sum()).backward()
    handle.remove()
    found = {"y": y.detach(), "dx": x.grad, "dprobs": routed[-1].grad}
    for name, parameter in layer.named_parameters():
        found[f"d {name}"] = take_gradient(parameter)
    return found


def run_behind_router(layer: Any, x: Tensor, probs: Tensor, routing_map: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The layer's part behind the router alone, as its forward calls it: y, dx, dprobs ``[T, E]``, each weight's."""
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    hidden, dispatched_probs = layer.preprocess(x, probs, routing_map)
    hidden, dispatched_probs = layer.dispatch(hidden, dispatched_probs)
    y, _ = layer.routed_experts_compute(hidden, dispatched_probs)
    y = layer.postprocess(layer.combine(y), None)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad, "dprobs": probs.grad}
    for name, parameter in layer.experts.named_parameters():
        found[f"d {name}"] = take_gradient(parameter)
    return found


def errors_behind_router(
    rank: int, world: int, changes: dict[str, Any], probs_dtype: torch.dtype, main_grad: torch.dtype | None = None
) -> dict[str, tuple[float, float]]:
    """The part behind the router of a bf16 layer: quantity -> errors of ``mok`` and of ``alltoall`` against fp64.

    With ``main_grad`` the weights' gradients are those that fused accumulation leaves in a main_grad of this dtype.
    """
    hidden = changes.get("hidden_size", HIDDEN)
    x, dy = (tokens(rank, dtype=torch.bfloat16, seed=seed, hidden=hidden) for seed in (1, 2))
    count, top_k = x.shape[0] * x.shape[1], changes.get("moe_router_topk", TOP_K)
    generator = torch.Generator().manual_seed(7 + rank)
    scores = (torch.rand(count, EXPERTS, generator=generator) + 0.1).to(x.device)
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(top_k).indices, True)
    probs = (scores * routing_map).to(probs_dtype)

    twins = build_twins(**changes)
    if main_grad is not None:
        for layer in twins.values():
            add_main_grads(layer, main_grad)
    found = {dispatcher: run_behind_router(layer, x, probs, routing_map, dy) for dispatcher, layer in twins.items()}
    exact = _exact(twins["mok"], world, x, probs, routing_map, dy)
    assert all(list(quantities) == list(exact) for quantities in found.values())
    return {
        name: (
            relative_error(found["mok"][name], exact[name]),
            relative_error(found["alltoall"][name], exact[name]),
        )
        for name in exact
    }


def _exact(layer: Any, world: int, x: Tensor, probs: Tensor, routing_map: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """fp64 results of this rank, from the tokens and weights of all ranks."""
    hidden, local = x.shape[-1], layer.num_local_experts
    names, weights = [], []
    for linear in _LINEARS:
        parameters = expert_parameters(layer, linear)
        names.append(list(parameters))
        weights.append(torch.stack(list(parameters.values())).detach())
    gathered: list[Any] = [None] * world
    mine = (x.detach().reshape(-1, hidden), probs, routing_map, *weights, dy.reshape(-1, hidden))
    dist.all_gather_object(gathered, mine)
    everything = [torch.cat(parts) for parts in zip(*gathered, strict=True)]
    config = layer.config
    result = moe_layer(*everything, clamp=config.activation_func_clamp_value, offset=config.glu_linear_offset)

    rank = dist.get_rank()
    first = sum(part[0].shape[0] for part in gathered[:rank])
    rows = slice(first, first + mine[0].shape[0])
    exact = {"y": result.y[rows].view(x.shape), "dx": result.dx[rows].view(x.shape), "dprobs": result.dprobs[rows]}
    gradients = {
        f"d {name}": dw[rank * local + i]
        for linear, dw in zip(names, (result.dw1, result.dw2), strict=True)
        for i, name in enumerate(linear)
    }
    return exact | {f"d {name}": gradients[f"d {name}"] for name, _ in layer.experts.named_parameters()}


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Per quantity: norm of the difference over the norm of what is expected."""
    assert list(found) == list(expected), f"other quantities: {sorted(set(found) ^ set(expected))}"
    return {name: relative_error(found[name], expected[name]) for name in found}


def relative_error(found: Tensor | None, expected: Tensor | None) -> float:
    """NaN counts as infinite; nothing equals nothing; an expected 0 must be 0."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    error, scale = (found.double() - expected.double()).norm(), expected.double().norm()
    value = float(error / scale) if scale > 0 else float(error)
    return value if value == value else float("inf")


def worst(errors: dict[str, float]) -> tuple[float, str]:
    """The largest error and its quantity."""
    return max((value, name) for name, value in errors.items())


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of the quantities that differ in any bit."""
    return [name for name in one if not torch.equal(one[name], other[name])]
