"""Files that launch a plan: config with the layout, Megatron arguments, Slurm script, picture, numbers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import yaml

from mok_megatron.megatron_args import command_line, installed_version
from mok_megatron.model_config import ModelConfig, find_config, load_model_config
from mok_megatron.planner.candidate import Job, placement
from mok_megatron.planner.picture import rack_svg
from mok_megatron.planner.report import as_data
from mok_megatron.planner.search import Plan, Search
from mok_megatron.planner.timing import comm_sms

LAYOUT_NAME = "plan"


def layout_mapping(job: Job, plan: Plan) -> dict[str, Any]:
    """The plan as a layout of a model config file."""
    c = plan.candidate
    training: dict[str, Any] = {"mok-ring-rows": plan.ring_rows}
    if comm_sms(job.cluster.gpu) < job.cluster.gpu.sms:
        training["mok-comm-sms"] = comm_sms(job.cluster.gpu)
    if plan.recompute in ("mok", "selective"):
        training["mok-recompute"] = True
    if plan.recompute not in ("none", "full"):
        training["no-mok-save-x"] = True
    layout: dict[str, Any] = {
        "note": f"planned for {job.cluster.domains} {job.cluster.noun}(s) of {job.cluster.gpu.title}, "
        f"{c.used} GPUs each",
        "gpus": c.world,
        **{name: value for name in ("tp", "pp", "cp", "ep") if (value := getattr(c, name)) > 1},
        "seq_length": job.seq_length,
        "micro_batch": c.micro_batch,
        "global_batch": job.global_batch,
        "training": training,
    }
    if not plan.stages.is_even:
        layout["pipeline"] = plan.stages.text()
    elif c.vpp > 1:
        layout["vpp"] = c.vpp
    modules = recompute_modules(job, plan)
    if modules:
        layout["recompute"] = modules
    return layout


def recompute_modules(job: Job, plan: Plan) -> str | list[str]:
    """Megatron's share of the recompute level: "full", a list of modules, or nothing."""
    if plan.recompute == "full":
        return "full"
    if plan.recompute != "selective":
        return []
    arch = job.arch
    modules = ["layernorm"]
    modules += ["mla_up_proj"] if arch.flag_attention.kind == "mla" else []
    modules += ["mlp"] if arch.dense_layers else []
    modules += ["shared_experts"] if arch.moe.shared_intermediate else []
    return modules


def write_files(
    folder: Path, config_name: str, config: ModelConfig, search: Search, plan: Plan, *, force: bool
) -> list[Path]:
    """Write all files into ``folder``; returns their paths.

    Raises ValueError where one exists and ``force`` is not given; nothing is written then.
    """
    job = search.job
    yaml_path = folder / f"{config.name}-{job.cluster.gpu.name}-{plan.candidate.world}.yaml"
    paths = [yaml_path, *(folder / n for n in ("megatron_args.sh", "launch.sbatch", "machines.svg", "plan.json"))]
    existing = [path.name for path in paths if path.exists()]
    if existing and not force:
        raise ValueError(f"{folder} already has {', '.join(existing)}: choose another folder, or add --force")
    folder.mkdir(parents=True, exist_ok=True)
    yaml_path.write_text(_config_text(config_name, job, plan), encoding="utf-8")
    planned = load_model_config(yaml_path)
    command = command_line(planned, LAYOUT_NAME, version=installed_version())
    title = f"{config.name} on {job.cluster.domains} {job.cluster.noun}(s) of {job.cluster.gpu.title}: "
    place = placement(job, plan.candidate)
    arguments = _args_text(command.flags, command.notes, yaml_path.name)
    texts = [
        arguments,
        _sbatch_text(config, job, plan, arguments),
        rack_svg(place, ep=plan.candidate.ep, pp=plan.candidate.pp, title=title + plan.candidate.label()),
        json.dumps(as_data(search, [plan]), indent=2) + "\n",
    ]
    for path, text in zip(paths[1:], texts, strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def _config_text(config_name: str, job: Job, plan: Plan) -> str:
    document = yaml.safe_load(find_config(config_name).read_text(encoding="utf-8"))
    document["layouts"] = {LAYOUT_NAME: layout_mapping(job, plan)}
    head = "# Written by `mok-megatron plan`. The sources of the architecture's figures are in the original config.\n"
    return head + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=118)


def _args_text(flags: tuple[tuple[str, tuple[str, ...]], ...], notes: tuple[str, ...], source: str) -> str:
    lines = [f"# Megatron arguments of {source}; as `mok-megatron args {source}` prints them."]
    lines += [f"# note: {note}" for note in notes]
    body = [" ".join([f"  --{flag}", *map(shlex.quote, values)]) for flag, values in flags]
    return "\n".join([*lines, "MEGATRON_ARGS=(", *body, ")"]) + "\n"


def _sbatch_text(config: ModelConfig, job: Job, plan: Plan, arguments: str) -> str:
    """One task per GPU; Slurm's block distribution gives consecutive ranks to a node, as Megatron's EP groups need."""
    gpu, c = job.cluster.gpu, plan.candidate
    place = placement(job, c)
    nodes = place.nodes_per_domain * job.cluster.domains
    segment = []
    if gpu.is_rack:
        segment = [
            f"# {place.nodes_per_domain} trays from each rack, so that EP groups of {c.ep} stay in one NVLink domain;",
            "# needs Slurm's topology/block plugin.",
            f"#SBATCH --segment={place.nodes_per_domain}",
        ]
    connections = ["export CUDA_DEVICE_MAX_CONNECTIONS=1  # tp or cp above 1 on Hopper"]
    lines = [
        "#!/bin/bash",
        "# Usage: PRETRAIN=/path/to/pretrain_gpt.py sbatch launch.sbatch <data, tokenizer, checkpoint and lr flags>",
        f"#SBATCH --job-name={config.name}-mok",
        f"#SBATCH --nodes={nodes}",
        *segment,
        f"#SBATCH --ntasks={c.world}",
        f"#SBATCH --ntasks-per-node={gpu.node_gpus}",
        f"#SBATCH --gpus-per-node={gpu.node_gpus}",
        "#SBATCH --exclusive",
        "set -euo pipefail",
        "",
        ': "${PRETRAIN:?set PRETRAIN to the path of pretrain_gpt.py}"',
        "",
        arguments,
        'HOSTS=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
        f"export MASTER_ADDR=${{HOSTS[0]}} MASTER_PORT=${{MASTER_PORT:-29500}} WORLD_SIZE={c.world}",
        *(connections if not gpu.is_rack and gpu.arch == "sm90a" and c.tp * c.cp > 1 else []),
        "",
        "# Checks versions, GPUs and NVLink before anything is loaded.",
        f"srun --ntasks={nodes} --ntasks-per-node=1 mok-megatron doctor",
        "srun --distribution=block --kill-on-bad-exit=1 bash -c \\",
        '  \'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python "$0" "$@"\' \\',
        '  "$PRETRAIN" "${MEGATRON_ARGS[@]}" "$@"',
    ]
    return "\n".join(lines) + "\n"
