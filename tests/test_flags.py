"""Every option of Megatron that reaches the MoE layer is tried with ``mok`` or refused; docs/flags.md says how."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mok_megatron.refusals import TRAINING_ARGUMENTS
from scripts import update_flags_doc
from scripts.update_flags_doc import case_flags, gpu_tests
from tests import flag_layers, moe_layers
from tests.distributed import run_ranks
from tests.flag_cases import CASES, Layout
from tests.flag_fields import ARGUMENTS, outside
from tests.flag_refusals import NOT_YET_IN_A_RELEASE, TRIGGERS
from tests.pretrain import CASES as LAYOUTS
from tests.test_pretrain_layouts import LAYOUTS as TRIED_LAYOUTS

FP32_TOLERANCE = 1e-6
CPU_LAYOUTS = list(dict.fromkeys(layout for case in CASES if case.layer for layout in case.layouts))

OTHER_NAMES = {
    "num_layers_per_virtual_pipeline_stage": "virtual_pipeline_model_parallel_size",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
}
"""Command-line options that are named otherwise than the fields that they set."""


@pytest.mark.parametrize("layout", CPU_LAYOUTS, ids=str)
def test_layers_are_those_of_alltoall(layout: Layout) -> None:
    """y, dx, dprobs and each parameter's gradient on its own, in fp32."""
    expected = [case.title for case in flag_layers.cases_in(layout)]
    for rank, outcomes in enumerate(run_ranks(layout.world, flag_layers.layer_errors, layout)):
        for title, errors in outcomes.items():
            assert isinstance(errors, dict), f"rank {rank}, {title}: {errors}"
            worst, quantity = moe_layers.worst(errors)
            assert worst < FP32_TOLERANCE, f"rank {rank}, {title}: {quantity} is off by {worst}"
        assert list(outcomes) == expected


def test_a_recomputed_norm_before_the_layer_changes_no_bit() -> None:
    for rank, differing in enumerate(run_ranks(2, flag_layers.behind_a_recomputed_norm)):
        assert not any(differing.values()), f"rank {rank}: {differing}"


def test_every_case_has_a_name_and_a_trial() -> None:
    assert len({(case.group, case.title) for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.layer or case.te or case.training or case.gpu_training is not None or case.tests, case.title
        assert not case.training or case.training in TRIED_LAYOUTS, f"{case.training} is no layout that is tried"
        assert case.layer or case.layouts == type(case).layouts, f"{case.title} names layouts without a layer"


def test_named_tests_exist() -> None:
    for case in CASES:
        for test in case.tests:
            file, _, function = test.partition("::")
            source = (Path(__file__).parent / file).read_text(encoding="utf-8")
            assert not function or f"def {function}(" in source, test


def _fields_of(command_line: str) -> set[str]:
    names = {name.replace("-", "_") for name in re.findall(r"--([a-z0-9-]+)", command_line)}
    return {OTHER_NAMES.get(name, name) for name in names}


def test_every_field_of_this_megatron_is_tried_refused_or_outside() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    tried = set(moe_layers.config_arguments())
    for case in CASES:
        arguments = f"{case.model} {case.gpu_training or ''} {LAYOUTS[case.training][1] if case.training else ''}"
        tried |= set(case.changes) | _fields_of(arguments)
    refused = {name for changes in TRIGGERS.values() for change in changes for name in change} | set(TRIGGERS)
    refused -= set(NOT_YET_IN_A_RELEASE)
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert names - tried - refused - outside() == set(), "options of Megatron that nobody has looked at"
    assert outside() - names == set(), "Megatron has no such options"
    assert outside() & (tried | refused) == set(), "options that are tried or refused are not outside"


def _actions() -> list[argparse.Action]:
    from megatron.training.arguments import add_megatron_arguments

    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions


def test_every_argument_about_experts_is_a_field_refused_or_outside() -> None:
    """Those of which a part of the name tells; the three that hook expert modules had been overlooked."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    arguments = {action.dest for action in _actions()} - {field.name for field in dataclasses.fields(TransformerConfig)}
    telling = re.compile(r"moe|expert|fsdp|hsdp|hybrid|save_.*interval")
    told = {name for name in arguments if telling.search(name)}
    outside_names = {name for names in ARGUMENTS.values() for name in names.split()}
    assert told - set(TRAINING_ARGUMENTS) - outside_names == set(), "arguments that nobody has looked at"
    assert outside_names | set(TRAINING_ARGUMENTS) <= arguments, "Megatron has no such arguments"
    assert not outside_names & set(TRAINING_ARGUMENTS)


def test_flags_of_the_page_are_flags_of_megatron() -> None:
    known = {flag for action in _actions() for flag in action.option_strings}
    for case in CASES:
        named = set(re.findall(r"--[a-z0-9-]+", case_flags(case)))
        assert named <= known, f"{case.title}: {sorted(named - known)}"


@pytest.mark.parametrize("padded", [False, True])
def test_a_graph_of_the_moe_module_alone_is_refused(padded: bool) -> None:
    """Megatron wants the padding with it that ``mok`` refuses."""
    changes: dict[str, Any] = {}
    if padded:
        changes = {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0}
    refusal, words = (
        (ValueError, "moe_pad_expert_input_to_capacity") if padded else (AssertionError, "drop-padding MoE")
    )
    with pytest.raises(refusal, match=words):
        moe_layers.make_config(cuda_graph_impl="transformer_engine", cuda_graph_modules=["moe"], **changes)


def test_results_on_a_gpu_are_noted_test_by_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = json.loads(update_flags_doc.SEEN.read_text(encoding="utf-8"))
    known = [test for case in CASES for test in gpu_tests(case).values()]
    assert len(known) == len(set(known))
    assert set(before) <= set(known), "seen, but no case has these tests"
    monkeypatch.setattr(update_flags_doc, "SEEN", tmp_path / "seen.json")
    update_flags_doc.SEEN.write_text(json.dumps({known[0]: "then", known[1]: "then", known[2]: "then"}))
    cases = f"""<testcase name="{known[0]}"><failure/></testcase><testcase name="{known[1]}"/>
        <testcase name="{known[3]}"/><testcase name="{known[4]}"><skipped/></testcase><testcase name="test_other"/>"""
    (tmp_path / "results.xml").write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    update_flags_doc.note_seen("now", [tmp_path / "results.xml"])
    found = json.loads(update_flags_doc.SEEN.read_text(encoding="utf-8"))
    assert found == {known[1]: "now", known[2]: "then", known[3]: "now"}
    (tmp_path / "results.xml").write_text('<testsuite><testcase name="test_layers[gone]"/></testsuite>')
    with pytest.raises(ValueError, match=r"no case .* has the test test_layers\[gone\]"):
        update_flags_doc.note_seen("now", [tmp_path / "results.xml"])


def test_the_page_shows_these_cases() -> None:
    assert update_flags_doc.main(["--check"]) == 0, "run scripts/update_flags_doc.py"
