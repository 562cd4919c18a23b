"""``python -m tests.wheel_check``: the plugin in the megatron-core that PYTHONPATH holds; prints one line of JSON."""

from __future__ import annotations

import json
import sys
import typing
from typing import Any

from tests import moe_layers


def layer() -> dict[str, Any]:
    """``mok`` and ``alltoall`` twins of four kinds: their largest difference."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    moe_layers.start_megatron()
    cases = ("sigmoid, groups, expert bias", "shared expert with gate", "aux and z loss", "capacity drop")
    errors = {}
    for case in cases:
        twins = moe_layers.build_twins(**moe_layers.LAYER_CASES[case])
        found = {name: moe_layers.run(twin, moe_layers.tokens(0)) for name, twin in twins.items()}
        errors[case] = moe_layers.worst(moe_layers.relative_errors(found["mok"], found["alltoall"]))[0]
    return {
        "errors": errors,
        "classes": {name: type(twin).__name__ for name, twin in twins.items()},
        "config": twins["mok"].config.moe_token_dispatcher_type,
        "experts' config": twins["mok"].experts.config.moe_token_dispatcher_type,
    }


def arguments() -> dict[str, Any]:
    """What Megatron's parser makes of the flags."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from megatron.training.arguments import parse_args

    from mok_megatron import options
    from mok_megatron.honoured import HONOURED
    from mok_megatron.refusals import REFUSALS

    sys.argv = ["pretrain_gpt.py", "--moe-token-dispatcher-type", "mok", "--mok-backend", "reference"]
    sys.argv += ["--mok-comm-sms", "4"]
    parsed = parse_args()
    fields = {
        c.__name__: c.__dataclass_fields__["moe_token_dispatcher_type"].type
        for c in (TransformerConfig, MLATransformerConfig)
    }
    options_of_moe = {name for name in TransformerConfig.__dataclass_fields__ if name.startswith("moe_")}
    return {
        "undecided": sorted(options_of_moe - {refusal.field for refusal in REFUSALS} - set(HONOURED)),
        "dispatcher": parsed.moe_token_dispatcher_type,
        "options": [options.current().backend, options.current().comm_sms],
        "choices": {name: list(typing.get_args(kind)) for name, kind in fields.items()},
    }


def main() -> None:
    result = {**layer(), **arguments()}  # first, because the CPU shim must precede Megatron
    import megatron.core

    print("RESULT " + json.dumps({"version": megatron.core.package_info.__version__.split("+")[0], **result}))


if __name__ == "__main__":
    main()
