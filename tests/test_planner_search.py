"""The search, its memory and time predictions, and what the verbs print and write."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from mok_megatron import cli
from mok_megatron.hardware import gpu
from mok_megatron.memory import default_ring_rows, workspace_bytes
from mok_megatron.model_config import load_model_config, shipped_configs
from mok_megatron.params import count_params
from mok_megatron.planner import report
from mok_megatron.planner import search as search_module
from mok_megatron.planner.candidate import Candidate, Job
from mok_megatron.planner.cluster import Cluster
from mok_megatron.planner.memory_use import chunks_in_flight, memory_use
from mok_megatron.planner.search import MEMORY_SHARE, Plan, search
from tests.megatron_parser import parse_with_megatron


def job(name: str = "deepseek-v3", gpu_name: str = "gb300", domains: int = 8, **changes: int) -> Job:
    sizes: dict[str, Any] = {"seq_length": 4096, "global_batch": 8192, **changes}
    cluster = Cluster(gpu=gpu(gpu_name), domains=domains)
    return Job(arch=load_model_config(name).architecture, cluster=cluster, **sizes)


def pinned(the_job: Job, recompute: str | None = None, **pins: int) -> Plan:
    return search(the_job, pins, recompute=recompute).plans[0]


EP64: dict[str, Any] = {"tp": 1, "pp": 8, "vpp": 4, "cp": 1, "ep": 64, "micro_batch": 1}


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-235b-a22b"])
def test_eight_racks_take_less_than_two_seconds(name: str) -> None:
    """About one, in CPU time; which grows too on a shared machine, so the best of three tries counts."""
    seconds: list[float] = []
    while len(seconds) < 3 and min(seconds, default=2.0) >= 2.0:
        for cached in (search_module._stages, search_module._layer_seconds):
            cached.cache_clear()
        started = time.process_time()
        found = search(job(name, global_batch=6400 + 1792))
        seconds.append(time.process_time() - started)
    assert min(seconds) < 2.0
    assert len(found.plans) > 100
    speeds = [plan.tokens_per_second for plan in found.plans]
    assert speeds[0] >= max(speeds) / 1.03


def test_every_plan_keeps_ep_groups_in_a_rack_and_fits() -> None:
    the_job = job()
    for plan in search(the_job).plans:
        c = plan.candidate
        assert c.used % c.ep == 0
        assert c.used <= 72
        assert c.world % (c.tp * c.pp * c.cp) == 0
        assert c.world % (c.ep * c.pp) == 0
        assert plan.memory.total <= the_job.cluster.gpu.memory_bytes * MEMORY_SHARE
        assert the_job.global_batch % (c.micro_batch * c.dp) == 0


def test_memory_of_deepseek_v3_by_hand() -> None:
    the_job = job()
    plan = pinned(the_job, **EP64)
    arch = the_job.arch
    assert (plan.candidate.world, plan.candidate.dp, plan.candidate.expert_dp) == (512, 64, 1)
    shape = arch.moe_shape(64)
    use = memory_use(the_job, plan.candidate, plan.stages, "none", shape=shape, ring_rows=plan.ring_rows, rank=0)
    held = plan.stages.of_rank(0)
    dense, layers = sum(chunk.dense(3) for chunk in held), sum(len(chunk.layers) for chunk in held)
    experts = 256 // 64 * 3 * 7168 * 2048
    attention = count_params(arch).attention / 61
    params = 129280 * 7168 + layers * (attention + 2 * 7168) + dense * 3 * 7168 * 18432
    params += (layers - dense) * (experts + 3 * 7168 * 2048 + 256 * 7168 + 256)
    assert use.weights == pytest.approx(2 * params, rel=1e-6)
    assert use.gradients == pytest.approx(4 * params, rel=1e-6)
    expert_params = (layers - dense) * experts
    assert use.optimizer == pytest.approx(12 * (expert_params + (params - expert_params) / 64), rel=1e-6)
    assert plan.memory.total >= use.total or plan.recompute != "none"
    assert plan.ring_rows == default_ring_rows(shape, 4096)
    replays = plan.recompute != "none"
    assert plan.memory.workspace == workspace_bytes(shape, 4096, plan.ring_rows, replays=replays)


@pytest.mark.parametrize(("level", "replays"), [("none", False), ("no-save-x", True), ("mok", True)])
def test_plans_that_keep_less_count_the_sums_that_replaying_needs(level: str, replays: bool) -> None:
    """With EP 1 a ring holds any routing, so only a plan that replays cuts experts into pieces."""
    plan = pinned(job("qwen3-30b-a3b"), level, tp=1, pp=1, vpp=1, cp=1, ep=1, micro_batch=1)
    shape = load_model_config("qwen3-30b-a3b").architecture.moe_shape(1)
    assert plan.memory.workspace == workspace_bytes(shape, 4096, plan.ring_rows, replays=replays)


def test_each_recompute_level_needs_less_memory_and_more_time() -> None:
    plans = [pinned(job(), level, **{**EP64, "vpp": 1}) for level in ("none", "no-save-x", "mok", "selective", "full")]
    memory = [plan.memory.total for plan in plans]
    seconds = [plan.time.total_s for plan in plans]
    assert memory == sorted(memory, reverse=True)
    assert seconds == sorted(seconds)
    assert memory[-1] < 0.8 * memory[0]


@pytest.mark.parametrize(
    ("pp", "vpp", "rank", "chunks"), [(1, 1, 0, 1), (8, 1, 0, 8), (8, 1, 7, 1), (8, 4, 0, 39), (8, 4, 7, 25)]
)
def test_chunks_in_flight_are_those_of_1f1b(pp: int, vpp: int, rank: int, chunks: int) -> None:
    c = Candidate(pp=pp, vpp=vpp, ep=64, used=64, world=512)
    assert chunks_in_flight(c, job(), rank) == chunks


def test_prediction_is_between_the_floors_and_reason() -> None:
    plan = pinned(job(), **EP64)
    for direction in ("fwd", "bwd"):
        moe = plan.time.moe[direction]
        assert moe.floors.bound <= moe.total_s <= 3 * moe.floors.bound
    assert 0.2 * 2500 < plan.model_tflops < 0.7 * 2500
    assert plan.time.bubble_s == pytest.approx(7 / 4 * plan.time.stage_s)


def test_slower_machine_slower_plan() -> None:
    fast, slow = (pinned(job(gpu_name=name), **EP64, used=64) for name in ("gb300", "gb200"))
    assert fast.time.total_s <= slow.time.total_s
    hopper = pinned(job(gpu_name="h200", domains=64), tp=2, pp=16, vpp=1, ep=8)
    assert hopper.per_gpu < 0.6 * fast.per_gpu


def test_every_shipped_config_has_a_plan_on_eight_racks() -> None:
    for name in shipped_configs():
        first = load_model_config(name).layout()
        batch = max(first.global_batch, 8192)
        few = {"micro_batch": 1, "cp": 1, "tp": min(4, load_model_config(name).architecture.flag_attention.heads)}
        assert search(job(name, seq_length=first.seq_length, global_batch=batch), few).plans, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--gpu", "h200", "--nodes", "32", "--ep", "16"],
            "H200 SXM has 8; the largest that divides 256 experts and fits is ep=8 (the alltoall",
        ),
        (["--gpu", "gb300", "--racks", "8", "--pp", "7"], "Nearest that works: TP1 PP8"),
        (["--gpu", "h200", "--nodes", "4"], "GB per GPU with recompute full"),
        (["--gpu", "h200", "--nodes", "4"], "It would fit"),
        (["--gpu", "gb300", "--racks", "1", "--gpus-per-domain", "30"], "30 GPUs per rack: must be whole nodes of 4"),
        (["--gpu", "gb300", "--racks", "8", "--tp", "0"], "tp must be at least 1, got 0"),
        (
            ["--gpu", "gb300", "--racks", "8", "--seq", "0"],
            "seq_length must be 1 to 163840 (the model's max_positions), got 0; nearest is 1",
        ),
        (["--gpu", "gb300", "--racks", "8", "--seq", "200000"], "got 200000; nearest is 163840"),
        (["--gpu", "gb300", "--racks", "8", "--global-batch", "-1"], "the global batch must be at least 1, got -1"),
        (["--gpu", "gb300", "--racks", "8", "--recompute", "some"], "--recompute must be one of none, no-save-x, mok"),
        (["--gpu", "gb400", "--racks", "8"], "unknown GPU 'gb400'; known GPUs are"),
        (["--gpu", "gb300", "--racks", "8", "--top", "0"], "--top must be at least 1, got 0"),
    ],
)
def test_impossible_wishes_end_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "deepseek-v3", "--global-batch", "8192", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_table_says_predicted_and_gives_reasons() -> None:
    found = search(job())
    text = report.table(found, report.distinct(found, 5)) + report.details(found, found.plans[0])
    assert "predicted, not measured" in text
    assert "not measured on GB300 NVL72" in text
    assert "does not fit into memory, e.g. " in text
    assert "rack 0     ranks 0-63: EP group" in text
    assert "comm SMs 152 of 152, ring " in text and "tile 128 x 256 per SM" in text
    (levels,) = (line for line in text.splitlines() if line.startswith("  recompute "))
    assert re.fullmatch(
        r"  recompute +none \d+ GB, .*; no-save-x .*; mok .*; selective .*; full \d+ GB, [\d.]+ s", levels
    )
    assert "8 of 72 GPUs per rack run no rank (2 trays)" in text


def written(tmp_path: Path, *arguments: str) -> Path:
    folder = tmp_path / "launch"
    assert cli.main(["plan", "deepseek-v3", "--global-batch", "8192", "--write", str(folder), *arguments]) == 0
    return folder


def test_launch_files_are_accepted_by_bash_and_megatron(tmp_path: Path) -> None:
    folder = written(tmp_path, "--gpu", "gb300", "--racks", "8", "--ep", "64", "--pp", "8", "--vpp", "4", "--json")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["deepseek-v3-gb300-512.yaml", "launch.sbatch", "machines.svg", "megatron_args.sh", "plan.json"]
    for script in ("launch.sbatch", "megatron_args.sh"):
        subprocess.run(["bash", "-n", str(folder / script)], check=True, timeout=30)
    sbatch = (folder / "launch.sbatch").read_text()
    assert all(f"#SBATCH --{line}\n" in sbatch for line in ("nodes=128", "segment=16", "ntasks-per-node=4"))

    config = load_model_config(folder / names[0])
    layout = config.layout("plan")
    assert (layout.gpus, layout.ep, layout.pp, layout.dp) == (512, 64, 8, 64)
    (outcome,) = parse_with_megatron([(str(folder / names[0]), "plan")])
    assert outcome["error"] is None
    assert outcome["config"]["expert_model_parallel_size"] == 64

    assert (folder / "megatron_args.sh").read_text() in sbatch  # whole in itself: Slurm runs a copy from elsewhere
    script = f'source "{folder}/megatron_args.sh"; printf "%s\\n" "${{MEGATRON_ARGS[@]}}"'
    listed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=30).stdout
    assert "--moe-token-dispatcher-type\nmok\n" in listed
    assert layout.pipeline is not None
    assert f"--pipeline-model-parallel-layout\n{layout.pipeline}\n" in listed


def test_sbatch_script_runs(tmp_path: Path) -> None:
    """With stand-ins for Slurm's programs: one task, started from another folder than the script's."""
    folder = written(tmp_path, "--gpu", "gb300", "--racks", "8", "--ep", "64", "--pp", "8", "--vpp", "4", "--json")
    programs = {
        "scontrol": "for i in {0..4095}; do echo host-$i; done",  # more than a pipe holds
        "mok-megatron": 'echo "preflight $@"',
        "python": f'exec {sys.executable} "$@"',
        "srun": 'while [[ $1 == -* ]]; do shift; done; SLURM_PROCID=5 SLURM_LOCALID=1 exec "$@"',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    pretrain = tmp_path / "pretrain_gpt.py"
    pretrain.write_text(
        "import os, sys\nprint(*[os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR')])\n"
        "print(*sys.argv[1:], sep='\\n')\n"
    )
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PRETRAIN": str(pretrain), "SLURM_JOB_NODELIST": "host-[a-b]"}
    command = ["bash", str(folder / "launch.sbatch"), "--data-path", "a b"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["preflight doctor", "5 1 512 host-0"]
    assert lines[-2:] == ["--data-path", "a b"]
    assert "([0]*3+[1]*58)" in lines
    del variables["PRETRAIN"]
    refused = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60, check=False)
    assert refused.returncode != 0 and "set PRETRAIN to the path" in refused.stderr


def test_files_are_not_replaced_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--gpu", "h200", "--nodes", "64")
    folder = written(tmp_path, *arguments)
    assert "--segment" not in (folder / "launch.sbatch").read_text()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    command = ["plan", "deepseek-v3", "--global-batch", "8192", "--write", str(folder), *arguments, "--tp", "4"]
    assert cli.main(command) == 2
    assert "already has" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert cli.main([*command, "--force"]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} != before


def test_recompute_reaches_the_layout(tmp_path: Path) -> None:
    folder = written(tmp_path, "--gpu", "h200", "--nodes", "64", "--recompute", "selective")
    (path,) = folder.glob("*.yaml")
    layout: dict[str, Any] = yaml.safe_load(path.read_text())["layouts"]["plan"]
    assert layout["recompute"] == ["layernorm", "mla_up_proj", "mlp", "shared_experts"]
    assert layout["training"]["mok-recompute"] is True
    assert layout["training"]["no-mok-save-x"] is True
    assert layout["training"]["mok-comm-sms"] == 121


def test_json_is_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "tiny-deepseek", "--gpu", "h200", "--nodes", "1", "--json", "--top", "3"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["predicted"] is True
    assert len(data["plans"]) == 3
    first = data["plans"][0]
    assert first["recompute_choices"]["none"]["memory_bytes"] == first["memory_bytes"]["total"] > 0
    assert first["tile"] == [128, 256]
    assert any("70%" in line for line in data["basis"])


def test_simulate_prints_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "qwen3-30b-a3b", "--gpu", "h200", "--ep", "8", "--tokens", "512"]) == 0
    text = capsys.readouterr().out
    assert text.count("predicted") == 2
    assert "not a measurement" in text
    assert cli.main(["simulate", "qwen3-30b-a3b", "--gpu", "h200", "--ep", "16"]) == 2
    assert "--ep 16 exceeds the 8 GPUs of one NVLink domain of H200 SXM" in capsys.readouterr().err
    assert cli.main(["simulate", "qwen3-30b-a3b", "--gpu", "gb300", "--ep", "60"]) == 2
    assert "--ep 60 does not divide the 128 experts; nearest is --ep 64" in capsys.readouterr().err
    assert cli.main(["simulate", "tiny-deepseek", "--gpu", "h200", "--ep", "2", "--tokens", "64", "--study"]) == 0
    assert capsys.readouterr().out.startswith("Predicted, not measured")
