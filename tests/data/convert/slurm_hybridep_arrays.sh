#!/bin/bash
#SBATCH --job-name=dsv3-64
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=4
#SBATCH --segment=16

# DeepSeek-V3 on one NVL72 rack. HybridEP: --moe-flex-dispatcher-backend hybridep
set -euo pipefail

export CUDA_DEVICE_MAX_CONNECTIONS=1
export NVTE_FWD_LAYERNORM_SM_MARGIN=16
export NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=64   # EP 64
export NVLINK_DOMAIN_SIZE=72
export USE_MNNVL=1

TP=${TP:-1}
EP=64
OUTPUT=${OUTPUT:-/lustre/runs}

MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --multi-latent-attention
)

MOE_ARGS=(
    --num-experts 256
    --moe-layer-freq '([0]*3+[1]*58)'
    --moe-router-topk 8

    # dispatcher
    --moe-token-dispatcher-type flex      # see the README
    --moe-flex-dispatcher-backend hybridep
    --moe-hybridep-num-sms 32             # tuned on GB200
    --moe-grouped-gemm
    --moe-permute-fusion
    --expert-model-parallel-size "$EP"
)

srun --container-image=img.sqsh torchrun --nproc-per-node 4 pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" \
    --tensor-model-parallel-size $TP \
    --save "$OUTPUT/ckpt" --bf16
