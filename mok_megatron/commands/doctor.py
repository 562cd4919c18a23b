"""``mok-megatron doctor``: what works on this machine, what is missing, and the remedy."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb ``doctor``."""
    parser = subparsers.add_parser(
        "doctor",
        help="report what works on this machine and what is missing",
        description="Report versions, GPUs, peer access, compiler and plugin state, with a remedy for what is missing. "
        "The exit code is 0 where Megatron can train with mok on some backend, else 1. No GPU memory is taken.",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for bug reports")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    from mok_megatron.doctor.checks import run_checks
    from mok_megatron.doctor.probes import collect_facts
    from mok_megatron.doctor.report import as_json, as_text, training_possible

    facts = collect_facts()
    findings = run_checks(facts)
    print(json.dumps(as_json(facts, findings), indent=2) if args.json else as_text(facts, findings))
    return 0 if training_possible(findings) else 1
