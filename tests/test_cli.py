"""The command line: verbs, one-line errors, speed, and the args verb against Megatron's own parser."""

from __future__ import annotations

import resource
import shlex
import subprocess
import sys

import pytest

from mok_megatron import cli
from mok_megatron.megatron_args import command_line, parse_version
from mok_megatron.model_config import load_model_config
from tests.megatron_parser import parse_with_megatron
from tests.megatron_versions import megatron_versions


def run_cli(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mok_megatron.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_lists_the_verbs() -> None:
    done = run_cli("--help")
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in ("args", "doctor"))


def test_help_imports_nothing_heavy() -> None:
    """What makes the command line slow: torch and megatron take seconds, so no verb may import them to register."""
    code = (
        "import sys; from mok_megatron.cli import build_parser; build_parser(); "
        "print([m for m in ('torch', 'megatron', 'numpy', 'yaml', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_help_is_fast() -> None:
    """CPU time, start of Python included: wall time says nothing on a machine that is busy with other tests."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_cli("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["args", "tiny-dipseek"], "did you mean 'tiny-deepseek'?"),
        (["args", "no/such/file.yaml"], "no/such/file.yaml: no such config file"),
        (["args", "tiny-deepseek", "--layout", "ep3"], "has no layout 'ep3' (did you mean 'ep2'?)"),
        (["args", "tiny-deepseek", "--megatron", "0.15"], "megatron-core 0.15 is too old"),
        (["args", "tiny-deepseek", "--megatron", "new"], "must look like 0.19 or 0.19.2, got 'new'"),
    ],
)
def test_user_error_is_one_line_and_code_2(argv: list[str], message: str) -> None:
    done = run_cli(*argv)
    assert done.returncode == cli.EXIT_USER_ERROR
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("mok-megatron args: ")
    assert message in done.stderr


def test_closed_pipe_is_no_error() -> None:
    command = f"{shlex.quote(sys.executable)} -m mok_megatron.cli args tiny-deepseek | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"-", b"")


def test_args_prints_what_a_shell_reads_back() -> None:
    config = load_model_config("tiny-deepseek")
    expected = command_line(config, version=(0, 19)).argv()
    lines = run_cli("args", "tiny-deepseek", "--megatron", "0.19")
    one_line = run_cli("args", "tiny-deepseek", "--megatron", "0.19", "--one-line")
    assert shlex.split(lines.stdout.replace("\\\n", " ")) == expected
    assert shlex.split(one_line.stdout) == expected
    assert len(one_line.stdout.splitlines()) == 1
    assert len(lines.stdout.splitlines()) > 30


def test_one_line_is_read_into_an_array_by_the_documented_idiom() -> None:
    script = f'eval "flags=($({shlex.quote(sys.executable)} -m mok_megatron.cli args tiny-deepseek --one-line))"'
    script += "; printf '%s\\n' \"${flags[@]}\""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "([0]*1+[1]*3)" in done.stdout.splitlines()


def test_dispatcher_can_be_another() -> None:
    config = load_model_config("tiny-deepseek")
    mok = command_line(config, version=(0, 19)).flags
    alltoall = command_line(config, version=(0, 19), dispatcher="alltoall").flags
    assert set(mok) ^ set(alltoall) == {
        ("moe-token-dispatcher-type", ("mok",)),
        ("moe-token-dispatcher-type", ("alltoall",)),
    }


@pytest.mark.parametrize("text", ["0.17", "0.18.1", "0.19.2+abc", "0.20", "1.0"])
def test_versions_that_are_read(text: str) -> None:
    assert parse_version(text) == tuple(int(part) for part in text.split(".")[:2])


@pytest.mark.parametrize("text", ["0.16.1", "0", "x.y", ""])
def test_versions_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="megatron-core"):
        parse_version(text)


@pytest.mark.parametrize("megatron", megatron_versions())
def test_megatron_parses_the_tiny_config_and_builds_the_same_model(megatron: str) -> None:
    """Megatron's parser, its argument checks, and its TransformerConfig, for each layout of the tiny config."""
    config = load_model_config("tiny-deepseek")
    outcomes = parse_with_megatron([("tiny-deepseek", layout) for layout in config.layouts], megatron)
    assert [outcome["error"] for outcome in outcomes] == [None] * len(outcomes)
    assert all(outcome["megatron"].split("+")[0] == megatron for outcome in outcomes)
    arch = config.architecture
    for outcome, layout in zip(outcomes, config.layouts.values(), strict=True):
        wanted = {
            "num_layers": arch.layers,
            "hidden_size": arch.hidden,
            "ffn_hidden_size": arch.ffn_hidden,
            "num_moe_experts": arch.moe.experts,
            "moe_ffn_hidden_size": arch.moe.intermediate,
            "moe_layer_freq": [0] + [1] * 3,
            "moe_router_topk": 2,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_shared_expert_intermediate_size": 128,
            "moe_token_dispatcher_type": "mok",
            "expert_model_parallel_size": layout.ep,
            "gated_linear_unit": True,
            "normalization": "RMSNorm",
            "add_bias_linear": False,
        }
        assert {name: outcome["config"][name] for name in wanted} == wanted
