"""Conversion of Megatron launch files from other token dispatchers to ``mok``, as a minimal diff."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from mok_megatron.convert import rules
from mok_megatron.convert.edits import Conversion, Finding, NotUnderstoodError, apply_edits
from mok_megatron.convert.refused import refused_flags
from mok_megatron.convert.shell import convert_shell
from mok_megatron.convert.yaml_arguments import convert_yaml

Format = Literal["shell", "yaml"]

__all__ = ["Conversion", "Finding", "Format", "NotUnderstoodError", "convert_text", "detect_format"]

_SHELL_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".job")


def detect_format(path: Path, text: str) -> Format:
    """The format of a file, from its ending, else from its first line. Raises NotUnderstoodError for any other."""
    if path.suffix in (".yaml", ".yml"):
        return "yaml"
    first = text.split("\n", 1)[0]
    if path.suffix in _SHELL_SUFFIXES or (first.startswith("#!") and "sh" in first.rsplit("/", 1)[-1]):
        return "shell"
    raise NotUnderstoodError(
        f"{path.name}: neither a shell script (ending {', '.join(_SHELL_SUFFIXES)}, or a #! line with a shell) nor YAML"
    )


def convert_text(text: str, kind: Format) -> Conversion:
    """Convert a launch file's text; nothing is written.

    Raises NotUnderstoodError, naming the line, for text that cannot be converted safely, and for text without any
    Megatron MoE argument.
    """
    if "\0" in text:
        raise NotUnderstoodError("the file is not text")
    converter = convert_shell(text) if kind == "shell" else convert_yaml(text)
    # A file that only sets variables is refused, too: nothing in it says that the run uses mok.
    decisive = {
        rules.TYPE_FLAG,
        rules.EXPERTS_FLAG,
        *(flag for flag in rules.DROPPED_FLAGS if flag.startswith("--moe-")),
    }
    if not decisive & {flag.name for flag in converter.flags}:
        raise NotUnderstoodError(
            f"no Megatron MoE argument found (neither {rules.TYPE_FLAG} nor {rules.EXPERTS_FLAG}): is this the file "
            "that holds the arguments?"
        )
    findings = sorted({*converter.findings, *refused_flags(converter.flags)})
    return Conversion(original=text, text=apply_edits(text, converter.edits), findings=tuple(findings))
