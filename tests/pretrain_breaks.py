"""Faults put into the plugin on purpose (``Job.patch``): the controls that show what the whole-run tests catch."""

from __future__ import annotations

from typing import Any


def leave_pre_hooks_unfired() -> None:
    """The experts' forward pre-hooks, on which the wait for the parameter all-gather hangs, are not called."""
    from mok_megatron import experts

    experts.fire_pre_hooks = lambda experts: None


def leave_grad_flag_unset() -> None:
    """``grad_added_to_main_grad`` stays False, so that DDP adds the placeholder gradient to ``main_grad``, too.

    The placeholder is new memory; here it holds small numbers, as it may by chance.
    """
    import torch

    from mok_megatron import autograd

    returned: Any = autograd._Sinks.returned

    def without_flag(self: Any) -> Any:
        gradients = returned(self)
        for parameter in self._parameters:
            parameter.grad_added_to_main_grad = False
        return [torch.full_like(gradient, 1e-2) for gradient in gradients]

    autograd._Sinks.returned = without_flag  # type: ignore[method-assign]
