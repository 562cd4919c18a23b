#!/usr/bin/env bash
GPUS_PER_NODE=8
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes 2"

# old spelling of DeepEP
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \
       --num-layers 48 \
       --num-experts 128 \
       --expert-model-parallel-size 8 \
       --moe-token-dispatcher-type=flex \
       --moe-enable-deepep \
       --moe-shared-expert-overlap \
       --moe-grouped-gemm \
       --bf16 \
       --moe-deepep-num-sms \
           20
