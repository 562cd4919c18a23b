"""Other projects' layers, measured beside ours in the same process where they can be imported.

Nothing here is needed to run the benchmark; docs/benchmarks/README.md says what each needs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from .implementations import Gradients, Implementation
from .inputs import Case
from .shapes import named_shapes
from .torch_eager import grouped_experts


class _PeerLayer:
    """What the peers share: leaves per set of tensors, the first three being x, router weights ``[T, K]``, w1."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._sets: list[list[Tensor]] = []

    def clear_gradients(self, index: int) -> None:
        """See ``Layer``."""
        for leaf in self._sets[index]:
            leaf.grad = None

    def gradients(self, index: int, expert: int) -> Gradients:
        """See ``Layer``; for leaves x, router weights, w1 ``[e, 2I, H]``, w2 ``[e, H, I]``."""
        dx, dprobs, dw1, dw2 = (_grad(leaf) for leaf in self._sets[index])
        return Gradients(dx=dx, dprobs=dprobs.view(self._case.experts.shape), dw1=dw1[expert], dw2=dw2[expert])

    def schedule(self, index: int) -> object:
        """Not a step of its own."""
        return None

    def workspace_bytes(self) -> int:
        """Unknown, and left out."""
        return 0

    def uncounted_bytes(self) -> int:
        """Unknown, and left out."""
        return 0

    def close(self) -> None:
        """See ``Layer``."""
        self._sets.clear()


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _require_process_group() -> None:
    """Some peers need torch.distributed even for a single rank."""
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


class MegatronLayer(_PeerLayer):
    """Megatron's MoELayer behind its router: alltoall dispatcher, TEGroupedMLP of Transformer Engine."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self._layers = [self._make(case, index) for index in range(len(case.copies))]
        probs, self._routing_map = case.dense_routing()
        for copy, layer in zip(case.copies, self._layers, strict=True):
            self._sets.append([_leaf(copy.x[:, None]), _leaf(probs), *layer.parameters()])

    def _make(self, case: Case, index: int) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig

        shape = case.shape
        _require_process_group()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(
                expert_model_parallel_size=shape.ep_size,
                expert_tensor_parallel_size=1,
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=1,
            hidden_size=shape.hidden,
            num_attention_heads=8,
            ffn_hidden_size=shape.intermediate,
            moe_ffn_hidden_size=shape.intermediate,
            num_moe_experts=shape.num_experts,
            moe_router_topk=shape.top_k,
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=True,
            moe_permute_fusion=True,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=functional.silu,
            bias_activation_fusion=True,
            bf16=True,
            params_dtype=torch.bfloat16,
            expert_model_parallel_size=shape.ep_size,
        )
        layer = get_moe_module_spec(use_te=True, num_experts=shape.num_experts, moe_grouped_gemm=True)(config)
        layer.set_layer_number(1)
        copy = case.copies[index]
        for expert in range(shape.experts_per_rank):
            getattr(layer.experts.linear_fc1, f"weight{expert}").data = copy.w1[expert]
            getattr(layer.experts.linear_fc2, f"weight{expert}").data = copy.w2[expert]
        return layer.cuda()

    def forward(self, index: int) -> Tensor:
        """See ``Layer.forward``."""
        layer, (x, probs, *_) = self._layers[index], self._sets[index]
        hidden, probs = layer.preprocess(x, probs, self._routing_map)
        rows, probs = layer.dispatch(hidden, probs)
        out, _ = layer.routed_experts_compute(rows, probs)
        y: Tensor = layer.postprocess(layer.combine(out), None)
        return y.view(self._case.tokens, -1)

    def gradients(self, index: int, expert: int) -> Gradients:
        """See ``Layer``."""
        x, probs, *_ = self._sets[index]
        experts = self._layers[index].experts
        return Gradients(
            dx=_grad(x)[:, 0],
            dprobs=_grad(probs).gather(1, self._case.experts),
            dw1=_grad(getattr(experts.linear_fc1, f"weight{expert}")),
            dw2=_grad(getattr(experts.linear_fc2, f"weight{expert}")),
        )


class SonicLayer(_PeerLayer):
    """SonicMoE (no expert parallelism), by its entry for routings that are made elsewhere."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs

        _limit_autotuning("sonicmoe")
        self._function, self._swiglu = moe_general_routing_inputs, ActivationType.SWIGLU
        tokens = torch.arange(case.tokens, device=case.ranks.device, dtype=torch.int32)
        self._tokens = tokens.repeat_interleave(case.shape.top_k)
        self._experts = case.experts.flatten().int()
        for copy in case.copies:
            self._sets.append([_leaf(tensor) for tensor in (copy.x, case.weights.flatten(), copy.w1, copy.w2)])

    def forward(self, index: int) -> Tensor:
        """See ``Layer.forward``."""
        x, weights, w1, w2 = self._sets[index]
        stream = torch.cuda.current_stream().cuda_stream
        first, second = w1.permute(1, 2, 0), w2.permute(1, 2, 0)
        experts = self._case.shape.num_experts
        y: Tensor = self._function(
            x,
            weights,
            self._tokens,
            self._experts,
            first,
            None,
            second,
            None,
            experts,
            stream,
            self._swiglu,
            is_inference_mode_enabled=False,  # where it is set, 0.1.2 passes None for a tensor and fails
            concat_layout=True,  # all gate rows, then all up rows
        )[0]
        return y


def _limit_autotuning(package: str, kept: int = 4) -> None:
    """Its Triton kernels would otherwise try configurations for minutes at their first call."""
    from triton.runtime.autotuner import Autotuner

    for name, module in list(sys.modules.items()):
        if name.startswith(package):
            for value in vars(module).values():
                if isinstance(value, Autotuner):
                    value.configs = value.configs[:kept]


class LigerCuteLayer(_PeerLayer):
    """liger-cute's fused layer: separate gate and up weights, router weights in bf16.

    What its forward keeps for backward stays in its symmetric heap until that backward, and the heap has room for
    one: so forward alone is timed under no_grad, where the same kernel runs and its buffers are given back.
    """

    heap_bytes: ClassVar[int | None] = None
    """Device memory that its configuration took; once per process, and for the largest of the shapes."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        from liger_kernel.ops.cute.ops.moe import moe_fused

        self._function = moe_fused
        _require_process_group()
        if LigerCuteLayer.heap_bytes is None:
            before = _outside_torch()
            self._configure(case)
            LigerCuteLayer.heap_bytes = _outside_torch() - before
        self._experts = case.experts.int()
        for copy in case.copies:
            gate, up = (half.contiguous() for half in copy.w1.chunk(2, dim=1))
            tensors = (copy.x, case.weights.to(torch.bfloat16), gate, up, copy.w2)
            self._sets.append([_leaf(tensor) for tensor in tensors])

    def _configure(self, case: Case) -> None:
        import liger_cute_kernels

        world = case.shape.ep_size
        shapes = named_shapes().values()
        config = liger_cute_kernels.MoEConfig(
            max_tokens=max(8192, case.tokens),
            hidden_size=max(shape.hidden for shape in shapes),
            num_experts=max(shape.on_ranks(world).num_experts for shape in shapes if shape.model_experts % world == 0),
            top_k=max(shape.top_k for shape in shapes),
            num_hosts=1,
            gpus_per_host=world,
            max_inflight=1,
        )
        liger_cute_kernels.configure(device=case.ranks.device, moe=config)

    def forward(self, index: int) -> Tensor:
        """See ``Layer.forward``."""
        x, weights, gate, up, down = self._sets[index]
        shape = self._case.shape
        y: Tensor = self._function(x, self._experts, weights, gate, up, down, shape.num_experts, shape.top_k, None)
        return y

    def gradients(self, index: int, expert: int) -> Gradients:
        """See ``Layer``."""
        dx, dprobs, gate, up, dw2 = (_grad(leaf) for leaf in self._sets[index])
        return Gradients(dx=dx, dprobs=dprobs, dw1=torch.cat([gate[expert], up[expert]]), dw2=dw2[expert])

    def workspace_bytes(self) -> int:
        """Its symmetric heap, which holds what forward keeps too."""
        return self.heap_bytes or 0

    def uncounted_bytes(self) -> int:
        """The heap; less the split weights, which stand beside the case's own."""
        return self.workspace_bytes() - sum(copy.w1.numel() * copy.w1.element_size() for copy in self._case.copies)


def _outside_torch() -> int:
    """Bytes of the current device that are taken, but not by torch's allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class DeepEpLayer(_PeerLayer):
    """DeepEP's dispatch and combine inside one node, grouped GEMMs of torch between them. Forward only."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        import deep_ep

        world, row_bytes = case.shape.ep_size, case.shape.hidden * 2
        configs = (deep_ep.Buffer.get_dispatch_config(world), deep_ep.Buffer.get_combine_config(world))
        size = max(config.get_nvl_buffer_size_hint(row_bytes, world) for config in configs)
        self._buffer = deep_ep.Buffer(case.ranks.group, size, 0)
        self._experts = case.experts.to(getattr(deep_ep, "topk_idx_t", torch.int64))

    def clear_gradients(self, index: int) -> None:
        """It makes none."""

    def forward(self, index: int) -> Tensor:
        """See ``Layer.forward``."""
        case, copy = self._case, self._case.copies[index]
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(self._experts, case.shape.num_experts)
        x, experts, weights, counts, handle, _ = self._buffer.dispatch(
            copy.x,
            topk_idx=self._experts,
            topk_weights=case.weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        token, slot = (experts >= 0).nonzero(as_tuple=True)
        order = torch.argsort(experts[token, slot], stable=True)
        token, slot = token[order], slot[order]
        ends = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)
        out = grouped_experts(x[token], ends, copy.w1, copy.w2, case.shape.activation)
        partial = torch.zeros_like(x).index_add_(0, token, out * weights[token, slot, None].to(out.dtype))
        y: Tensor = self._buffer.combine(partial, handle)[0]
        return y


def _needs(
    *modules: str, clamp: bool = False, world: Callable[[int], bool] = lambda ranks: True
) -> Callable[[Case], str | None]:
    """``unavailable`` of a peer: number of ranks, device, clamped SwiGLU (unless ``clamp``), modules that import."""

    def unavailable(case: Case) -> str | None:
        if not world(case.shape.ep_size):
            return f"does not run on {case.shape.ep_size} rank(s)"
        if case.shape.activation.clamp is not None and not clamp:
            return f"its SwiGLU has no clamp, the layer's is {case.shape.activation.clamp}"
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # it may fail in any way: for want of a library, a driver, a GPU
                return f"not importable: {module}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return None

    return unavailable


IMPLEMENTATIONS = (
    Implementation(
        name="megatron-te",
        build=MegatronLayer,
        unavailable=_needs("transformer_engine.pytorch", "megatron.core.models.gpt.moe_module_specs"),
    ),
    Implementation(name="sonicmoe", build=SonicLayer, unavailable=_needs("sonicmoe", world=lambda ranks: ranks == 1)),
    Implementation(
        name="liger-cute",
        build=LigerCuteLayer,
        unavailable=_needs("liger_cute_kernels", "liger_kernel.ops.cute.ops.moe"),
        saves=False,
    ),
    Implementation(
        name="deep-ep",
        build=DeepEpLayer,
        unavailable=_needs("deep_ep", clamp=True, world=lambda ranks: ranks > 1),
        directions=frozenset({"forward"}),
        saves=False,
    ),
)
