"""This project's layer, as Megatron calls it: routing map in, ``apply_experts``, per-expert parameters."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mok_megatron.autograd import ExpertParams, apply_experts
from mok_megatron.backends.cuda import CudaBackend, cuda_unavailable_reason
from mok_megatron.backends.select import create_backend
from mok_megatron.backends.workspace import Workspace
from mok_megatron.config import BackendName, MokConfig

from .implementations import Gradients, Implementation
from .inputs import Case

TIME_LIMIT_S = 60.0
RING_PREFIX = "mok-ring-"


class MokLayer:
    """See ``Layer``. With ``main_grad`` the weights have fp32 ``main_grad`` buffers, and gradients are added there.

    ``ring_fraction`` gives the routed buffers so much of the rows that the case has, instead of all.
    """

    def __init__(
        self,
        case: Case,
        *,
        backend: BackendName = "cuda",
        main_grad: bool = False,
        ring_fraction: float | None = None,
    ) -> None:
        self._case, self._fuse = case, main_grad
        config = MokConfig(backend=backend, time_limit_s=TIME_LIMIT_S, ring_rows=case.ring_rows(ring_fraction))
        self._backend = create_backend(case.shape, config, case.ranks.group, case.ranks.device, torch.bfloat16)
        self._backend.reserve(case.tokens)
        probs, self._routing_map = case.dense_routing()
        self._inputs = [(copy.x.detach().requires_grad_(), probs.detach().requires_grad_()) for copy in case.copies]
        self._weights = [(self._parameters(copy.w1), self._parameters(copy.w2)) for copy in case.copies]

    def _parameters(self, stacked: Tensor) -> ExpertParams:
        parameters = tuple(matrix.detach().requires_grad_() for matrix in stacked.unbind(0))
        if self._fuse:
            for parameter in parameters:
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
        return ExpertParams(parameters, len(parameters))

    def forward(self, index: int) -> Tensor:
        """See ``Layer.forward``."""
        x, probs = self._inputs[index]
        w1, w2 = self._weights[index]
        return apply_experts(
            self._backend, x, probs, self._routing_map, w1, w2, layer=1, fuse_grad_accumulation=self._fuse
        )

    def clear_gradients(self, index: int) -> None:
        """See ``Layer``. ``main_grad`` goes on being added to, as it does over microbatches."""
        for leaf in (*self._inputs[index], *(p for params in self._weights[index] for p in params.parameters)):
            leaf.grad = None

    def gradients(self, index: int, expert: int) -> Gradients:
        """See ``Layer``."""
        dx, dprobs = (leaf.grad for leaf in self._inputs[index])
        w1, w2 = (params.parameters[expert] for params in self._weights[index])
        dw1, dw2 = (w1.main_grad, w2.main_grad) if self._fuse else (w1.grad, w2.grad)  # type: ignore[attr-defined]
        assert dx is not None and dprobs is not None and dw1 is not None and dw2 is not None
        return Gradients(dx=dx, dprobs=dprobs.gather(1, self._case.experts), dw1=dw1, dw2=dw2)

    def schedule(self, index: int) -> object:
        """The routing's tables, from the router's output."""
        x, probs = self._inputs[index]
        return self._backend.build_schedule(x.detach(), probs.detach(), self._routing_map, layer=1)

    def workspace_bytes(self) -> int:
        """See ``Layer``; the reference backend has none."""
        workspace = self._workspace()
        return 0 if workspace is None else int(workspace.layout.bytes + workspace.scratch_bytes.numel())

    def _workspace(self) -> Workspace | None:
        return self._backend.workspace if isinstance(self._backend, CudaBackend) else None

    def uncounted_bytes(self) -> int:
        """See ``Layer``: the symmetric memory of a real group, less the other sets' main_grad."""
        workspace = self._workspace()
        symmetric = 0 if workspace is None or self._case.shape.ep_size == 1 else workspace.layout.bytes
        first = self._case.copies[0]
        fp32_bytes = 4 * (first.w1.numel() + first.w2.numel()) if self._fuse else 0
        return int(symmetric) - (len(self._case.copies) - 1) * fp32_bytes

    def close(self) -> None:
        """See ``Layer``."""
        self._backend.close()


def _cuda_unavailable(case: Case) -> str | None:
    return cuda_unavailable_reason(case.ranks.device, case.shape, torch.bfloat16)


def _never_unavailable(case: Case) -> str | None:
    return None


def with_ring(fraction: float) -> Implementation:
    """mok with a ring that holds ``fraction`` of the case's rows, to be compared with mok's whole one."""
    return Implementation(
        name=f"{RING_PREFIX}{fraction:g}",
        build=partial(MokLayer, ring_fraction=fraction),
        unavailable=_cuda_unavailable,
    )


IMPLEMENTATIONS = (
    Implementation(name="mok", build=MokLayer, unavailable=_cuda_unavailable, has_schedule=True),
    Implementation(
        name="mok-nograd",
        build=MokLayer,
        unavailable=_cuda_unavailable,
        saves=False,
        directions=frozenset({"forward"}),
    ),
    Implementation(
        name="mok-main-grad",
        build=partial(MokLayer, main_grad=True),
        unavailable=_cuda_unavailable,
        directions=frozenset({"backward"}),
    ),
    Implementation(
        name="mok-reference",
        build=partial(MokLayer, backend="reference"),
        unavailable=_never_unavailable,
        by_default=False,
        has_schedule=True,
    ),
)
