# What decides plan and model of examples/pretrain_gpt3_175B.sh (see SOURCES.md).
#SBATCH --nodes=128 --ntasks-per-node=8
DATASET="0.2 ${DATASET_1} 0.3 ${DATASET_2}"
options=" \
	--tensor-model-parallel-size 8 \
	--pipeline-model-parallel-size 16 \
	--num-layers 96 \
	--hidden-size 12288 \
	--num-attention-heads 96 \
	--seq-length 2048 \
	--max-position-embeddings 2048 \
	--micro-batch-size 1 \
	--global-batch-size 1536 \
	--rampup-batch-size 16 16 5859375 \
	--data-path ${DATASET} \
	--lr 6.0e-5 \
	--fp16 \
	--checkpoint-activations "
run_cmd="python -u pretrain_gpt.py $@ ${options}"
