"""Which flags of a launch ``mok`` would refuse: the table of mok_megatron.refusals, asked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from mok_megatron.convert import rules
from mok_megatron.convert.edits import Finding
from mok_megatron.convert.shell_lexer import literal
from mok_megatron.convert.words import FlagUse
from mok_megatron.refusals import REFUSALS, TRAINING_ARGUMENTS, Refusal, flag_of

_WANTED_FLAGS = ("--swiglu", "--disable-bias-linear", "--bf16")
"""Flags that settings need rather than refuse; they may be in another file, so their absence proves nothing."""

_TRAINING_FLAGS = {flag_of(name): why for name, why in TRAINING_ARGUMENTS.items()}
"""Refused when the layer is built, since they are no fields of TransformerConfig: flag -> reason and remedy."""

_OTHER_ACTIVATIONS = ("--squared-relu", "--quick-geglu", "--openai-gelu")
"""Flags that make the experts' activation something else than SwiGLU."""

_FIELDS = {
    "--num-experts": "num_moe_experts",
    "--expert-model-parallel-size": "expert_model_parallel_size",
}


def refused_flags(flags: Sequence[FlagUse]) -> list[Finding]:
    """Findings for the flags that mok does not honour. Values that depend on a variable are not judged."""
    uses = [use for use in flags if use.name not in rules.DROPPED_FLAGS]
    if not uses:
        return []
    config = _config(uses)
    findings = []
    for refusal in REFUSALS:
        if refusal.option in _WANTED_FLAGS:
            continue
        for use in uses:
            if use.name == refusal.option and _applies(refusal, config, use):
                what = " ".join([use.name, *use.values])
                findings.append(_finding(use, what, refusal))
    findings += [
        Finding(line=use.line, kind="refused", what=use.name, why=_TRAINING_FLAGS[use.name])
        for use in uses
        if use.name in _TRAINING_FLAGS
    ]
    activation = next(refusal for refusal in REFUSALS if refusal.field == "activation_func")
    findings += [_finding(use, use.name, activation) for use in uses if use.name in _OTHER_ACTIVATIONS]
    return findings + _inherited_expert_tensor_parallel(uses)


def _applies(refusal: Refusal, config: Any, use: FlagUse) -> bool:
    value = _value(use)
    if value is None:
        return False
    try:
        return refusal.refuses(config, value)
    except TypeError:
        # The default to compare with, or another value that counts, is not known here: a flag that is given to change
        # its default is refused, a relation between unknown numbers is not judged.
        return refusal.values == "changed"


def _finding(use: FlagUse, what: str, refusal: Refusal) -> Finding:
    return Finding(line=use.line, kind="refused", what=what, why=f"{refusal.reason}. {refusal.remedy}")


def _inherited_expert_tensor_parallel(uses: Sequence[FlagUse]) -> list[Finding]:
    """Without its own flag, the experts' tensor parallelism is that of the model, which mok refuses above 1."""
    names = {use.name for use in uses}
    refusal = next(refusal for refusal in REFUSALS if refusal.field == "expert_tensor_parallel_size")
    tensor = next((use for use in uses if use.name == "--tensor-model-parallel-size"), None)
    if tensor is None or refusal.option in names or rules.EXPERTS_FLAG not in names:
        return []
    value = _value(tensor)
    if not isinstance(value, int) or value <= 1:
        return []
    return [_finding(tensor, f"{tensor.name} {value} without {refusal.option}", refusal)]


def _value(use: FlagUse) -> Any:
    """The flag's value as the config would hold it; None where it is not written out."""
    if not use.values:
        return True
    values = [literal(raw) for raw in use.values]
    if None in values:
        return None
    numbers = [_number(value) for value in values if value is not None]
    return numbers[0] if len(numbers) == 1 else numbers


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _config(uses: Sequence[FlagUse]) -> Any:
    """What the flags say, under the names of TransformerConfig: all that the predicates of the refusals read."""
    names = {use.name for use in uses}
    fields: dict[str, Any] = dict.fromkeys(_FIELDS.values())
    fields |= {_FIELDS.get(use.name, use.name[2:].replace("-", "_")): _value(use) for use in uses}
    fields["bias_activation_fusion"] = "--no-bias-swiglu-fusion" not in names
    fields.setdefault("use_te_activation_func", False)
    fields.setdefault("fine_grained_activation_offloading", False)
    return SimpleNamespace(**fields)
