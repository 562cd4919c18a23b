"""Runs Megatron's own parser and checks on command lines of model configs, in a process of its own.

``python -m tests.megatron_parser CONFIG LAYOUT VERSION [CONFIG LAYOUT VERSION ...]`` prints one JSON list: for each,
``{"error": str | None, "config": {field: value}, "megatron": version}`` of the TransformerConfig that Megatron builds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

from tests.megatron_versions import ROOT, environment, megatron_versions


def parse_with_megatron(
    cases: list[tuple[str, str]], megatron: str | None = None, timeout_s: float = 240
) -> list[dict[str, Any]]:
    """Outcome of each (config, layout) with one of ``megatron_versions()``; the default is the installed one."""
    megatron = megatron or megatron_versions()[-1]
    arguments = [item for config, layout in cases for item in (config, layout, megatron)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron_parser", *arguments],
        capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env=environment(megatron), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


def _outcome(config_name: str, layout_name: str, version: str) -> dict[str, Any]:
    import torch
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.training import arguments

    from mok_megatron.megatron_args import command_line, parse_version
    from mok_megatron.model_config import load_model_config

    config = load_model_config(config_name)
    command = command_line(config, layout_name, version=parse_version(version))
    os.environ.update(WORLD_SIZE=str(config.layout(layout_name).gpus), RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    # Megatron's checks ask which GPU is there: Blackwell for a rack, else Hopper.
    major = 10 if layout_name.startswith("nvl72") else 9
    torch.cuda.get_device_capability = lambda *_: (major, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=major, minor=0)  # type: ignore[assignment]
    # And whether Transformer Engine's fused rotary embedding is there, which these machines have.
    rope_utils.fused_apply_rotary_pos_emb = rope_utils.fused_apply_rotary_pos_emb or object()
    sys.argv = ["pretrain_gpt.py", *command.argv()]
    args = arguments.validate_args(arguments.parse_args(), {})
    model = arguments.core_transformer_config_from_args(args)
    simple = (bool, int, float, str, list, type(None))
    found = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return {name: value for name, value in found.items() if isinstance(value, simple)}


def main() -> None:
    outcomes: list[dict[str, Any]] = []
    for case in itertools.batched(sys.argv[1:], 3):
        noise = io.StringIO()
        try:
            with warnings.catch_warnings(), contextlib.redirect_stdout(noise):
                warnings.simplefilter("ignore")
                outcomes.append({"error": None, "config": _outcome(*case)})
        except (Exception, SystemExit) as error:
            outcomes.append({"error": f"{type(error).__name__}: {error}", "config": {}})
    from megatron.core import __version__

    print(json.dumps([{**outcome, "megatron": __version__} for outcome in outcomes]))


if __name__ == "__main__":
    main()
