"""Other projects' layers, measured beside ours in the same process where they can be imported.

Nothing here is needed to run the benchmark; docs/benchmarks/README.md says what each needs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

from ..implementations import Implementation
from ..inputs import Case
from .deepep import DeepEpLayer
from .liger_cute import LigerCuteLayer
from .megatron_te import MegatronLayer
from .sonic import SonicLayer


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


_no_megatron = _needs("transformer_engine.pytorch", "megatron.core.models.gpt.moe_module_specs")

IMPLEMENTATIONS = (
    Implementation(name="megatron-te", build=MegatronLayer, unavailable=_no_megatron),
    Implementation(
        name="megatron-te-main-grad",
        build=partial(MegatronLayer, main_grad=True),
        unavailable=_no_megatron,
        directions=frozenset({"backward"}),
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
