#!/bin/bash
GPU=${GPU:-h100}
DISPATCHER=${DISPATCHER:-alltoall}
RUN=runs/glm-$DISPATCHER

EXTRA=""
if [ "$GPU" = gb200 ]; then
    export USE_MNNVL=1
    export NVLINK_DOMAIN_SIZE=72
else
    echo "no MNNVL: --moe-token-dispatcher-type $DISPATCHER"
fi

if [ "${OVERLAP:-0}" -eq 1 ]; then
    EXTRA="$EXTRA --overlap-moe-expert-parallel-comm --delay-wgrad-compute"
    EXTRA+=" --overlap-grad-reduce"
fi

OPTIONS=" \
    --num-experts 160 \
    --moe-router-topk 8 \
    --moe-token-dispatcher-type $DISPATCHER \
    --swiglu \
"

CMD="torchrun --nproc_per_node 8 pretrain_gpt.py $OPTIONS $EXTRA --save $RUN"
echo "$CMD"
eval "$CMD"
