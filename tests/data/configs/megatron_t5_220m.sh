#!/bin/bash
# What decides plan and model of examples/t5/train_t5_220m_distributed.sh (see SOURCES.md).
GPUS_PER_NODE=8
NUM_NODES=1
T5_ARGS="
    --encoder-num-layers 12 \
    --decoder-num-layers 12 \
    --hidden-size 768 \
    --num-attention-heads 12 \
    --kv-channels 64 \
    --ffn-hidden-size 3072 \
    --encoder-seq-length 512 \
    --decoder-seq-length 128 \
    --max-position-embeddings 512 \
    --micro-batch-size 64 \
    --global-batch-size 512 \
    --bf16 \
    --vocab-extra-ids 100 \
    --transformer-impl transformer_engine \
    --tensor-model-parallel-size 1 \
    --pipeline-model-parallel-size 1 \
"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NUM_NODES examples/pretrain_t5.py $T5_ARGS
