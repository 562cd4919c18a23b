"""The troubleshooting page against the real messages: every heading has one, every message has its heading."""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mok_megatron.backends import abi, build, failures
from mok_megatron.backends.abi import FailRecord
from mok_megatron.backends.cuda import CudaBackend
from mok_megatron.cli import main
from mok_megatron.config import MoeShape, MokConfig
from mok_megatron.convert import convert_text
from mok_megatron.preflight import GpuFabric, RankPlace, check_groups
from mok_megatron.refusals import REFUSALS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
HEADINGS = re.findall(r"^## `(.*)`$", PAGE, re.MULTILINE)


def pattern(text: str) -> str:
    return re.escape(text).replace(r"\.\.\.", ".*")


def error(call: Callable[[], object]) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call()
    return str(caught.value)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a verb that fails."""
    assert main(list(arguments)) == 2
    return capsys.readouterr().err.split(": ", 1)[1]


def places(host: str, first: int, **changes: object) -> list[RankPlace]:
    gpus = [f"0000:0{index}:00.0" for index in range(2)]
    options: dict[str, object] = {"state": "completed", "links": dict.fromkeys(gpus, "nvlink"), **changes}
    return [
        RankPlace(rank=first + index, host=host, gpu=GpuFabric(bus_id=name, **options))  # type: ignore[arg-type]
        for index, name in enumerate(gpus)
    ]


RACK = {"cluster": "ab" * 16, "clique": 1}
UNKNOWN = [RankPlace(rank=rank, host="a", gpu=None, error="libnvidia-ml.so.1 not found") for rank in range(2)]
BROKEN_GROUPS: dict[str, list[RankPlace]] = {
    "... in the NVLink of ... only": [*places("a", 0), *places("b", 2)],
    "... in NVLink cluster ... clique ...": [*places("a", 0, **RACK), *places("b", 2, **{**RACK, "clique": 2})],
    "... do not reach each other over NVLink": places("a", 0, links={}),
    "the NVLink fabric is ... on ...": places("a", 0, state="in progress"),
    "... no IMEX channel to share memory through on ...": [*places("a", 0, **RACK), *places("b", 2, **RACK)],
    "nothing is known about ...": UNKNOWN,
}


@pytest.mark.parametrize("row", BROKEN_GROUPS)
def test_reasons_of_the_preflight(row: str) -> None:
    assert f"| `{row}` |" in PAGE
    group = BROKEN_GROUPS[row]
    message = error(lambda: check_groups(group, [range(len(group))]))
    heading = next(text for text in HEADINGS if text.startswith("the expert-parallel group"))
    assert re.fullmatch(pattern(heading), message)
    assert re.search(pattern(row), message.split(": ", 1)[1])


def test_the_table_of_the_preflight_has_no_other_rows() -> None:
    assert set(re.findall(r"^\| `([^`]*)` \|", PAGE, re.MULTILINE)) == set(BROKEN_GROUPS)


def dispatcher_choice_without_the_plugin() -> str:
    script = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import argparse\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "add_megatron_arguments(argparse.ArgumentParser()).parse_args(['--moe-token-dispatcher-type', 'mok'])\n"
    )
    environment = {**os.environ, "MOK_MEGATRON_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    return done.stderr.strip().splitlines()[-1].split("error: ", 1)[1]


def unknown_option() -> None:
    """A config with a MoE option of a future Megatron."""
    from dataclasses import make_dataclass

    from megatron.core.transformer.transformer_config import TransformerConfig

    from mok_megatron.refusals import check_config

    future = make_dataclass("Future", [("moe_from_the_future", bool, False)], bases=(TransformerConfig,))
    config = future(num_layers=1, hidden_size=64, num_attention_heads=4)
    config.num_moe_experts, config.moe_from_the_future = 8, True
    config.gated_linear_unit, config.add_bias_linear = True, False
    import torch

    config.activation_func, config.params_dtype = torch.nn.functional.silu, torch.bfloat16
    check_config(config, resolved=False)


def misfit() -> None:
    from mok_megatron import compat

    compat.record_misfit("megatron.core.made_up", "MoELayer has no routed_experts_compute")
    try:
        compat.require_fit()
    finally:
        compat.clear_misfit("megatron.core.made_up")


def build_failures(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Without nvcc, with one that fails, and with one that does not end."""
    monkeypatch.setenv("MOK_MEGATRON_CACHE", str(folder))
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    messages = [error(lambda: build.build("sm90a"))]
    nvcc = folder / "nvcc"
    monkeypatch.setattr(build, "find_nvcc", lambda: str(nvcc))
    monkeypatch.setattr(build, "_TIME_LIMIT_S", 2)
    for script, ending in (
        ("echo no such thing >&2; exit 3", "nvcc failed with exit code 3. "),
        ("exec sleep 60", "nvcc took more than 2 s"),
    ):
        nvcc.write_text(f"#!/bin/sh\n{script}\n")
        nvcc.chmod(0o755)
        messages.append(error(lambda: build.build("sm90a")))
        assert ending in messages[-1]
    return messages


def kernel_failures() -> list[str]:
    """What the watcher prints for each code that a kernel gives up with; the page explains the same endings."""
    fields = {"phase": 1, "rank": 0, "layer": 5, "want": 256, "seen": 128, "where": 17}
    records = [FailRecord(code=code, peer=peer, **fields) for code, peer in ((1, 1), (1, -1), (2, 1), (3, -1))]
    messages = [f"mok_megatron: {failures.describe(record)}" for record in records]
    for message, ending in zip(messages[:2], ("for rank 1", "for its own kernels"), strict=True):
        assert ending in message and f"`{ending.replace('1', 'N')}`" in PAGE
    assert f"exit code {failures.EXIT_CODE}" in PAGE
    return messages


def more_tokens_than_announced() -> None:
    """The check of the CUDA backend, which needs no GPU."""
    backend = CudaBackend.__new__(CudaBackend)
    space = SimpleNamespace(sizes=SimpleNamespace(max_tokens=1024))
    backend._launches = SimpleNamespace(workspace=lambda _layer: space)  # type: ignore[assignment]
    backend._rows_by_tokens = {}
    backend._rows(2048, layer=3)


def library_of_other_sources() -> None:
    """A library whose first struct is larger than ours."""

    def mok_abi(index: int, name: ctypes.c_char_p) -> int:
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"FailRecord"
        return 4096

    abi._check_abi(SimpleNamespace(mok_abi=mok_abi), Path("libmok.so"))  # type: ignore[arg-type]


def test_every_heading_has_its_message(
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    import torch

    from mok_megatron.backends import select

    shape = MoeShape(hidden=64, intermediate=32, num_experts=4, top_k=2)
    select._reported.clear()
    select.create_backend(shape, MokConfig(), None, "cpu", torch.float32)
    messages = [
        dispatcher_choice_without_the_plugin(),
        error(misfit),
        REFUSALS[0].message(3),
        error(unknown_option),
        error(lambda: MoeShape(hidden=64, intermediate=32, num_experts=60, top_k=2, ep_size=8)),
        next(str(warning.message) for warning in recwarn if "slow reference" in str(warning.message)),
        error(lambda: select.create_backend(shape, MokConfig(backend="cuda"), None, "cpu", torch.float32)),
        error(lambda: check_groups(UNKNOWN, [range(2)])),
        printed(capsys, "plan", "kimi-k2", "--gpu", "h100", "--nodes", "1"),
        printed(capsys, "args", "kimi-k3"),
        error(lambda: convert_text("x=$(gen --moe-enable-deepep)\nrun --num-experts 8\n", "shell")),
        error(lambda: convert_text("run --moe-token-dispatcher-type $D\n", "shell")),
        error(lambda: convert_text("echo hello\n", "shell")),
        *build_failures(monkeypatch, tmp_path),
        *kernel_failures(),
        error(more_tokens_than_announced),
        error(library_of_other_sources),
    ]
    for message in messages:
        fitting = [heading for heading in HEADINGS if re.fullmatch(pattern(heading), message.strip(), re.DOTALL)]
        assert len(fitting) == 1, f"{fitting} for {message!r}"
    for heading in HEADINGS:
        assert any(re.fullmatch(pattern(heading), message.strip(), re.DOTALL) for message in messages), heading


TASKS = ("start-one-gpu", "hopper-node", "nvl72-rack", "several-racks", "swap-hybridep", "troubleshooting")


@pytest.mark.parametrize("task", TASKS)
def test_task_pages_are_listed(task: str) -> None:
    assert f"({task}.md)" in (ROOT / "docs" / "README.md").read_text()


@pytest.mark.parametrize("task", TASKS)
def test_commands_of_the_task_pages_are_real(task: str) -> None:
    """Every ``mok-megatron`` command line on a page parses, and names a shipped config and one of its layouts."""
    import shlex

    from mok_megatron.cli import build_parser
    from mok_megatron.model_config import load_model_config

    text = (ROOT / "docs" / f"{task}.md").read_text()
    lines = [line for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    for line in [*lines, *re.findall(r"`(mok-megatron [^`]*)`", text)]:
        for command in re.findall(r"mok-megatron ([^#)`;]*)", line):
            words = shlex.split(command)
            if not words or (len(words) == 1 and words[0] != "doctor"):
                continue  # the verb alone, in a sentence
            parsed: argparse.Namespace = build_parser().parse_args(words)
            if getattr(parsed, "config", None) is not None:
                config = load_model_config(parsed.config)
                config.layout(getattr(parsed, "layout", None))
