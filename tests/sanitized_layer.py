"""A small layer in all its ways, for compute-sanitizer: ``python -m tests.sanitized_layer WORLD``.

scripts/sanitize.sh runs it. 200 tokens, H=320, I=192, 4 experts, K=2; weight gradients in fp32 and bf16, added and new;
a ring that holds all rows, and one of a single block.
"""

from __future__ import annotations

import sys

import torch

from tests.layer_run import assert_same_bits
from tests.routing_cases import RoutingCase
from tests.virtual_ranks import inputs_of, ranks_of, run_layer

TOKENS, CAPACITIES = 200, (1024, 128)


def main() -> None:
    world = int(sys.argv[1])
    case = RoutingCase(name="sanitized", tokens=(TOKENS // world,) * world, num_experts=4)
    inputs = inputs_of(case)
    for dtype in (torch.float32, torch.bfloat16):
        for accumulate in (False, True):
            results = []
            for capacity in CAPACITIES:
                ranks = ranks_of(case, inputs, ring_rows=capacity)
                results.append(run_layer(ranks, inputs, dtype=dtype, accumulate=accumulate))
                ranks.close()
            assert_same_bits(results[0], results[1], (dtype, accumulate))
    print(f"W={world}: the same bits in rings of {CAPACITIES} rows")


if __name__ == "__main__":
    main()
