#!/usr/bin/env bash
# Train the DeepSeek-style model on one H200 as docs/benchmarks/real-run-h200.md tells, and record every run.
#
#   scripts/real_run.sh CORPUS FOLDER [RUN ...]
#
# CORPUS is a folder that scripts/prepare_corpus.py wrote; FOLDER/RUN.json is written, which scripts/real_run.py reads.
# RUN is mok, alltoall, alltoall-other-seed, alltoall-noise-1, alltoall-noise-2, mok-stopped, mok-resumed or mok-again;
# without one, all but the last, in this order. mok-resumed continues what mok-stopped left in FOLDER/checkpoint, about
# 32 GB. Variables are those of examples/deepseek_style_h200.sh, and
#   STEPS=1000        iterations of a whole run
#   EXTRA             arguments that Megatron gets in every run
set -euo pipefail
: "${2:?usage: $0 CORPUS FOLDER [RUN ...]}"
corpus=$(cd "$1" && pwd)
mkdir -p "$2"
folder=$(cd "$2" && pwd)
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ $folder != *[[:space:]]* ]] || { echo "$0: the folder's path must be without spaces, got '$folder'" >&2 && exit 2; }
runs=("$@")
((${#runs[@]})) ||
  runs=(mok alltoall alltoall-other-seed alltoall-noise-1 alltoall-noise-2 mok-stopped mok-resumed)
export STEPS=${STEPS:-1000}
stop=$((STEPS * 15 / 100)) end=$((STEPS * 30 / 100)) middle=$((STEPS / 2))
checkpoint=$folder/checkpoint
read -rd '' -a extra <<<"${EXTRA:-}" || true
measure="--time $middle:$((middle + 49)) --profile $((STEPS - 2)):$STEPS"

# record NAME DISPATCHER OPTIONS_OF_RECORD_RUN [MEGATRON ARGUMENT ...]
record() {
  echo "real run: $1"
  PROGRAM="scripts/record_run.py $3 $folder/$1.json examples/pretrain_gpt.py" DISPATCHER=$2 \
    examples/deepseek_style_h200.sh "$corpus" "${extra[@]}" "${@:4}"
}

for run in "${runs[@]}"; do
  case $run in
    mok) record "$run" mok "$measure --digests $stop,$end,$STEPS" ;;
    mok-again) record "$run" mok "--digests $STEPS" ;;
    alltoall) record "$run" alltoall "$measure" ;;
    alltoall-other-seed) record "$run" alltoall "" --seed 4321 ;;
    alltoall-noise-[12]) record "$run" alltoall "--noise ${run##*-}" ;;
    mok-stopped) record "$run" mok "--digests $stop" --save "$checkpoint" --save-interval "$stop" --exit-interval "$stop" ;;
    mok-resumed) record "$run" mok "--digests $end" --load "$checkpoint" --exit-interval "$end" ;;
    *) echo "$0: there is no run $run; see its first lines" >&2 && exit 2 ;;
  esac
done
