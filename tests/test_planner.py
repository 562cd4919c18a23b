"""Ranks on machines, pipeline stages, layer costs: the planner's facts, against Megatron's own where it has them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.config import MoeShape
from mok_megatron.floors import DIRECTIONS
from mok_megatron.hardware import GPUS, gpu
from mok_megatron.model_config import load_model_config
from mok_megatron.params import count_params
from mok_megatron.planner.candidate import Candidate, Job, nearest_divisor, refusal
from mok_megatron.planner.cluster import Cluster, Placement, ep_groups, spanning_groups
from mok_megatron.planner.layercost import layer_costs
from mok_megatron.planner.picture import TERMINAL_PALETTE, rack_svg, rack_text
from mok_megatron.planner.pipeline import Stages, split
from mok_megatron.planner.timing import PLANNED_POLICY, comm_sms, moe_time
from mok_megatron.simulator import Machine, build_traffic, sample_routing, simulate

RACKS = Cluster.of(gpu("gb300"), racks=2)


def test_domains() -> None:
    assert {name: (g.domain_gpus, g.node_gpus, g.nodes_per_domain) for name, g in GPUS.items()} == {
        "h100": (8, 8, 1),
        "h200": (8, 8, 1),
        "b200": (8, 8, 1),
        "gb200": (72, 4, 18),
        "gb300": (72, 4, 18),
    }
    assert [name for name, g in GPUS.items() if g.measured] == ["h200"]


@pytest.mark.parametrize(
    ("ep", "used"),
    [(64, [64]), (32, [64]), (8, [64, 72]), (72, [72]), (24, [72]), (48, [48]), (5, [60]), (1, [64, 72]), (128, [])],
)
def test_gpus_per_rack_hold_whole_trays_and_ep_groups(ep: int, used: list[int]) -> None:
    assert RACKS.usable_per_domain(ep) == used
    for gpus in used:
        place = Placement(cluster=RACKS, used=gpus)
        assert spanning_groups(place, ep) == []
        assert gpus % 4 == 0


def test_all_72_gpus_would_tear_ep_64_apart() -> None:
    place = Placement(cluster=RACKS, used=72)
    assert spanning_groups(place, 64) == [range(64, 128)]
    assert Placement(cluster=RACKS, used=64).nodes_per_domain == 16
    assert "8 of 72 GPUs per rack run no rank (2 trays)" in Placement(cluster=RACKS, used=64).spare_note()


MEGATRON_GROUPS = """
import json, sys
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
cases, layouts = json.loads(sys.argv[1])
groups = []
for world, ep, pp in cases:
    make = RankGenerator(tp=1, ep=ep, dp=world // (ep * pp), pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    groups.append([make.get_ranks("ep"), make.get_ranks("pp")])
letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
parsed = [
    ["".join(letters[kind.name] for kind in stage) for stage in PipelineParallelLayerLayout.parse_str_to_list(text)]
    for text in layouts
]
print(json.dumps([groups, parsed]))
"""


def test_ep_groups_and_stages_are_megatrons() -> None:
    cases = [(128, 64, 2), (144, 24, 2), (64, 8, 4)]
    layouts = ["Ett|(tt|)*29t|mL", "Et*8|(tttttttt|)*6t*5mL", "Et*3|(tttt|)*14tt|m|L"]
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON_GROUPS, json.dumps([cases, layouts])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    groups, parsed = json.loads(done.stdout.splitlines()[-1])
    for (world, ep, pp), (ep_ranks, pipelines) in zip(cases, groups, strict=True):
        assert sorted(ep_ranks) == [list(group) for group in ep_groups(world, ep)]
        assert min(pipelines) == list(range(0, world, world // pp))
    assert parsed == [megatron_layout(text) for text in layouts]


def megatron_layout(text: str) -> list[str]:
    """Megatron's grammar for a layout, read as its documentation says: ``(ab)*n`` first, then ``x*n``."""
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), text)
    return re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), text).split("|")


@settings(max_examples=200, deadline=None)
@given(
    layers=st.integers(1, 96),
    dense=st.integers(0, 4),
    pp=st.integers(1, 16),
    vpp=st.integers(1, 4),
    mtp=st.integers(0, 2),
    loss=st.sampled_from([0.0, 0.4, 2.5]),
)
def test_stages_hold_every_layer_once_and_stay_balanced(
    layers: int, dense: int, pp: int, vpp: int, mtp: int, loss: float
) -> None:
    costs = [0.5] * min(dense, layers) + [1.0] * (layers - min(dense, layers))
    stages = split(costs, pp=pp, vpp=vpp, mtp=mtp, mtp_cost=1.2, loss_cost=loss)
    if stages is None:
        assert layers < pp * vpp or mtp
        return
    assert "".join(stages.texts) == "E" + "t" * layers + "m" * mtp + "L"
    assert len(stages.texts) == pp * vpp
    assert megatron_layout(stages.text()) == list(stages.texts)
    if layers % (pp * vpp) == 0 and not mtp:
        assert {text.count("t") for text in stages.texts} == {layers // (pp * vpp)}, "Megatron's own, even split"
        return
    price = {"E": 0.0, "m": 1.2, "L": loss}
    worst, total = 0.0, sum(costs) + 1.2 * mtp + loss
    for text, chunk in zip(stages.texts, stages.chunks, strict=True):
        worst = max(worst, sum(costs[layer] for layer in chunk.layers) + sum(price.get(c, 0.0) for c in text))
    # No split is better than the mean, nor than its largest unit; the heuristic stays within one unit of that.
    assert worst <= total / (pp * vpp) + max(1.0, 1.2 * mtp, loss) + 1e-6
    if mtp and pp > 1:
        assert not any("m" in text for text in stages.texts[: pp * vpp - pp + 1])


def test_deepseek_v3_stages() -> None:
    stages = split([1.0] * 61, pp=8, vpp=4, mtp=1, mtp_cost=1.2, loss_cost=0.5)
    assert stages is not None
    assert stages.text() == "Ett|(tt|)*29t|mL"
    assert [len(chunk.layers) for chunk in stages.of_rank(7)] == [2, 2, 2, 0]
    assert not stages.is_even
    assert Stages(pp=2, vpp=1, texts=("Ett", "ttL")).is_even


def test_layer_costs_add_up_to_the_parameter_count() -> None:
    for name in ("deepseek-v3", "qwen3-235b-a22b", "glm-4.5"):
        arch = load_model_config(name).architecture
        c, counts = layer_costs(arch), count_params(arch)
        layers = arch.layers * (c.attention_params + c.norm_params) + arch.dense_layers * c.dense_params
        layers += arch.moe_layers * (c.router_params + c.shared_params + arch.moe.experts * c.expert_params)
        assert layers + counts.embedding + counts.output == pytest.approx(counts.total, rel=1e-4)


@pytest.mark.parametrize(
    ("hidden", "width", "experts", "ep", "tokens", "name"),
    [
        (7168, 2048, 32, 1, 4096, "h200"),
        (2048, 768, 128, 1, 8192, "h200"),
        (5120, 1536, 160, 8, 2048, "h200"),
        (2048, 768, 128, 8, 4096, "h200"),
        (7168, 2048, 256, 16, 2048, "gb300"),
        (4096, 1536, 128, 32, 2048, "gb200"),
    ],
)
def test_closed_formula_follows_the_simulator(
    hidden: int, width: int, experts: int, ep: int, tokens: int, name: str
) -> None:
    shape = MoeShape(hidden=hidden, intermediate=width, num_experts=experts, top_k=8, ep_size=ep)
    traffic = build_traffic(shape, sample_routing(shape, tokens))
    machine = Machine.from_gpu(gpu(name)).with_(burst_s=0.0)
    for direction in DIRECTIONS:
        formula = moe_time(shape, tokens, direction, gpu(name), machine)
        simulated = simulate(machine, PLANNED_POLICY, traffic, direction)
        assert formula.total_s == pytest.approx(simulated.total_s, rel=0.15)
        assert formula.total_s >= formula.floors.bound


def test_comm_sms_saturate_nvlink_where_they_can() -> None:
    assert comm_sms(gpu("h200")) == 121
    assert comm_sms(gpu("gb300")) == 152  # two warps of each of 152 SMs do not fill NVLink 5


def job(name: str = "deepseek-v3", cluster: Cluster = RACKS, **changes: int) -> Job:
    sizes: dict[str, Any] = {"seq_length": 4096, "global_batch": 2048, **changes}
    return Job(arch=load_model_config(name).architecture, cluster=cluster, **sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ep": 60}, "ep=60 does not divide the 256 experts; nearest is ep=64"),
        ({"ep": 128}, "needs 128 GPUs in one NVLink domain, GB300 NVL72 has 72; .* fits is ep=64"),
        (
            {"ep": 64, "used": 72, "world": 144},
            "ep=64 does not divide the 72 GPUs used per rack: .* use 64 GPUs per rack",
        ),
        ({"ep": 64, "pp": 4}, r"ep \* pp = 64 \* 4 = 256 does not divide the 128 GPUs; .* nearest is pp=2"),
        ({"tp": 3}, "tp=3 does not divide the 64 GPUs used per rack; nearest is tp=4"),
        ({"cp": 3}, r"tp \* pp \* cp = 1 \* 1 \* 3 = 3 does not divide the 128 GPUs; nearest is [24]"),
        ({"cp": 3, "world": 192}, r"multiple of 2 \* cp = 6, got 4096; nearest is 4098"),
        ({"vpp": 2}, "vpp=2 needs pp > 1, got pp=1; use vpp=1"),
        ({"micro_batch": 3}, r"2048 is not a multiple of micro_batch \* dp = 3 \* 128 = 384; nearest is 1920"),
        (
            {"pp": 2, "vpp": 2, "micro_batch": 32},
            "the 1 microbatches to be a multiple of pp=2; nearest global batch is 4096",
        ),
    ],
)
def test_refusals_name_numbers_and_the_nearest_choice(sizes: dict[str, int], message: str) -> None:
    reason = refusal(job(), Candidate(**{"used": 64, "world": 128, **sizes}))
    assert reason is not None
    assert re.search(message, reason[1]), reason[1]


def test_a_sound_layout_is_not_refused() -> None:
    assert refusal(job(), Candidate(ep=64, pp=2, vpp=4, used=64, world=128)) is None
    assert nearest_divisor(64, 5) in (4, 8)


def test_kv_heads_limit_tp() -> None:
    reason = refusal(job("qwen3-235b-a22b"), Candidate(tp=8, ep=8, used=64, world=128))
    assert reason is None or "kv_heads" in reason[1]


@pytest.mark.parametrize(
    ("name", "count", "message"),
    [
        ("gb300", {"nodes": 20}, "20 GB300 NVL72 trays are not whole racks of 18; nearest is --racks 1"),
        ("h200", {"racks": 2}, "H200 SXM comes in nodes of 8 GPUs, not in racks: use --nodes"),
        ("h200", {"nodes": 0}, "the number of nodes must be at least 1, got 0"),
        ("h200", {}, "give either --racks or --nodes"),
    ],
)
def test_machines_that_do_not_exist(name: str, count: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster.of(gpu(name), **count)


def test_picture_shows_every_rank_and_the_reserve() -> None:
    svg = rack_svg(Placement(cluster=RACKS, used=64), ep=64, pp=2, title="a < b")
    assert svg.count("<title>rank ") == 128
    assert svg.count('fill="#d9d9d9"') == 16
    assert "rank 64, EP group 1, pipeline stage 1" in svg
    assert "a &lt; b" in svg and "reserve, 8 GPUs per rack" in svg
    nodes = rack_svg(Placement(cluster=Cluster.of(gpu("h200"), nodes=40), used=8), ep=8, pp=4, title="t")
    assert "24 more nodes alike" in nodes


def test_text_picture_has_a_line_per_tray() -> None:
    lines = rack_text(Placement(cluster=RACKS, used=64), ep=64, coloured=False).splitlines()
    assert len(lines) == 1 + 18
    assert lines[0].split() == ["rack", "0", "rack", "1"]
    assert lines[16].split() == ["tray", "15", *map(str, (60, 61, 62, 63, 124, 125, 126, 127))]
    assert lines[17].split() == ["tray", "16", *"........"]
    coloured = rack_text(Placement(cluster=RACKS, used=64), ep=64, coloured=True).splitlines()[1]
    first, second = (coloured.index(f"48;5;{colour}m") for colour in TERMINAL_PALETTE[:2])
    assert first < coloured.index("  64") and second < coloured.index("  64") < len(coloured)
    nodes = rack_text(Placement(cluster=Cluster.of(gpu("h200"), nodes=20), used=8), ep=8, coloured=False).splitlines()
    assert nodes[1].split() == ["node", "1", *map(str, range(8, 16))]
    assert nodes[-1] == "... and 12 more nodes alike"
