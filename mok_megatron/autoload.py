"""Entry point of the group ``torch.backends``: torch calls ``activate`` at the end of ``import torch``.

It must cost next to nothing, import neither torch nor Megatron, and never raise, because it runs in every process that
imports torch. Switched off by ``MOK_MEGATRON_DISABLE=1`` or torch's own ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
"""

from __future__ import annotations

from mok_megatron import hooks


def activate() -> None:
    """Install the post-import hooks; a second call does nothing."""
    hooks.install()
