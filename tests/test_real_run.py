"""The launch script of the long run on one H200, and what records and evaluates such runs, as far as a CPU can tell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.moe_marks import MoeMarks, _Mark, summarize
from scripts.record_run import digest, steps_of
from tests.megatron_versions import ROOT, environment, megatron_versions

SCRIPT = ROOT / "examples" / "deepseek_style_h200.sh"

_PARSE = """
import contextlib, io, sys, warnings
warnings.simplefilter("ignore")
from types import SimpleNamespace
import torch, mok_megatron
from megatron.core.transformer.moe import moe_utils
from megatron.training import arguments
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0)
for name in ("fused_permute", "fused_unpermute", "fused_sort_chunks_by_index"):
    setattr(moe_utils, name, object())
    setattr(moe_utils, name + "_with_probs", object())
with contextlib.redirect_stdout(io.StringIO()):
    args = arguments.validate_args(arguments.parse_args(), {})
    config = arguments.core_transformer_config_from_args(args)
print(config.moe_token_dispatcher_type, config.num_layers, config.moe_layer_freq, args.train_iters, args.seed)
"""


def launch(tmp_path: Path, *arguments: str, **variables: str) -> list[str]:
    """What the script gives to torchrun."""
    stub = tmp_path / "torchrun"
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    (tmp_path / "corpus").mkdir(exist_ok=True)
    path = f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        [SCRIPT, tmp_path / "corpus", *arguments],
        capture_output=True, text=True, timeout=60, check=False, env={"PATH": path, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("dispatcher", ["mok", "alltoall"])
def test_megatron_accepts_the_launch_scripts_flags(tmp_path: Path, dispatcher: str) -> None:
    argv = launch(tmp_path, "--seed", "4321", DISPATCHER=dispatcher, LAYERS="3", STEPS="40")
    assert argv[:4] == ["--standalone", "--nproc-per-node", "1", str(ROOT / "examples" / "pretrain_gpt.py")]
    done = subprocess.run(
        [sys.executable, "-c", _PARSE, *argv[4:]],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=False,
        env={**environment(megatron_versions()[-1]), "WORLD_SIZE": "1", "RANK": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == f"{dispatcher} 3 [0, 1, 1] 40 4321"


def test_the_launch_script_names_what_is_missing() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "usage: " in done.stderr


def event(category: str, name: str, ts: float, dur: float = 0.0, correlation: int = 0) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": {"correlation": correlation}}


PROFILE = [
    event("cuda_runtime", "cudaLaunchKernel", 1, correlation=1),
    event("user_annotation", "moe forward begins", 2),
    event("cuda_runtime", "cudaLaunchKernel", 3, correlation=2),
    event("user_annotation", "moe forward ends", 4),
    event("cuda_runtime", "cudaMemcpyAsync", 5, correlation=3),
    event("user_annotation", "moe backward begins", 6),
    event("cuda_driver", "cuLaunchKernelEx", 7, correlation=4),
    event("user_annotation", "moe backward ends", 8),
    event("cpu_op", "aten::mm", 7),
    event("kernel", "other", 100, 3000, correlation=1),
    event("kernel", "experts", 200, 5000, correlation=2),
    event("gpu_memcpy", "copy", 300, 1000, correlation=3),
    event("kernel", "experts", 400, 9000, correlation=4),
    {"ph": "M", "name": "process_name"},
]


def test_a_profile_is_split_by_where_the_host_launched() -> None:
    found = summarize(PROFILE, steps=2)
    assert found["busy_ms"] == 9.0
    assert found["moe_busy_ms"] == {"forward": 2.5, "backward": 4.5}
    assert (found["launches"], found["moe_launches"]) == (2.0, 1.0)
    assert found["kernels"][0] == ["experts", 7.0, 1.0]


def test_a_profile_whose_marks_do_not_alternate_is_refused() -> None:
    without_an_end = [item for item in PROFILE if item["name"] != "moe forward ends"]
    with pytest.raises(ValueError, match="'forward begins' is followed by 'backward begins'"):
        summarize(without_an_end, steps=1)
    without_the_last = [item for item in PROFILE if item["name"] != "moe backward ends"]
    with pytest.raises(ValueError, match="'backward begins' is followed by 'nothing'"):
        summarize(without_the_last, steps=1)


def test_marks_change_no_value_and_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    marks, seen = MoeMarks(), []
    monkeypatch.setattr(marks, "mark", lambda part, begins: seen.append((part, begins)))
    x = torch.randn(3, 4, requires_grad=True)
    entered = _Mark.apply(x, marks, ("forward", True), ("backward", False))
    left = _Mark.apply(entered.sin(), marks, ("forward", False), ("backward", True))
    (grad,) = torch.autograd.grad(left.sum(), x)
    assert torch.equal(left, x.sin())
    assert torch.equal(grad, x.cos())
    assert seen == [("forward", True), ("forward", False), ("backward", True), ("backward", False)]


def test_digests_see_bits_names_and_places() -> None:
    def hashed(weight: list[float], name: str = "w") -> str:
        module = torch.nn.Module()
        module.register_parameter(name, torch.nn.Parameter(torch.tensor(weight, dtype=torch.bfloat16)))
        return digest([module])

    assert hashed([1.0, 2.0]) == hashed([1.0, 2.0])
    others = [hashed([2.0, 1.0]), hashed([1.0, 2.015625]), hashed([1.0, 2.0], "v"), hashed([1.0, -2.0]), hashed([1.0])]
    assert len({hashed([1.0, 2.0]), *others}) == 6
    assert hashed([0.0]) != hashed([-0.0])


def test_ranges_of_steps() -> None:
    assert steps_of("2:4") == range(2, 5)
    for text in ("1:4", "5:4"):
        with pytest.raises(ValueError, match="expected A:B with 1 < A <= B"):
            steps_of(text)


def test_json_of_a_profile_is_read(tmp_path: Path) -> None:
    from scripts.moe_marks import read_trace

    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": PROFILE}))
    assert read_trace(tmp_path / "trace.json", steps=1)["busy_ms"] == 18.0
