#!/bin/bash
#SBATCH -N 8
ARGS=("--num-experts" "64" "--moe-token-dispatcher-type" "flex" "--moe-flex-dispatcher-backend" "ncclep")
ARGS+=(--moe-ncclep-zero-copy --moe-ncclep-static-shape)
ARGS+=( --swiglu )

srun bash -c "
    export USE_IB=1   # unrelated
    python pretrain_gpt.py ${ARGS[*]} \
        --moe-flex-dispatcher-num-sms 24 \
        --bf16
"
