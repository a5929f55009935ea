#!/usr/bin/env bash
# One machine with 8 GPUs: plan once, look at the plan, train under it.
#
#   bash examples/node.sh
#   GPUS=2 CLUSTER=2xcpu MODEL=small STEPS=4 bash examples/node.sh     on two CPU ranks
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
GPUS=${GPUS:-8} CLUSTER=${CLUSTER:-8xH100-SXM} MODEL=${MODEL:-large} STEPS=${STEPS:-100}

autopar plan "$here/train_plan.py:$MODEL" --cluster "$CLUSTER" -o plan.json
torchrun --nproc-per-node "$GPUS" "$here/train_plan.py" --plan plan.json --model "$MODEL" --steps "$STEPS"
