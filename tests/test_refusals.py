"""Which configurations are refused, with which message; every MoE option of Megatron is decided."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

import pytest
import torch

import mok_megatron  # noqa: F401 (installs the hooks)
from mok_megatron import refusals
from mok_megatron.honoured import HONOURED
from tests import moe_layers
from tests.flag_refusals import NOT_YET_IN_A_RELEASE, TRIGGERS

HONOURED_CHANGES: list[dict[str, Any]] = [
    *moe_layers.LAYER_CASES.values(),
    {"bf16": True, "params_dtype": torch.bfloat16},
    {"recompute_granularity": "selective", "recompute_modules": ["moe", "shared_experts"]},
    {"recompute_granularity": "selective", "recompute_modules": ["moe_act"], "moe_grouped_gemm": True},
    {"gradient_accumulation_fusion": True},
    {"moe_latent_size": 16},
    {"moe_layer_freq": [1]},
    {"num_moe_experts": None, "moe_ffn_hidden_size": None, "add_bias_linear": True},
    {"fine_grained_activation_offloading": False, "offload_modules": ["expert_fc1"]},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True},
    {"variable_seq_lengths": True},
]


def _config_fields() -> list[dataclasses.Field[Any]]:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return list(dataclasses.fields(TransformerConfig))


def _with_field(field: str, default: Any) -> type:
    """TransformerConfig with one field more, as a newer Megatron may have it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return dataclasses.make_dataclass("NewerConfig", [(field, Any, default)], bases=(TransformerConfig,))


def test_every_refusal_has_its_trigger() -> None:
    counts: dict[str, int] = {}
    for refusal in refusals.REFUSALS:
        counts[refusal.field] = counts.get(refusal.field, 0) + 1
    assert set(TRIGGERS) == set(counts)
    assert all(len(TRIGGERS[field]) >= count for field, count in counts.items())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("field", "changes"), [(field, changes) for field, triggers in TRIGGERS.items() for changes in triggers]
)
def test_refused_with_option_value_reason_and_remedy(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="moe_token_dispatcher_type='mok' does not support") as caught:
        if field in NOT_YET_IN_A_RELEASE and field not in {f.name for f in _config_fields()}:
            newer = _with_field(field, NOT_YET_IN_A_RELEASE[field])
            newer(**moe_layers.config_arguments())
            newer(**moe_layers.config_arguments(**changes))
        else:
            moe_layers.make_config(**changes)
    message = str(caught.value)
    refusal = next(r for r in refusals.REFUSALS if r.field == field and r.reason in message)
    assert f" {field}=" in message
    assert f"({refusal.option})" in message
    assert message.endswith(refusal.remedy)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("changes", HONOURED_CHANGES, ids=str)
def test_honoured_configs_are_accepted(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = moe_layers.make_config(**changes)
    assert config.moe_token_dispatcher_type == "mok"
    refusals.check_config(config, resolved=True)


def test_other_dispatchers_are_left_alone() -> None:
    assert moe_layers.make_config("alltoall", add_bias_linear=True, gated_linear_unit=False)


def test_every_moe_option_of_this_megatron_is_decided_once() -> None:
    """A new option of Megatron must be looked at; with a value of its own it is refused until then."""
    refused = {refusal.field for refusal in refusals.REFUSALS}
    names = {field.name for field in _config_fields()}
    assert {name for name in names if name.startswith("moe_")} <= refused | set(HONOURED)
    # num_moe_experts and the like are honoured within limits, which the table of refusals states.
    limited = {"num_moe_experts", "moe_router_topk", "activation_func_clamp_value", "glu_linear_offset"}
    assert refused & set(HONOURED) == limited


def test_an_option_of_a_newer_megatron_is_refused_unless_default() -> None:
    newer = _with_field("moe_teleport", 3)
    assert newer(**moe_layers.config_arguments()).moe_teleport == 3
    with pytest.raises(ValueError, match=r"does not know the option moe_teleport=4 .*default 3"):
        newer(**moe_layers.config_arguments(moe_teleport=4))


def test_flags_of_the_table_are_flags_of_megatron() -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {flag for action in parser._actions for flag in action.option_strings}
    known |= {refusals.CONFIG_ONLY, "--kitchen-config-file"}  # the latter where Kitchen is installed
    named = {r.option for r in refusals.REFUSALS if r.field not in NOT_YET_IN_A_RELEASE}
    named |= {flag for r in refusals.REFUSALS for flag in re.findall(r"--[a-z0-9-]+", r.remedy)}
    assert named <= known, sorted(named - known)


class _Graphs:
    def __init__(self, impl: str, modules: Any) -> None:
        self.cuda_graph_impl, self.cuda_graph_modules = impl, modules


@pytest.mark.parametrize(
    ("impl", "modules", "captures"),
    [
        ("none", [], False),
        ("local", [], True),
        ("full_iteration", [], True),
        ("transformer_engine", ["moe"], True),
        ("transformer_engine", ["attn", "moe_router"], False),
        ("transformer_engine", ["attn", "moe_router", "moe_preprocess"], False),
    ],
)
def test_graphs_that_capture_the_experts(impl: str, modules: list[str], captures: bool) -> None:
    assert refusals.captures_experts(_Graphs(impl, modules)) is captures
