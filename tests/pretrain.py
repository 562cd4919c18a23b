"""Whole ``pretrain()`` runs for tests: one small model, the parallel layouts it is tried in, and how runs compare."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from scripts.curves import relative_difference
from scripts.prepare_corpus import training_args
from tests.megatron_cpu.client import PretrainServer
from tests.megatron_cpu.job import Job, RankReport

ITERATIONS = 5

_MODEL = """
--num-layers 3 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 32
--max-position-embeddings 32 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
--untie-embeddings-and-output-weights --transformer-impl local --no-persist-layer-norm --no-masked-softmax-fusion
--no-rope-fusion --attention-dropout 0 --hidden-dropout 0 --make-vocab-size-divisible-by 8
--num-experts 8 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-layer-freq [0,1,1] --moe-router-dtype fp32
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 4
--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss
--moe-aux-loss-coeff 1e-2 --moe-shared-expert-intermediate-size 32
"""

_TRAINING = """
--distributed-backend gloo --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --lr-decay-style constant
--clip-grad 1.0 --weight-decay 0.1 --log-interval 1 --eval-iters 0 --eval-interval 1000 --split 100,0,0 --num-workers 0
--seed 1234
"""

_EP2 = "--expert-model-parallel-size 2"
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

CASES: dict[str, tuple[int, str]] = {
    "ep1": (1, "--no-gradient-accumulation-fusion"),
    "ep2": (2, f"{_EP2} --no-gradient-accumulation-fusion"),
    "ep2-fused-wgrad": (2, _EP2),
    "ep2-recompute-moe": (2, f"{_EP2} --recompute-granularity selective --recompute-modules moe"),
    "ep2-recompute-full": (
        2,
        f"{_EP2} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "ep2-mtp": (2, f"{_EP2} --mtp-num-layers 1"),
    "ep2-bias-update": (2, f"{_EP2} --moe-router-bias-update-rate 0.05"),
    "ep2-mlp-chunks": (2, f"{_EP2} --mlp-chunks-for-training 2"),
    "ep1-mtp-repeated": (1, "--mtp-num-layers 2 --mtp-use-repeated-layer"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --moe-layer-freq [1,1,1,1] --num-layers 4"),
    "pp2-vpp2": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --moe-layer-freq [1,1,1,1] "
        "--num-layers 4",
    ),
    "ep2-pp2": (4, f"{_EP2} --pipeline-model-parallel-size 2 --moe-layer-freq [1,1,1,1] --num-layers 4"),
    "ep2-edp2-overlap": (4, f"{_EP2} {_OVERLAP}"),
    "ep2-edp2-overlap-plain-wgrad": (4, f"{_EP2} {_OVERLAP} --no-gradient-accumulation-fusion"),
    "ep4": (4, "--expert-model-parallel-size 4 --no-gradient-accumulation-fusion"),
}
"""Name -> (processes, arguments). EP: expert parallel; EDP: expert data parallel; PP: pipeline parallel."""


DISPATCHERS = {"mok": {"RoutingCarrier"}, "alltoall": {"MoEAlltoAllTokenDispatcher"}}
"""What the layers of a run say about themselves."""


def make_job(
    corpus: Path,
    case: str,
    dispatcher: str,
    extra: str = "",
    *,
    patch: str | None = None,
    start_order: tuple[int, ...] | None = None,
) -> Job:
    """The run of one case on ``corpus``; ``extra`` arguments come last and win."""
    world_size, args = CASES[case]
    given = f"{_MODEL} {_TRAINING} --train-iters {ITERATIONS} --moe-token-dispatcher-type {dispatcher} {args}"
    return Job(
        world_size=world_size,
        args=(*shlex.split(given), *training_args(corpus), *shlex.split(extra)),
        patch=patch,
        start_order=start_order,
    )


class Pretrain:
    """Runs the cases; what was run before is answered from memory, so that cases share their ``alltoall`` runs."""

    def __init__(self, server: PretrainServer, corpus: Path) -> None:
        self.server = server
        self._corpus = corpus

    def job(self, case: str, dispatcher: str, extra: str = "", **changes: Any) -> Job:
        """See ``make_job``."""
        return make_job(self._corpus, case, dispatcher, extra, **changes)

    def run(self, case: str, dispatcher: str, extra: str = "") -> list[RankReport]:
        """The reports of one case by rank; checks that the dispatcher asked for is the one that ran."""
        reports = self.server.run(self.job(case, dispatcher, extra), timeout_s=120)
        dispatchers = {name for report in reports for name in report.dispatchers}
        assert dispatchers == DISPATCHERS[dispatcher]
        return reports


def worst_difference(got: list[RankReport], expected: list[RankReport]) -> float:
    """Largest relative difference of a loss or gradient norm, over ranks and iterations; infinite for NaN."""
    worst = 0.0
    for rank, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        for i, (mine, other) in enumerate(zip(_numbers(ours), _numbers(theirs), strict=True)):
            assert mine.keys() == other.keys(), f"rank {rank}, iteration {i}: {mine.keys()} and {other.keys()}"
            worst = max([worst, *(relative_difference(mine[key], value) for key, value in other.items())])
    return worst


def assert_same(got: list[RankReport], expected: list[RankReport], tolerance: float) -> None:
    """Every loss and gradient norm agrees to the relative ``tolerance``, and there are some."""
    assert any(report.losses[-1] for report in expected), "no rank logged a loss"
    if (worst := worst_difference(got, expected)) > tolerance:
        lines = [
            f"  rank {rank}: {_numbers(a)}\n      not {_numbers(b)}"
            for rank, (a, b) in enumerate(zip(got, expected, strict=True))
        ]
        pytest.fail(f"relative difference {worst:.2e} > {tolerance:.2e}\n" + "\n".join(lines))


def _numbers(report: RankReport) -> list[dict[str, float]]:
    return [{**loss, "grad norm": norm} for loss, norm in zip(report.losses, report.grad_norms, strict=True)]
