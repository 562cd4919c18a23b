"""Conversion of launch files: golden files, what a shell would really run, and forms that must be refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_megatron.cli import main
from mok_megatron.convert import Conversion, NotUnderstoodError, convert_text, detect_format, rules
from mok_megatron.refusals import REFUSALS

CASES = sorted(path for path in (Path(__file__).parent / "data" / "convert").iterdir() if path.suffix != ".expected")
SCRIPTS = [path for path in CASES if path.suffix == ".sh"]
BASH = shutil.which("bash")


def convert(text: str, kind: str = "shell") -> Conversion:
    return convert_text(text, "yaml" if kind == "yaml" else "shell")


def kinds(conversion: Conversion, kind: str) -> list[str]:
    return [finding.what for finding in conversion.findings if finding.kind == kind]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_golden(path: Path) -> None:
    text = path.read_text()
    conversion = convert_text(text, detect_format(path, text))
    assert conversion.text == path.with_name(path.name + ".expected").read_text()
    assert conversion.changed and not conversion.refused


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_idempotent(path: Path) -> None:
    kind = detect_format(path, path.read_text())
    once = convert_text(path.read_text(), kind).text
    again = convert_text(once, kind)
    assert again.text == once
    assert not kinds(again, "replaced") and not kinds(again, "dropped") and not kinds(again, "added")


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_comments_stay(path: Path) -> None:
    text = path.read_text()
    converted = convert_text(text, detect_format(path, text)).text
    for line in text.splitlines():
        if " #" in line or line.startswith("#"):
            assert line[line.index("#") :] in converted


def seen_by_megatron(script: str, folder: Path, environment: dict[str, str]) -> list[tuple[list[str], dict[str, str]]]:
    """Run the script with stubs for the launchers; returns argument list and HybridEP environment of each launch."""
    folder.mkdir(exist_ok=True)
    report = '{ for a in "$@"; do printf "%s\\n" "$a"; done; env | grep -E "MNNVL|NVLINK_DOMAIN"; echo END; } >> "$LOG"'
    stub = f"#!/bin/bash\n{report}\n"
    for name in ("torchrun", "python"):
        (folder / name).write_text(stub)
    (folder / "srun").write_text('#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n')
    (folder / "sbatch").write_text("#!/bin/bash\nexec bash\n")
    for name in ("torchrun", "python", "srun", "sbatch"):
        (folder / name).chmod(0o755)
    (folder / "job.sh").write_text(script)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "LOG": str(folder / "log"), **environment}
    subprocess.run([BASH or "bash", str(folder / "job.sh")], env=env, check=True, capture_output=True, timeout=60)
    launches = []
    for block in (folder / "log").read_text().split("END\n")[:-1]:
        lines = block.splitlines()
        variables = dict(line.split("=", 1) for line in lines if not line.startswith("-") and "=" in line)
        launches.append(([line for line in lines if line.split("=")[0] not in variables], variables))
    return launches


def without_other_dispatchers(words: list[str]) -> list[str]:
    """What the conversion should make of an argument list, written in the plainest way."""
    result, skip = [], 0
    for index, word in enumerate(words):
        if skip:
            skip -= 1
        elif word == rules.TYPE_FLAG:
            result += [word, "mok"]
            skip = 1
        elif word.startswith(rules.TYPE_FLAG + "="):
            result.append(rules.TYPE_FLAG + "=mok")
        elif word in rules.DROPPED_FLAGS:
            skip = rules.DROPPED_FLAGS[word]
        else:
            result.append(word)
            if word == rules.EXPERTS_FLAG and not any(other.startswith(rules.TYPE_FLAG) for other in words):
                result += [words[index + 1], rules.TYPE_FLAG, "mok"]
                skip = 1
    return result


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.parametrize("environment", [{}, {"GPU": "gb200", "OVERLAP": "1"}], ids=["defaults", "gb200"])
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_the_converted_script_runs_the_same_launch_with_mok(
    path: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    text = path.read_text()
    before = seen_by_megatron(text, tmp_path / "before", environment)
    after = seen_by_megatron(convert(text).text, tmp_path / "after", environment)
    assert before and len(before) == len(after)
    for (old, _), (new, variables) in zip(before, after, strict=True):
        expected = [word.replace("runs/glm-alltoall", "runs/glm-mok") for word in without_other_dispatchers(old)]
        assert new == expected
        assert not variables


ITEMS = st.sampled_from(
    (
        "--swiglu",
        "--num-experts 8",
        "--num-experts=8",
        "'[0]*1+[1]*2'",
        '"two words"',
        "--moe-token-dispatcher-type flex",
        "--moe-token-dispatcher-type=alltoall",
        '--moe-token-dispatcher-type "flex"',
        "--moe-enable-deepep",
        "--moe-deepep-num-sms 20",
        "--moe-hybridep-num-sms=32",
        "--moe-flex-dispatcher-backend 'hybridep'",
    )
)
ARRAY_GAPS = st.sampled_from([" ", "\n    ", "  # a comment\n    ", "\n\n  # above\n  ", " \\\n    "])
COMMAND_GAPS = st.sampled_from([" ", " \\\n    ", "   ", " \\\n"])


@pytest.mark.skipif(BASH is None, reason="needs bash")
@settings(max_examples=150, deadline=None)
@given(data=st.data(), items=st.lists(ITEMS, min_size=1, max_size=8), as_array=st.booleans())
def test_any_layout_keeps_the_other_arguments(data: st.DataObject, items: list[str], as_array: bool) -> None:
    gaps = ARRAY_GAPS if as_array else COMMAND_GAPS
    body = "".join(data.draw(gaps) + item for item in items) + (data.draw(gaps) if as_array else "")
    text = f'A=({body})\nshow "${{A[@]}}"\n' if as_array else f"show{body}\n"
    try:
        conversion = convert(text)
    except NotUnderstoodError as error:
        assert "no Megatron MoE argument" in str(error)
        return
    if rules.TYPE_FLAG in conversion.text:
        assert convert(conversion.text).text == conversion.text
    assert conversion.text.count("#") == text.count("#")
    old, new = shown(text), shown(conversion.text)
    assert without_other_dispatchers([part for word in old for part in split_inline(word)]) == [
        part for word in new for part in split_inline(word)
    ]


def shown(script: str) -> list[str]:
    """The words that the command ``show`` of the script gets."""
    definition = 'show() { for word in "$@"; do printf "%s\\0" "$word"; done; }\n'
    run = subprocess.run([BASH or "bash", "-c", definition + script], check=True, capture_output=True, timeout=60)
    return run.stdout.decode().split("\0")[:-1]


def split_inline(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") else [word]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('A=("--moe-token-dispatcher-type" "flex")\n', 'A=("--moe-token-dispatcher-type" "mok")\n'),
        ("A=(--moe-token-dispatcher-type='flex')\n", "A=(--moe-token-dispatcher-type='mok')\n"),
        ('A=("--moe-token-dispatcher-type=flex" -x)\n', 'A=("--moe-token-dispatcher-type=mok" -x)\n'),
        (
            "A=(--moe-token-dispatcher-type alltoall --moe-token-dispatcher-type flex)\n",
            "A=(--moe-token-dispatcher-type mok --moe-token-dispatcher-type mok)\n",
        ),
        (
            "A=(--moe-token-dispatcher-type \\\n  flex \\\n  --moe-flex-dispatcher-backend \\\n  deepep)\n",
            "A=(--moe-token-dispatcher-type \\\n  mok)\n",
        ),
        (
            "A=(\r\n  --num-experts 8\r\n  --moe-token-dispatcher-type flex\r\n  --moe-enable-deepep\r\n)\r\n",
            "A=(\r\n  --num-experts 8\r\n  --moe-token-dispatcher-type mok\r\n)\r\n",
        ),
        (
            'A="$A --moe-token-dispatcher-type ${D:-flex}"\n',
            'A="$A --moe-token-dispatcher-type ${D:-mok}"\n',
        ),
        (
            "D=flex\nif [ $D = flex ]; then X=1; fi\nrun --moe-token-dispatcher-type $D\n",
            "D=flex\nif [ $D = flex ]; then X=1; fi\nrun --moe-token-dispatcher-type mok\n",
        ),
        (
            'case $G in h100) D=alltoall;; *) D=flex;; esac\nrun --moe-token-dispatcher-type "${D}"\n',
            'case $G in h100) D=alltoall;; *) D=flex;; esac\nrun --moe-token-dispatcher-type "mok"\n',
        ),
        (
            ": ${D:=flex}\nrun --moe-token-dispatcher-type $D\n",
            ": ${D:=mok}\nrun --moe-token-dispatcher-type $D\n",
        ),
        (
            "f() {\n  USE_MNNVL=1\n}\nrun --moe-token-dispatcher-type flex\n",
            "f() {\n  :\n}\nrun --moe-token-dispatcher-type mok\n",
        ),
        (
            "true && export USE_MNNVL=1\nrun --moe-token-dispatcher-type flex\n",
            "true && :\nrun --moe-token-dispatcher-type mok\n",
        ),
        (
            "export A=1 USE_MNNVL=1 B=2\nrun --moe-token-dispatcher-type flex\n",
            "export A=1 B=2\nrun --moe-token-dispatcher-type mok\n",
        ),
        (
            "A=( --moe-enable-deepep  # c\n  --moe-token-dispatcher-type flex  # d\n  --moe-enable-deepep )\n",
            "A=( # c\n  --moe-token-dispatcher-type mok  # d\n  )\n",
        ),
        (
            "env USE_MNNVL=1 run --moe-token-dispatcher-type flex\n",
            "env run --moe-token-dispatcher-type mok\n",
        ),
    ],
)
def test_small_shell_forms(before: str, after: str) -> None:
    assert convert(before).text == after
    assert convert(after).text == after


@pytest.mark.parametrize(
    "quiet",
    [
        "# --moe-token-dispatcher-type flex\n",
        'echo "use --moe-token-dispatcher-type flex"\n',
        "cat <<EOF\n--moe-enable-deepep\nEOF\n",
        ": <<'EOF'\n--moe-token-dispatcher-type flex \"unbalanced\nEOF\n",
        'NOTE="we tried --moe-enable-deepep"\n',
        'if [[ "$*" == *--moe-enable-deepep* ]]; then exit 1; fi\n',
        "A='it''s'  # --moe-enable-deepep\n",
    ],
)
def test_mentions_that_reach_nobody_stay(quiet: str) -> None:
    conversion = convert(quiet + "run --moe-token-dispatcher-type flex\n")
    assert conversion.text == quiet + "run --moe-token-dispatcher-type mok\n"
    assert kinds(conversion, "left")


def test_prose_in_yaml_stays() -> None:
    text = 'note: "--moe-deepep-num-sms 24"\ndescription: was --moe-token-dispatcher-type flex\nnum_experts: 8\n'
    assert convert(text, "yaml").text == text + "moe_token_dispatcher_type: mok\n"


def test_a_variable_that_the_script_reads_stays() -> None:
    text = "export NVLINK_DOMAIN_SIZE=72\nN=$((NVLINK_DOMAIN_SIZE / 4)) M=$NVLINK_DOMAIN_SIZE\nrun --num-experts 8\n"
    conversion = convert(text)
    assert "export NVLINK_DOMAIN_SIZE=72\n" in conversion.text
    assert "NVLINK_DOMAIN_SIZE=72" in kinds(conversion, "left")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run --moe-token-dispatcher-type $1\n", "write the dispatcher type out"),
        ("run --moe-token-dispatcher-type $D\n", "does not set to a plain value"),
        ("for D in alltoall flex; do run --moe-token-dispatcher-type $D; done\n", "does not set to a plain value"),
        ("D=$(pick)\nrun --moe-token-dispatcher-type $D\n", "does not set to a plain value"),
        ("run --moe-token-dispatcher-type\n", "has no value beside it"),
        ("run --moe-token-dispatcher-type ring\n", "'ring' is not a dispatcher"),
        ("run --moe-enable-deepep=1 --num-experts 8\n", "takes no value"),
        ("sed -i 's/--moe-enable-deepep//' x.sh\nrun --num-experts 8\n", "does not understand"),
        ("x=$(python gen.py --moe-enable-deepep)\nrun --num-experts 8\n", "does not understand"),
        ("cat > args.txt <<EOF\n--moe-token-dispatcher-type flex\nEOF\n", "does not understand"),
        ("python - <<EOF\nargs = ['--moe-token-dispatcher-type', 'flex']\nEOF\n", "does not understand"),
        ("run model.moe_token_dispatcher_type=flex --num-experts 8\n", "does not understand"),
        ('run "--moe-token-dispatcher-type flex" --num-experts 8\n', "does not understand"),
        ("run 'open --moe-token-dispatcher-type flex\n", "never closed"),
        ("A=(--num-experts 8\n", "never closed"),
        ("cat <<EOF\n--num-experts 8\n", "never ends"),
        ("echo hello\n", "no Megatron MoE argument"),
        ("export USE_MNNVL=1\ntorchrun infer.py\n", "no Megatron MoE argument"),
        ("run --num-experts 8 \0\n", "not text"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_line(text: str, message: str) -> None:
    with pytest.raises(NotUnderstoodError, match=message):
        convert(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [b\n", "not valid YAML"),
        ("moe_token_dispatcher_type: ring\n", "expected one of"),
        ("moe_token_dispatcher_type: ${oc.env:D}\n", "write it out"),
        ("moe_token_dispatcher_type: [flex]\n", "write it out"),
        ("- moe_enable_deepep: true\n  num_experts: 8\n", "without moving its neighbours"),
        ("moe_enable_deepep: {a: 1}\n", "needs one plain value"),
        ("other: was --moe-token-dispatcher-type flex\nnum_experts: 8\n", "does not understand"),
        ("hidden_size: 8\n", "no Megatron MoE argument"),
    ],
)
def test_yaml_that_is_not_understood_is_refused(text: str, message: str) -> None:
    with pytest.raises(NotUnderstoodError, match=message):
        convert(text, "yaml")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("--moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity"),
        ("--fp8-format hybrid", "--fp8-format hybrid"),
        ("--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size 2"),
        ("--tensor-model-parallel-size 4", "--tensor-model-parallel-size 4 without --expert-tensor-parallel-size"),
        ("--expert-model-parallel-size 3", "--num-experts 8"),
        ("--squared-relu", "--squared-relu"),
        ("--moe-router-topk 17", "--moe-router-topk 17"),
        ("--activation-func-clamp-value 10", "--activation-func-clamp-value 10"),
        ("--moe-paged-stash-page-size 32", "--moe-paged-stash-page-size 32"),
        ("--transformer-impl inference_optimized", "--transformer-impl inference_optimized"),
    ],
)
def test_refused_settings_come_with_reason_and_remedy(text: str, what: str) -> None:
    for conversion in (
        convert(f"run --num-experts 8 --moe-token-dispatcher-type flex {text}\n"),
        convert(yaml_of(f"--num-experts 8 --moe-token-dispatcher-type flex {text}"), "yaml"),
    ):
        (finding,) = {finding.what: finding for finding in conversion.refused}.values()
        assert finding.what == what
        assert any(finding.why == f"{refusal.reason}. {refusal.remedy}" for refusal in REFUSALS)


def yaml_of(words: str) -> str:
    pairs = [pair.split() for pair in words.split("--")[1:]]
    return "".join(f"--{pair[0]}: {pair[1] if len(pair) > 1 else 'true'}\n" for pair in pairs)


@pytest.mark.parametrize("flag", ["--use-megatron-fsdp", "--save-tokens-per-expert-interval 100"])
def test_what_only_the_training_knows_is_refused(flag: str) -> None:
    conversion = convert(f"run --num-experts 8 --moe-token-dispatcher-type flex {flag}\n")
    assert kinds(conversion, "refused") == [flag.partition(" ")[0]]


@pytest.mark.parametrize(
    "text",
    [
        "--expert-tensor-parallel-size 1 --tensor-model-parallel-size 4",
        "--expert-model-parallel-size $EP --moe-router-topk 8",
        "--activation-func-clamp-value 10 --no-bias-swiglu-fusion",
        "--transformer-impl transformer_engine --swiglu --disable-bias-linear --bf16",
        "--moe-expert-capacity-factor 1.5 --moe-aux-loss-coeff 1e-4",
    ],
)
def test_what_mok_honours_is_not_refused(text: str) -> None:
    assert not convert(f"run --num-experts 8 --moe-token-dispatcher-type flex {text}\n").refused


def test_every_dropped_flag_is_one_that_mok_refuses() -> None:
    options = {refusal.option for refusal in REFUSALS}
    assert set(rules.DROPPED_FLAGS) <= options
    assert all(rules.why_dropped(flag) for flag in rules.DROPPED_FLAGS)


def test_verb_writes_only_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.sh"
    script.write_text("run --num-experts 8 --moe-token-dispatcher-type flex\n")
    script.chmod(0o750)
    original = script.read_text()
    assert main(["convert", str(script)]) == 0
    assert main(["convert", str(script), "--check"]) == 1
    assert script.read_text() == original
    assert "-run --num-experts 8 --moe-token-dispatcher-type flex" in capsys.readouterr().out

    output = tmp_path / "mok.sh"
    assert main(["convert", str(script), "--output", str(output)]) == 0
    assert output.stat().st_mode & 0o777 == 0o750
    assert main(["convert", str(output), "--check"]) == 0
    assert main(["convert", str(script), "--output", str(output)]) == 2
    assert "exists" in capsys.readouterr().err
    assert main(["convert", str(script), "--write"]) == 0
    assert script.read_text() == output.read_text() != original
    assert script.stat().st_mode & 0o777 == 0o750
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.sh", "mok.sh"]


def test_verb_refuses_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.sh"
    script.write_text("run --num-experts 8 --moe-token-dispatcher-type flex --fp8-format hybrid\n")
    original = script.read_text()
    for options in ([], ["--check"], ["--write"], ["--output", str(tmp_path / "out.sh")]):
        assert main(["convert", str(script), *options]) == 2
    assert script.read_text() == original and not (tmp_path / "out.sh").exists()
    assert "job.sh:1: refused --fp8-format hybrid: the experts run in bf16" in capsys.readouterr().err

    binary = tmp_path / "data.sh"
    binary.write_bytes(b"\xff\xfe")
    assert main(["convert", str(binary)]) == 2
    assert "not UTF-8 text (byte 0)" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "missing.sh")]) == 2
    (tmp_path / "notes.txt").write_text("hello")
    assert main(["convert", str(tmp_path / "notes.txt")]) == 2
