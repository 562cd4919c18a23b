#!/bin/bash
NVLINK_DOMAIN_SIZE=8 torchrun pretrain_gpt.py --swiglu --num-experts 8 --moe-router-topk 2 --bf16
