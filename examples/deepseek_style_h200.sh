#!/usr/bin/env bash
# Pretrain a DeepSeek-style model of 2.3 billion parameters on one H200: latent attention, 64 experts of which 6 serve a
# token, a sigmoid router with expert bias, a shared expert, multi-token prediction. Needs Transformer Engine.
#
#   examples/deepseek_style_h200.sh CORPUS [MEGATRON ARGUMENT ...]
#
# CORPUS is a folder that scripts/prepare_corpus.py wrote. Further arguments go to Megatron last, and so win, e.g.
# `--save FOLDER --save-interval 500` or `--seed 4321`. Variables, with what they are by default:
#   DISPATCHER=mok    or alltoall, with everything else the same
#   GPUS=1            GPUs of this node, one expert-parallel group
#   STEPS=1000        iterations; each takes 4 sequences of 2048 tokens per GPU
#   LAYERS=7          the first is dense, the others are MoE layers; multi-token prediction adds one more
#   PROGRAM           what torchrun runs: examples/pretrain_gpt.py
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${1:?usage: $0 CORPUS [MEGATRON ARGUMENT ...]}"
corpus=$(cd "$1" && pwd)
shift
gpus=${GPUS:-1}
layers=${LAYERS:-7}
steps=${STEPS:-1000}
read -ra program <<<"${PROGRAM:-$root/examples/pretrain_gpt.py}"

export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 CUBLAS_WORKSPACE_CONFIG=:4096:8 # two runs are the same, to the last bit
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

model=(
  --transformer-impl transformer_engine --bf16
  --num-layers "$layers" --hidden-size 2048 --ffn-hidden-size 6144 --max-position-embeddings 2048
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
  --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.01
)
attention=(
  --multi-latent-attention --qk-layernorm --num-attention-heads 16 --kv-channels 128
  --q-lora-rank 768 --kv-lora-rank 512 --qk-head-dim 64 --qk-pos-emb-head-dim 64 --v-head-dim 128
  --position-embedding-type rope --rope-type rope --no-rope-fusion
)
experts=(
  --moe-token-dispatcher-type "${DISPATCHER:-mok}" --moe-grouped-gemm --moe-permute-fusion
  --expert-model-parallel-size "$gpus" --num-experts 64
  --moe-layer-freq "([0]+[1]*$((layers - 1)))" --moe-ffn-hidden-size 768
  --moe-shared-expert-intermediate-size 768
  --moe-router-topk 6 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
)
prediction=(--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3)
data=(
  --data-path "$corpus/corpus" --data-cache-path "$corpus/cache" --split 99,1,0
  --tokenizer-type TikTokenizer --tokenizer-model "$corpus/tokenizer/bytes.json"
  --tiktoken-pattern v2 --tiktoken-num-special-tokens 8 --vocab-size 264 --make-vocab-size-divisible-by 8
  --seq-length 2048 --no-create-attention-mask-in-dataloader
)
training=(
  --micro-batch-size 4 --global-batch-size "$((4 * gpus))" --train-iters "$steps" --seed 1234
  --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters "$((steps / 20))"
  --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
  --use-distributed-optimizer --eval-iters 0 --eval-interval "$steps" --log-interval 10
)
# Megatron's output layer adds its gradient to main_grad by Apex's extension; without Apex, nothing may ask for that.
python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None)' ||
  training+=(--no-gradient-accumulation-fusion)

exec torchrun --standalone --nproc-per-node "$gpus" "${program[@]}" \
  "${model[@]}" "${attention[@]}" "${experts[@]}" "${prediction[@]}" "${data[@]}" "${training[@]}" "$@"
