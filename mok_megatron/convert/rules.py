"""What the conversion knows about Megatron's dispatchers: which flags and variables belong to which, and their fate.

A flag that only decides when the other dispatcher does its work is dropped. One that decides what is computed or
kept stays, and is refused where ``mok`` does not honour it: that choice is the user's. The reasons are those of
``mok_megatron.refusals``. The environment variables are those that HybridEP reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from mok_megatron.honoured import HONOURED
from mok_megatron.refusals import REFUSALS

TYPE_FLAG = "--moe-token-dispatcher-type"
EXPERTS_FLAG = "--num-experts"
NEW_TYPE = "mok"

OLD_TYPES = ("allgather", "alltoall", "flex")
"""Dispatchers that are replaced: all of them compute the same layer, so switching is legal at any checkpoint."""

DROPPED_FLAGS: Mapping[str, int] = {
    "--moe-flex-dispatcher-backend": 1,
    "--moe-enable-deepep": 0,
    "--moe-flex-dispatcher-num-sms": 1,
    "--moe-deepep-num-sms": 1,
    "--moe-hybridep-num-sms": 1,
    "--moe-hybridep-num-sms-preprocessing": 1,
    "--moe-hybridep-num-blocks-permute": 1,
    "--moe-hybridep-num-blocks-unpermute": 1,
    "--moe-permute-fusion-into-hybridep": 0,
    "--moe-hybridep-pad-uneven-dispatch-inputs": 0,
    "--moe-ncclep-static-shape": 0,
    "--moe-ncclep-zero-copy": 0,
    "--moe-shared-expert-overlap": 0,
    "--overlap-moe-expert-parallel-comm": 0,
    "--ep-overlap-early-attn-memory-release": 0,
    "--high-priority-a2a-comm-stream": 0,
    "--overlap-dispatch-backward-with-experts-wgrad": 0,
    "--delay-wgrad-compute": 0,
}
"""Flag -> number of its values."""

KEPT_FLAGS: Mapping[str, str] = {
    "--moe-grouped-gemm": "decides how the experts' parameters are stored, so that checkpoints stay interchangeable",
    "--moe-permute-fusion": HONOURED["moe_permute_fusion"],
}

_TOPOLOGY = "tells HybridEP the NVLink topology; mok finds it itself (mok-megatron doctor shows it)"
_CHUNK = "tunes HybridEP's kernels"

DROPPED_ENVIRONMENT: Mapping[str, str] = {
    "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": _TOPOLOGY,
    "NVLINK_DOMAIN_SIZE": _TOPOLOGY,
    "USE_MNNVL": _TOPOLOGY,
    "NUM_OF_TOKENS_PER_CHUNK_DISPATCH_API": _CHUNK,
    "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API": _CHUNK,
}

_MARGIN = "leaves SMs free in layer norm for overlapped communication; measure whether it still pays with mok"

KEPT_ENVIRONMENT: Mapping[str, str] = {
    "NVTE_FWD_LAYERNORM_SM_MARGIN": _MARGIN,
    "NVTE_BWD_LAYERNORM_SM_MARGIN": _MARGIN,
}


def flag_name(key: str) -> str:
    """``moe_enable_deepep``, ``moe-enable-deepep`` or ``--moe-enable-deepep`` -> ``--moe-enable-deepep``."""
    return "--" + key.removeprefix("--").replace("_", "-")


def why_dropped(flag: str) -> str:
    """Why ``mok`` does not take the flag, and what to use instead."""
    refusal = next(refusal for refusal in REFUSALS if refusal.option == flag)
    return f"{refusal.reason}. {refusal.remedy}"
