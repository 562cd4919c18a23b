"""The shipped configs of the big models: published sizes, Megatron's own parser, hardware rules, sources."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from mok_megatron.cli import main
from mok_megatron.hardware import GPUS
from mok_megatron.memory import default_ring_rows
from mok_megatron.model_config import Layout, find_config, load_model_config, shipped_configs
from mok_megatron.planner.candidate import Candidate, Job, refusal
from mok_megatron.planner.cluster import Cluster
from mok_megatron.planner.memory_use import memory_use, tokens_per_gpu
from mok_megatron.planner.pipeline import Stages
from tests.megatron_parser import parse_with_megatron
from tests.megatron_versions import megatron_versions

MODELS = (
    "deepseek-v3",
    "deepseek-v4-flash",
    "deepseek-v4-pro",
    "glm-4.5",
    "glm-5.2",
    "kimi-k2",
    "kimi-k2.7-code",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
    "qwen3.5-397b-a17b",
)
DEEPSEEK_V4_NOTES = (
    "attention of this model",
    "route by token id",
    "parameters of this model",
    "hyper-connections",
    "clamps the routed experts' SwiGLU only",
)
CASES = [(name, layout) for name in MODELS for layout in load_model_config(name).layouts]


def test_all_are_shipped_with_layouts_for_racks_nodes_and_one_gpu() -> None:
    assert set(MODELS) <= set(shipped_configs())
    for name in MODELS:
        layouts = load_model_config(name).layouts
        assert {"hopper-ep8", "hopper-ep16", "one-gpu"} <= set(layouts)
        assert sum(layout.startswith("nvl72-") for layout in layouts) >= 2


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_ones(name: str) -> None:
    """Within 1 %, or within the last digit where the source prints no more than two of them."""
    config = load_model_config(name)
    assert config.published is not None
    total, active = config.num_params()
    assert abs(total - config.published.total) <= max(0.01 * config.published.total, config.published.total_unit)
    assert abs(active - config.published.active) <= max(0.01 * config.published.active, config.published.active_unit)


@pytest.mark.parametrize(("name", "total"), [("kimi-k2", 1_026_408_232_448), ("glm-5.2", 753_329_940_480)])
def test_where_the_checkpoint_was_counted_every_parameter_is_there(name: str, total: int) -> None:
    assert load_model_config(name).num_params()[0] == total


@pytest.mark.parametrize("name", MODELS)
def test_every_figure_of_the_architecture_has_its_source(name: str) -> None:
    """Each number carries a tag like ``[c]`` or a reason, on its line or on one that it belongs to."""
    text = find_config(name).read_text()
    defined = set(re.findall(r"^#   (\[\w\])", text, re.MULTILINE))
    assert defined
    stack: list[tuple[int, bool]] = []
    block = text.split("\narchitecture:\n")[1].split("\npublished:")[0]
    for line in block.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        indent = len(line) - len(line.lstrip())
        stack = [entry for entry in stack if entry[0] < indent]
        comment = line.partition("#")[2]
        assert set(re.findall(r"\[\w\]", comment)) <= defined, line
        explained = bool(comment) or any(tagged for _, tagged in stack)
        if re.search(r":.*\d", line.partition("#")[0]):
            assert explained, f"{name}: no source for {line.strip()!r}"
        stack.append((indent, bool(comment)))
    for tag in set(re.findall(r"\[\w\]", text)):
        assert tag in defined, f"{name}: {tag} is not defined in the head"


@cache
def parsed() -> dict[tuple[str, str], dict[str, Any]]:
    return dict(zip(CASES, parse_with_megatron(CASES), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_megatron_builds_its_config_from_the_command_line(case: tuple[str, str]) -> None:
    outcome = parsed()[case]
    assert outcome["error"] is None
    config, layout = load_model_config(case[0]), load_model_config(case[0]).layout(case[1])
    arch, found = config.architecture_for(layout), outcome["config"]
    assert found["moe_token_dispatcher_type"] == layout.dispatcher
    expected = {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "ffn_hidden_size": arch.ffn_hidden,
        "num_attention_heads": arch.flag_attention.heads,
        "num_moe_experts": arch.moe.experts,
        "moe_router_topk": arch.moe.top_k,
        "moe_ffn_hidden_size": arch.moe.intermediate,
        "moe_shared_expert_intermediate_size": arch.moe.shared_intermediate,
        "moe_router_score_function": arch.moe.router.score,
        "moe_router_topk_scaling_factor": arch.moe.router.scaling,
        "activation_func_clamp_value": arch.swiglu_clamp,
        "mtp_num_layers": arch.mtp_layers or None,
        "expert_model_parallel_size": layout.ep,
        "pipeline_model_parallel_size": layout.pp,
        "tensor_model_parallel_size": layout.tp,
        "expert_tensor_parallel_size": 1,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["bf16"] and not found["add_bias_linear"] and found["gated_linear_unit"]


TOO_OLD = {
    "0.17": {"deepseek-v4-flash", "deepseek-v4-pro", "glm-5.2"},
    "0.18": {"glm-5.2"},
}


@pytest.mark.parametrize("megatron", megatron_versions()[:-1])
def test_older_megatrons_build_their_config_or_are_named_as_too_old(megatron: str) -> None:
    cases = [(name, next(iter(load_model_config(name).layouts))) for name in MODELS]
    for (name, _), outcome in zip(cases, parse_with_megatron(cases, megatron), strict=True):
        assert outcome["megatron"].startswith(megatron)
        if name in TOO_OLD[megatron[:4]]:
            assert re.search(rf"--\S+ \w+ needs megatron-core 0.1[89], this is {megatron[:4]}", outcome["error"])
        else:
            assert outcome["error"] is None
            assert outcome["config"]["num_moe_experts"] == load_model_config(name).architecture.moe.experts


def candidate(layout: Layout, used: int) -> Candidate:
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "micro_batch")}
    vpp = len(stages(layout)) // layout.pp
    return Candidate(**sizes, vpp=vpp, used=used, world=layout.gpus)


def stages(layout: Layout) -> list[str]:
    """Stages of a pipeline layout, repeats written out."""
    if layout.pipeline is None:
        return [""] * layout.pp * (layout.vpp or 1)
    text = re.sub(r"\((.*?)\)\*(\d+)", lambda match: match[1] * int(match[2]), layout.pipeline)
    text = re.sub(r"(\w)\*(\d+)", lambda match: match[1] * int(match[2]), text)
    return text.split("|")


@pytest.mark.parametrize("case", [case for case in CASES if case[1] != "one-gpu"], ids=lambda c: f"{c[0]}-{c[1]}")
def test_layouts_obey_the_hardware_and_fit_into_memory(case: tuple[str, str]) -> None:
    config = load_model_config(case[0])
    layout, arch = config.layout(case[1]), config.architecture
    on_rack = case[1].startswith("nvl72")
    gpu, used = (GPUS["gb200"], 64) if on_rack else (GPUS["h200"], 8)
    job = Job(
        arch=arch,
        cluster=Cluster(gpu=gpu, domains=layout.gpus // used),
        seq_length=layout.seq_length,
        global_batch=layout.global_batch,
    )
    c = candidate(layout, used)
    reason = refusal(job, c)
    if layout.dispatcher == "alltoall":
        assert reason is not None and reason[0].startswith("EP")
        return
    assert reason is None
    assert not on_rack or layout.ep == (32 if case[0] == "glm-4.5" else 64)
    if layout.pipeline is not None:
        assert sum(stage.count("t") for stage in stages(layout)) == arch.layers
        assert sum(stage.count("m") for stage in stages(layout)) == arch.mtp_layers
    recompute = layout.recompute if isinstance(layout.recompute, str) else "selective"
    texts = stages(layout)
    if layout.pipeline is None:
        texts = ["t" * (arch.layers // len(texts))] * len(texts)
        texts[0], texts[-1] = "E" + texts[0], texts[-1] + "m" * arch.mtp_layers + "L"
    spread = Stages(pp=c.pp, vpp=c.vpp, texts=tuple(texts))
    shape = arch.moe_shape(layout.ep)
    ring_rows = default_ring_rows(shape, tokens_per_gpu(job, c))
    for rank in {0, layout.pp - 1}:
        use = memory_use(job, c, spread, recompute, shape=shape, ring_rows=ring_rows, rank=rank)
        assert use.total <= gpu.memory_bytes, f"{use.total / 1e9:.0f} GB of {gpu.memory_bytes / 1e9:.0f}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("deepseek-v4-pro", DEEPSEEK_V4_NOTES),
        ("deepseek-v4-flash", DEEPSEEK_V4_NOTES),
        ("glm-5.2", ("MTP layer",)),
        ("qwen3.5-397b-a17b", ("vision tower",)),
        ("kimi-k2.7-code", ("vision tower",)),
        ("kimi-k2", ("beta_fast",)),
        ("deepseek-v3", ()),
    ],
)
def test_what_megatron_cannot_express_is_said(
    name: str, said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["args", name]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(said)
    for words in said:
        assert any(words in note for note in notes), words


@pytest.mark.parametrize("wanted", [[], ["--dispatcher", "mok"]])
def test_a_layout_that_mok_refuses_says_so(wanted: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["args", "deepseek-v3", "--layout", "hopper-ep16", *wanted]) == 0
    out, err = capsys.readouterr()
    assert f"--moe-token-dispatcher-type {'mok' if wanted else 'alltoall'}" in out
    assert "note: this layout is made for alltoall: " in err and "spans two nodes, which mok refuses" in err
