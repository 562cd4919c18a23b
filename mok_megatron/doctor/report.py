"""The doctor's report, as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mok_megatron.doctor.checks import Finding, cuda_backend_obstacle
from mok_megatron.doctor.facts import Facts

SCHEMA = 1
"""Rises when a key of the JSON report changes its meaning or goes; new keys do not raise it."""

_MARKS = {"ok": "ok      ", "warning": "warning ", "problem": "PROBLEM "}


def training_possible(findings: Sequence[Finding]) -> bool:
    """Whether Megatron can train with ``mok`` on some backend."""
    return not any(finding.status == "problem" for finding in findings)


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """A line per finding, the remedy below it, and the verdict."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{_MARKS[finding.status]}{finding.check:<{width}}  {finding.message}")
        if finding.remedy is not None:
            lines.append(f"{'':8}{'':<{width}}  -> {finding.remedy}")
    if len(facts.driver.peer_access) > 1:
        lines += ["", "peer access", *_matrix(facts)]
    return "\n".join([*lines, "", _verdict(facts, findings)])


def as_json(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """The report as plain data: the facts, the findings, and what can run."""
    obstacle = cuda_backend_obstacle(facts)
    possible = training_possible(findings)
    return {
        "schema": SCHEMA,
        "training_possible": possible,
        "backends": {
            "cuda": {"usable": possible and obstacle is None, "obstacle": obstacle},
            "reference": {"usable": possible, "obstacle": None if possible else "see the findings"},
        },
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": dataclasses.asdict(facts),
    }


def _verdict(facts: Facts, findings: Sequence[Finding]) -> str:
    if not training_possible(findings):
        return "Training with mok is not possible until the problems above are solved."
    if cuda_backend_obstacle(facts) is not None:
        return "Training with mok is possible, with the reference backend: right results, not fast."
    return "Training with mok is possible, with the CUDA backend."


def _matrix(facts: Facts) -> list[str]:
    gpus = range(len(facts.driver.peer_access))
    header = "        " + "".join(f"{f'GPU {b}':>8}" for b in gpus)
    return [header, *(f"GPU {a:<4}" + "".join(f"{facts.driver.peer_access[a][b]:>8}" for b in gpus) for a in gpus)]
