#!/bin/bash
cat <<USAGE
usage: submit.sh [--moe-token-dispatcher-type flex]
USAGE
sbatch <<'JOB'
#!/bin/bash
#SBATCH -N 1
# --moe-enable-deepep was here
export USE_MNNVL=1; export NCCL_DEBUG=WARN
torchrun pretrain_gpt.py --num-experts 8 --moe-token-dispatcher-type alltoall --moe-enable-deepep --bf16
JOB
