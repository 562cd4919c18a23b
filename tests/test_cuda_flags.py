"""The options of ``flag_cases`` on one GPU with Transformer Engine: ``mok`` (CUDA backend) against ``alltoall``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import batched
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
from torch import Tensor

from tests import flag_layers, gpu_layers, moe_layers
from tests.flag_cases import CASES, FlagCase
from tests.gpu_layers import TE, build, common_names, exact_twin, tokens
from tests.gpu_pretrain import job_outcomes
from tests.megatron_cpu.job import Job, RankReport
from tests.pretrain import DISPATCHERS, make_job

pytest.importorskip("megatron.training", reason="megatron-core is not installed")
pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")

pytestmark = pytest.mark.gpu

TE_CASES = {case.title: case for case in CASES if case.te}
TE_ONLY = ("moe_permute_fusion", "moe_router_fusion", "use_te_activation_func", "use_transformer_engine_op_fuser")
"""What an fp32 layer without Transformer Engine does not need to give the exact result."""
DIRECT_TOLERANCE = 0.05
"""Between ``mok`` and ``alltoall`` in bf16, where there is no exact result to compare both with."""
TRANSPOSED = {"Sinkhorn"}
"""Where ``alltoall`` hands its router a transposed gradient."""


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron's groups on this process alone."""
    with gpu_layers.megatron(tmp_path_factory.mktemp("rendezvous")):
        yield


def _run(layer: Any, case: FlagCase, x: Tensor) -> dict[str, Tensor]:
    flag_layers.seed_everything()
    return common_names(case.drive(layer, x), layer)


def _without(changes: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if name not in names}


def _read_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's router multiplies with Transformer Engine's GEMM, which takes every operand for contiguous.

    A transposed gradient gives it wrong results. ``mok`` hands over none, so this is for ``alltoall`` alone.
    """
    from megatron.core.transformer.moe import moe_utils

    gemm = moe_utils.te_general_gemm

    def contiguous_gemm(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Any:
        return gemm(a.contiguous(), b.contiguous(), *args, **kwargs)

    monkeypatch.setattr(moe_utils, "te_general_gemm", contiguous_gemm)


@pytest.mark.parametrize("title", TE_CASES)
def test_layers_with_transformer_engine(title: str, megatron: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case, x = TE_CASES[title], tokens()
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    changes = {**TE, **case.changes}
    flag_layers.seed_everything()
    ours = build("mok", **changes)
    flag_layers.seed_everything()
    theirs = build("alltoall", **_without(changes, case.alltoall))
    found = _run(ours, case, x)
    if title in TRANSPOSED:
        _read_strides(monkeypatch)
    expected = _run(theirs, case, x)
    if not case.exact:
        worst, quantity = moe_layers.worst(moe_layers.relative_errors(found, expected))
        assert worst < DIRECT_TOLERANCE, f"{quantity} differs by {worst}"
        return
    twin = exact_twin(ours, **_without(changes, TE_ONLY))
    exact = _run(twin, case, x.float())
    errors = {
        "mok": moe_layers.relative_errors(found, exact),
        "alltoall": moe_layers.relative_errors(expected, exact),
    }
    for quantity, error in errors["alltoall"].items():
        assert error < 0.15, f"alltoall's own error of {quantity} is {error}"
        assert errors["mok"][quantity] <= 2 * error + 1e-6, (
            f"{quantity} is off by {errors['mok'][quantity]}, alltoall by {error}"
        )


ITERATIONS = 6
NOISE = {"alltoall noise 1": "tests.pretrain_noise:first", "alltoall noise 2": "tests.pretrain_noise:second"}
"""Trainings of ``alltoall`` whose MoE layers are off by one bf16 unit: as far apart may be what is right."""
FACTOR = 3.0
"""``mok`` may be so many times as far from ``alltoall`` as the noise has brought it up to the same iteration."""
FLOORS = {"norm": 2e-3}
LOSS_FLOOR, CAP = 1e-4, 5.0
"""Relative differences that are allowed anyhow, and how many times these at most: a control gone wild excuses nothing.
A router or an expert that gets no gradient shows as 5e-3 of the norm (tests/test_cuda_pretrain.py)."""
AT_ONCE, WAVE_S = 36, 75
"""Trainings that share the GPU and the CPU's cores, and seconds that they may take."""
EFFECTS = {"Recomputation": "module calls", "CUDA graphs": "graph replays", "Offload": "offloaded"}
"""What a group's options add; else the option was accepted and ignored, and equal bits say nothing."""
NOTHING_TO_DO = {
    "Recomputation: the experts' activation",
    "CUDA graphs: local: router and preprocessing",
    "CUDA graphs: local: router and preprocessing, the MoE layer recomputed",
}
"""Why: the notes of tests/flag_cases.py."""
AGAIN = ("mok", "--log-throughput")
"""Changes nothing."""


def _arguments(case: FlagCase) -> str:
    return f"{case.model} {case.gpu_training}".strip()


TRAININGS = {f"{case.group}: {case.title}": case for case in CASES if case.gpu_training is not None}
MODELS = list(dict.fromkeys(["", *(case.model for case in TRAININGS.values())]))
_ENVIRONMENTS = {_arguments(case): case.environment for case in TRAININGS.values()}

_BF16_TE = f"""
--bf16 --transformer-impl transformer_engine --moe-grouped-gemm --distributed-backend nccl --hidden-size 128
--train-iters {ITERATIONS} --moe-ffn-hidden-size 192 --moe-shared-expert-intermediate-size 64 --seq-length 64
--max-position-embeddings 64 --init-method-std 0.01 --lr 2e-4 --lr-warmup-iters 10 --lr-decay-iters 20
--global-batch-size 4
"""


def _job(corpus: Path, folder: Path, number: int, run: str, arguments: str) -> Job:
    """Every run has its own index of the corpus: they start at once."""
    own = f"--data-cache-path {folder / f'index{number}'}"
    patch = NOISE.get(run, "tests.gpu_pretrain:keep_affinity")
    return make_job(corpus, "ep1", run.split(maxsplit=1)[0], f"{_BF16_TE} {arguments} {own}", patch=patch)


class Trainings:
    """Reports by ``(run, arguments)``, where a run is a dispatcher, or ``alltoall`` with some noise.

    A run that failed raises its error when it is asked for.
    """

    def __init__(self, corpus: Path, folder: Path) -> None:
        names = [(run, model) for model in MODELS for run in ("alltoall", "mok", *NOISE)]
        names += [AGAIN, *(("mok", _arguments(case)) for case in TRAININGS.values() if case.gpu_training)]
        self._outcomes: dict[tuple[str, str], RankReport | RuntimeError] = {}
        for wave, some in enumerate(batched(names, AT_ONCE)):
            here = folder / f"wave{wave}"
            here.mkdir()
            jobs = {str(i): _job(corpus, here, i, *name) for i, name in enumerate(some)}
            environments = {str(i): _ENVIRONMENTS.get(arguments, {}) for i, (_, arguments) in enumerate(some)}
            outcomes = job_outcomes(jobs, here, WAVE_S, environments)
            self._outcomes |= {name: outcomes[str(i)] for i, name in enumerate(some)}

    def __getitem__(self, name: tuple[str, str]) -> RankReport:
        outcome = self._outcomes[name]
        if isinstance(outcome, RuntimeError):
            raise outcome
        assert set(outcome.dispatchers) == DISPATCHERS[name[0].split(maxsplit=1)[0]]
        assert set(outcome.backends) == ({"cuda"} if name[0] == "mok" else set())
        assert len(outcome.losses) == len(outcome.grad_norms) == ITERATIONS
        return outcome


@pytest.fixture(scope="module")
def trainings(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """All trainings, several at once."""
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    return Trainings(corpus, tmp_path_factory.mktemp("trainings"))


def _differences(got: RankReport, expected: RankReport) -> list[dict[str, float]]:
    """By iteration: of every loss and of the gradients' norm, relative."""
    found = []
    for ours, theirs in zip(_values(got), _values(expected), strict=True):
        assert ours.keys() == theirs.keys()
        found.append({name: abs(ours[name] - value) / abs(value) for name, value in theirs.items()})
    return found


def _values(report: RankReport) -> list[dict[str, float]]:
    return [{**losses, "norm": norm} for losses, norm in zip(report.losses, report.grad_norms, strict=True)]


def _shown(differences: list[dict[str, float]], name: str) -> str:
    return " ".join(f"{each[name]:.1e}" for each in differences)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_are_those_of_alltoall(name: str, trainings: Trainings) -> None:
    case = TRAININGS[name]
    theirs = trainings["alltoall", case.model]
    ours = _differences(trainings["mok", _arguments(case)], theirs)
    controls = [_differences(trainings[noise, case.model], theirs) for noise in NOISE]
    assert all(any(each.values()) for control in controls for each in control), "no noise in a control"
    for value in ours[0]:
        floor, reached = FLOORS.get(value, LOSS_FLOOR), 0.0
        for iteration, difference in enumerate(ours):
            reached = max(reached, *(control[iteration][value] for control in controls))
            assert difference[value] <= min(CAP * floor, max(floor, FACTOR * reached)), (
                f"{value}, iteration {iteration + 1}: mok {_shown(ours, value)}, "
                f"noise {', '.join(_shown(control, value) for control in controls)}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in TRAININGS.items() if case.gpu_training])
def test_what_saves_memory_or_launches_changes_no_bit(name: str, trainings: Trainings) -> None:
    case = TRAININGS[name]
    ours, plain = trainings["mok", _arguments(case)], trainings["mok", case.model]
    assert ours.losses == plain.losses
    assert ours.weights == plain.weights
    effect = EFFECTS[case.group]
    assert (ours.counts[effect] > plain.counts[effect]) == (name not in NOTHING_TO_DO), (ours.counts, plain.counts)


@pytest.mark.slow
def test_two_trainings_are_the_same_to_the_last_bit(trainings: Trainings) -> None:
    assert trainings[AGAIN] == trainings["mok", ""]
