"""Model configs: what is read, what is refused and with which words, parameter counts, flags by Megatron version."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mok_megatron.megatron_args import command_line
from mok_megatron.model_config import ModelConfig, find_config, load_model_config, shipped_configs

BASE: dict[str, Any] = {
    "architecture": {
        "layers": 8, "dense_layers": 2, "hidden": 64, "ffn_hidden": 256, "vocab": 1000, "max_positions": 4096,
        "attention": {"kind": "gqa", "heads": 8, "kv_heads": 2, "head_dim": 16},
        "moe": {"experts": 16, "top_k": 4, "intermediate": 32, "router": {"score": "softmax"}},
    },
    "layouts": {"one": {"gpus": 8, "ep": 8, "seq_length": 1024, "global_batch": 32}},
}  # fmt: skip


def write(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "model.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def changed(path: str, value: object) -> dict[str, Any]:
    """BASE with the dotted ``path`` set to ``value``."""
    data = copy.deepcopy(BASE)
    *parents, last = path.split(".")
    place = data
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    return data


def load(folder: Path, path: str = "architecture.layers", value: object = 8) -> ModelConfig:
    return load_model_config(write(folder, changed(path, value)))


def flags(config: ModelConfig, version: tuple[int, int] = (0, 19)) -> dict[str, tuple[str, ...]]:
    return dict(command_line(config, version=version).flags)


def test_every_shipped_config_loads_under_its_own_name() -> None:
    assert "tiny-deepseek" in shipped_configs()
    for name in shipped_configs():
        config = load_model_config(name)
        assert config.name == name
        for layout in config.layouts:
            command_line(config, layout, version=(0, 19))


def test_a_config_is_found_by_path_and_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, BASE)
    assert find_config(path) == path
    assert load_model_config(str(path)).name == "model"
    assert find_config("tiny-deepseek").name == "tiny-deepseek.yaml"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("architecture.laiers", 3, "architecture: unknown key 'laiers' (did you mean 'layers'?)"),
        ("architecture.moe.router.groop", 3, "architecture.moe.router: unknown key 'groop' (did you mean 'groups'?)"),
        ("architecture.layers", "8", "architecture.layers: expected an integer, got str '8'"),
        ("architecture.layers", True, "architecture.layers: expected an integer, got bool True"),
        ("architecture.layers", 8.0, "architecture.layers: expected an integer, got float 8.0"),
        ("architecture.layers", None, "architecture.layers: expected an integer, got nothing"),
        ("architecture.layers", 0, "layers must be >= 1, got 0"),
        ("architecture.dense_layers", 8, "dense_layers=8 leaves no MoE layer of layers=8"),
        ("architecture.attention.kind", "mha", "attention.kind: expected one of gqa, mla, other, got str 'mha'"),
        ("architecture.attention.kv_heads", 3, "heads=8 is not a multiple of kv_heads=3"),
        ("architecture.attention.q_rank", 3, "architecture.attention: unknown key 'q_rank'"),
        ("architecture.attention", [1], "architecture.attention: expected"),
        ("architecture.moe.top_k", 17, "top_k=17 exceeds experts=16"),
        ("architecture.moe.router.score", "tanh", "expected one of softmax, sigmoid, sqrtsoftplus, got str 'tanh'"),
        ("architecture.moe.router.groups", 4, "groups=4 and group_top_k=None go together"),
        ("architecture.moe.router", {"score": "sigmoid", "groups": 5, "group_top_k": 2}, "experts=16 is not divisible"),
        ("architecture.moe.router", {"score": "sigmoid", "groups": 16, "group_top_k": 2}, "exceeds the 2 experts of"),
        ("architecture.moe.router", {"score": "softmax", "expert_bias": True}, "expert_bias needs score sigmoid"),
        ("architecture.moe.router", {"score": "sigmoid", "normalize": False}, "normalize: false has no Megatron flag"),
        ("architecture.moe.shared_gate", True, "shared_gate without shared_intermediate"),
        ("architecture.swiglu_clamp", -1.0, "activation clamp must be positive"),
        ("layouts", {}, "layouts: at least one is needed"),
        ("layouts.one.gpus", 12, "gpus=12 is not a multiple of etp * ep * pp = 8; nearest valid: 8 and 16"),
        ("layouts.one.ep", 5, "gpus=8 is not a multiple of etp * ep * pp = 5; nearest valid: 5 and 10"),
        ("layouts.one", {"gpus": 32, "ep": 32, "seq_length": 8, "global_batch": 32}, "not divisible by the expert-par"),
        ("layouts.one.global_batch", 30, "is not a multiple of micro_batch * dp = 8; nearest valid: 24 and 32"),
        ("layouts.one.etp", 2, "etp"),
        ("layouts.one.tp", 16, "gpus=8 is not a multiple of tp * pp * cp = 16; nearest valid: 16"),
        ("layouts.one.seq_length", 8192, "seq_length=8192 exceeds max_positions=4096"),
        ("layouts.one.vpp", 2, "vpp=2 needs pp > 1, got pp=1"),
        ("layouts.one.recompute", ["moe", "mo_act"], "unknown module 'mo_act' (did you mean 'moe_act'?)"),
        ("layouts.one.recompute", "some", "recompute"),
        ("layouts.one.overrides", {"moe": {"expert": 4}}, "overrides.moe: unknown key 'expert' (did you mean"),
        ("layouts.one.overrides", {"moe": {"experts": 4}}, "num_experts=4 is not divisible by the expert-parallel"),
        ("training", {"--lr": 1}, "training.--lr: write the flag without leading dashes"),
        ("training", {"min_lr": 1}, "training.min_lr: write the flag without leading dashes and with hyphens"),
        ("training", {"lr": None}, "training.lr: expected a value, a list of values, or true, got None"),
        ("training", {"bf16": False}, "training.bf16: a flag that is not wanted is left out, got false"),
        ("training", {"bf16": []}, "training.bf16: expected a value"),
        ("published", {"total": 1e9, "active": "many", "source": "x"}, "published.active: expected a number"),
    ],
)  # fmt: skip
def test_refusals_name_place_value_and_remedy(tmp_path: Path, path: str, value: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(tmp_path, path, value)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'model.yaml'}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping"),
        ("- 1", "expected a mapping"),
        ("a: [1", "not valid YAML"),
        ("layouts: {}", "missing architecture"),
        ("layouts: {}\nlayouts: {}", "key 'layouts' given twice"),
        ("architecture: {layers: 1, layers: 2}", "key 'layers' given twice"),
        ("a: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_files_that_are_not_a_config(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_model_config(path)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_model_config(path)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", "1.0e-3", ".1e-2"])
def test_numbers_as_people_write_them(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, BASE)
    path.write_text(path.read_text() + f"\ntraining: {{lr: {text}}}\n")
    assert load_model_config(path).training["lr"] == pytest.approx(1e-3)


def test_parameter_count_by_hand(tmp_path: Path) -> None:
    """BASE, counted on paper: 2 dense and 6 MoE layers, GQA with 8 query and 2 key-value heads of 16."""
    attention = 8 * (64 * 128 + 2 * 64 * 32 + 128 * 64)
    dense = 2 * 3 * 64 * 256
    experts, one_expert = 6 * 16 * 3 * 64 * 32, 3 * 64 * 32
    rest = 6 * 16 * 64 + (2 * 8 + 1) * 64 + 2 * 1000 * 64
    total, active = load(tmp_path).num_params()
    assert total == attention + dense + experts + rest
    assert total - active == 6 * (16 - 4) * one_expert


@pytest.mark.parametrize(
    ("path", "value", "more"),
    [
        ("architecture.tied_embeddings", True, -1000 * 64),
        ("architecture.moe.shared_intermediate", 48, 6 * 3 * 64 * 48),
        ("architecture.moe.latent", 32, 6 * (2 * 64 * 32 - 16 * 3 * 32 * 32)),
        ("architecture.moe.router", {"score": "sigmoid", "expert_bias": True}, 6 * 16),
        ("architecture.moe.router", {"score": "softmax", "hash_layers": 3}, -3 * 16 * 64),
        ("architecture.attention.output_gate", True, 8 * 64 * 128),
        ("architecture.attention.qk_norm", True, 8 * 32),
        ("architecture.attention.qkv_bias", True, 8 * (128 + 64)),
        ("architecture.extra_params", 123, 123),
        ("architecture.mtp_layers", 1, 0),
    ],
)
def test_parameters_that_a_feature_adds(tmp_path: Path, path: str, value: object, more: int) -> None:
    before = load(tmp_path).num_params()[0]
    assert load(tmp_path, path, value).num_params()[0] - before == more


def test_deepseek_v3_sized_model_has_its_published_parameters(tmp_path: Path) -> None:
    """The MLA formulas against 671B total and 37B active of arXiv:2412.19437 (one vocabulary table active)."""
    data = changed("architecture", {
        "layers": 61, "dense_layers": 3, "hidden": 7168, "ffn_hidden": 18432, "vocab": 129280, "max_positions": 4096,
        "attention": {"kind": "mla", "heads": 128, "q_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64,
                      "v_dim": 128},
        "moe": {"experts": 256, "top_k": 8, "intermediate": 2048, "shared_intermediate": 2048,
                "router": {"score": "sigmoid", "groups": 8, "group_top_k": 4, "expert_bias": True}},
    })  # fmt: skip
    data["layouts"]["one"]["ep"] = 8
    data["published"] = {"total": 671e9, "active": 37e9, "source": "arXiv:2412.19437", "active_embeddings": "one"}
    config = load_model_config(write(tmp_path, data))
    total, active = config.num_params()
    assert total == pytest.approx(671e9, rel=0.01)
    assert round(active / 1e9) == 37  # printed without decimals: 36.6e9 counted


def test_indexer_and_linear_attention_are_counted_where_they_are(tmp_path: Path) -> None:
    linear = {"full_every": 4, "key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8}
    one_linear = 64 * (2 * 16 + 2 * 32 + 2 * 4) + 32 * 64 + (2 * 16 + 32) * 4 + 2 * 4 + 8
    one_full = 64 * 128 + 2 * 64 * 32 + 128 * 64
    before = load(tmp_path).params.attention
    assert load(tmp_path, "architecture.linear_attention", linear).params.attention == before + 6 * (
        one_linear - one_full
    )
    mla = {"kind": "mla", "heads": 4, "q_rank": 16, "kv_rank": 8, "nope_dim": 8, "rope_dim": 4, "v_dim": 8}
    indexer = {"heads": 2, "head_dim": 4, "top_k": 64, "share_every": 4, "share_offset": 1}
    plain = load(tmp_path, "architecture.attention", mla).params.attention
    shared = load(tmp_path, "architecture.attention", {**mla, "indexer": indexer}).params.attention
    assert shared - plain == 2 * (16 * 2 * 4 + 64 * 4 + 2 * 4 + 64 * 2)  # layers 1 and 5 of 8 own one


def test_mtp_is_counted_where_the_publication_counts_it(tmp_path: Path) -> None:
    data = changed("architecture.mtp_layers", 2)
    without = load_model_config(write(tmp_path, data)).num_params()
    one_layer = 64 * 128 + 2 * 64 * 32 + 128 * 64 + 16 * 64 + 16 * 3 * 64 * 32 + 2 * 64 * 64 + 5 * 64
    total = without[0] + 2 * one_layer
    data["published"] = {"total": total, "active": without[1], "active_unit": total, "source": "x", "with_mtp": True}
    assert load_model_config(write(tmp_path, data)).num_params()[0] == total


@pytest.mark.parametrize(("total", "active"), [(1.1, 1.0), (1.0, 0.9)])
def test_an_architecture_of_another_size_than_published_is_refused(tmp_path: Path, total: float, active: float) -> None:
    """Such as a copied config with other layers, under the old model's figures."""
    counted = load(tmp_path).num_params()
    figures = {"total": total * counted[0], "active": active * counted[1], "source": "x"}
    name, value = ("total", counted[0]) if total > 1 else ("active", counted[1])
    with pytest.raises(ValueError, match=f"published.{name} is .* the architecture has {re.escape(f'{value:.4g}')}"):
        load(tmp_path, "published", figures)


def test_layout_overrides_change_the_architecture_only_there(tmp_path: Path) -> None:
    data = copy.deepcopy(BASE)
    overrides = {"layers": 2, "dense_layers": 1, "moe": {"experts": 4}}
    data["layouts"]["smoke"] = {"gpus": 1, "seq_length": 64, "global_batch": 1, "overrides": overrides}
    config = load_model_config(write(tmp_path, data))
    found = dict(command_line(config, "smoke", version=(0, 19)).flags)
    assert (found["num-layers"], found["num-experts"], found["moe-layer-freq"]) == (("2",), ("4",), ("([0]*1+[1]*1)",))
    assert flags(config)["num-layers"] == ("8",)


def test_training_flags_of_a_layout_replace_those_of_the_config(tmp_path: Path) -> None:
    data = changed("training", {"lr": 1e-4, "bf16": True, "moe-aux-loss-coeff": [0.1, 0.2]})
    data["layouts"]["one"]["training"] = {"lr": 2e-4}
    found = flags(load_model_config(write(tmp_path, data)))
    assert (found["lr"], found["bf16"], found["moe-aux-loss-coeff"]) == (("0.0002",), (), ("0.1", "0.2"))


@pytest.mark.parametrize("flag", ["num-layers", "moe-router-topk", "expert-model-parallel-size", "swiglu"])
def test_a_flag_that_follows_from_the_architecture_is_refused_in_training(tmp_path: Path, flag: str) -> None:
    config = load(tmp_path, "training", {flag: 1})
    with pytest.raises(ValueError, match=f"training gives --{flag}, which follows from"):
        command_line(config, version=(0, 19))


def test_flags_by_version(tmp_path: Path) -> None:
    renamed = load(tmp_path, "training", {"cuda-graph-scope": "attn"})
    assert "cuda-graph-scope" in flags(renamed, (0, 17))
    assert "cuda-graph-modules" in flags(renamed, (0, 18))
    new_score = load(tmp_path, "architecture.moe.router", {"score": "sqrtsoftplus"})
    assert flags(new_score, (0, 18))["moe-router-score-function"] == ("sqrtsoftplus",)
    with pytest.raises(ValueError, match=r"--moe-router-score-function sqrtsoftplus needs megatron-core 0\.18"):
        flags(new_score, (0, 17))


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("layouts.one.recompute", "full", {"recompute-granularity": ("full",), "recompute-num-layers": ("1",)}),
        ("layouts.one.recompute", ["moe", "mla_up_proj"], {"recompute-modules": ("moe", "mla_up_proj")}),
        ("layouts.one.tp", 2, {"tensor-model-parallel-size": ("2",), "sequence-parallel": ()}),
        ("architecture.swiglu_clamp", 7.0, {"activation-func-clamp-value": ("7.0",)}),
        ("architecture.swiglu_offset", 1.0, {"glu-linear-offset": ("1.0",)}),
        ("architecture.mtp_layers", 1, {"mtp-num-layers": ("1",)}),
        ("architecture.moe.router", {"score": "softmax", "normalize": False}, {"moe-router-pre-softmax": ()}),
        ("architecture.moe.top_k", 1, {"moe-router-pre-softmax": ()}),
        ("architecture.moe.latent", 32, {"moe-latent-size": ("32",)}),
        ("architecture.attention.output_gate", True, {"attention-output-gate": ()}),
        ("architecture.rope_fraction", 0.25, {"rotary-percent": ("0.25",)}),
    ],
)
def test_flags_that_a_feature_adds(
    tmp_path: Path, path: str, value: object, expected: dict[str, tuple[str, ...]]
) -> None:
    plain, found = flags(load(tmp_path)), flags(load(tmp_path, path, value))
    assert expected.items() <= found.items()
    assert not expected.items() <= plain.items()


def test_pipeline_layouts(tmp_path: Path) -> None:
    layout = {"gpus": 8, "ep": 2, "pp": 4, "vpp": 2, "seq_length": 64, "global_batch": 8}
    found = flags(load(tmp_path, "layouts.one", layout))
    assert found["num-virtual-stages-per-pipeline-rank"] == ("2",)
    with pytest.raises(ValueError, match="layers=8 do not divide evenly over pp \\* vpp = 12 stages"):
        load(tmp_path, "layouts.one", {**layout, "vpp": 3})
    uneven = flags(load(tmp_path, "layouts.one", {**layout, "vpp": None, "pipeline": "Et*3|t*2|t*2|tL"}))
    assert uneven["pipeline-model-parallel-layout"] == ("Et*3|t*2|t*2|tL",)


def test_an_attention_without_flags_uses_its_stand_in_and_says_so(tmp_path: Path) -> None:
    other = {
        "kind": "other", "note": "ring of mirrors", "params": 12345, "details": {"mirrors": [1, 2]},
        "stand_in": {"kind": "gqa", "heads": 4, "kv_heads": 4, "head_dim": 16},
    }  # fmt: skip
    config = load(tmp_path, "architecture.attention", other)
    command = command_line(config, version=(0, 19))
    assert config.params.attention == 12345
    assert dict(command.flags)["num-attention-heads"] == ("4",)
    assert len(command.notes) == 1
    assert "ring of mirrors" in command.notes[0]
