"""Megatron-LM's arguments: what those that a plan cannot hold mean, and other spellings.

Source: `megatron/training/arguments.py` of NVIDIA/Megatron-LM, and the configurations of NeMo.
"""

from __future__ import annotations

from collections.abc import Mapping

_OFFLOAD = (
    "moves state or activations to the host; plans keep everything on devices, so the step is"
    " priced, and must fit, without it"
)
_LATENT = "latent attention; give the model itself as MODEL"
MEANINGS: Mapping[str, str] = {
    "--cpu-offloading*": _OFFLOAD,
    "--optimizer-cpu-offload": _OFFLOAD,
    "--optimizer-offload-fraction": _OFFLOAD,
    "--fine-grained-activation-offloading": _OFFLOAD,
    "--offload-modules": _OFFLOAD,
    "--cpu-optimizer": _OFFLOAD,
    "--distribute-saved-activations": "tensor ranks keep a part each of what is saved; sequence"
    " parallelism (megatron_sp) does that",
    "--distribute-checkpointed-activations": "tensor ranks keep a part each of what is saved;"
    " sequence parallelism (megatron_sp) does that",
    "--partition-activations": "tensor ranks keep a part each of what is saved; sequence"
    " parallelism (megatron_sp) does that",
    "--rampup-batch-size": "the batch grows over the run; the plan is for its final size",
    "--tp-comm-overlap*": "hides tensor collectives in the products beside them; a step may be"
    " faster than predicted",
    "--ub-tp-comm-overlap": "hides tensor collectives in the products beside them; a step may be"
    " faster than predicted",
    "--standalone-embedding-stage": "the embedding is a stage of its own; name cuts (cuts=[...])",
    "--account-for-*-in-pipeline-split": "embedding or head count as a layer where stages are cut",
    "--pipeline-model-parallel-layout": "where stages are cut, layer by layer; stages of as many"
    " layers each are taken instead: name cuts (cuts=[...]) for others",
    "--num-distributed-optimizer-instances": "copies of the sharded optimizer over parts of the"
    " data ranks; one is taken: a mesh with axes replica and dp divides within dp only",
    "--hierarchical-context-parallel-sizes": "context parallelism in two levels; one ring is taken",
    "--expert-tensor-parallel-size": "tensor ranks of experts, apart from those of other layers",
    "--multi-latent-attention": _LATENT,
    "--q-lora-rank": _LATENT,
    "--kv-lora-rank": _LATENT,
    "--qk-head-dim": _LATENT,
    "--qk-pos-emb-head-dim": _LATENT,
    "--v-head-dim": _LATENT,
    "--mtp-num-layers": "heads that predict further tokens; give the model itself as MODEL",
    "--window-size": "sliding-window attention; whole attention is taken",
    "--moe-layer-freq": "which layers have experts; all of them are taken to",
    "--moe-expert-capacity-factor": "tokens beyond an expert's capacity are dropped; all are kept",
    "--overlap-moe-expert-parallel-comm": "hides the exchange of tokens between experts",
    "--use-torch-fsdp2": "FSDP2 instead of the distributed optimizer",
    "--embed-layernorm": "a norm behind the embedding; the model is taken without it",
    "--recompute-modules": "which parts are computed again; the core of attention is taken",
    "--external-cuda-graph": "kernels are launched from CUDA graphs",
    "--enable-cuda-graph": "kernels are launched from CUDA graphs",
    "--cuda-graph*": "kernels are launched from CUDA graphs",
    "--deepspeed-config": "a file of DeepSpeed's beside these arguments: check it by itself too",
    "--deepspeed-activation-checkpointing": "DeepSpeed's code for recomputation",
    "--pp-partition-method": "where DeepSpeed cuts stages",
    "--num-layers-at-start-in-bf16": "layers that do not run in fp8",
    "--num-layers-at-end-in-bf16": "layers that do not run in fp8",
    "--first-last-layers-bf16": "layers that do not run in fp8",
    "--fp8-param-gather": "weights are kept and gathered in 8 bits; plans keep 16",
    "--use-precision-aware-optimizer": "optimizer state in fewer bits; it is taken to be float32",
    "--exp-avg-dtype": "optimizer state in fewer bits; it is taken to be float32",
    "--exp-avg-sq-dtype": "optimizer state in fewer bits; it is taken to be float32",
    "--main-grads-dtype": "optimizer state in fewer bits; it is taken to be float32",
    "--main-params-dtype": "optimizer state in fewer bits; it is taken to be float32",
    "--decoupled-lr": "a learning rate of its own for embedding and head",
    "--decoupled-min-lr": "a learning rate of its own for embedding and head",
}
IRRELEVANT = (
    "--lr*", "--min-lr*", "--weight-decay*", "--adam-*", "--sgd-*", "--clip-grad", "--train-*",
    "--valid-*", "--test-*", "--data-*", "--split", "--vocab-file", "--merge-file", "--tokenizer*",
    "--tiktoken*", "--save*", "--load*", "--ckpt*", "--log-*", "--tensorboard*", "--wandb*",
    "--eval-*", "--exit-*", "--seed", "--init-method-*", "--no-load-*", "--no-save-*", "--master-*",
    "--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-*", "--num-workers", "--profile*",
    "--distributed-*", "--overlap-*", "--no-masked-softmax-fusion", "--bias-*", "--no-bias-*",
    "--attention-softmax-in-fp32", "--attention-backend", "--use-flash-attn*", "--manual-gc*",
    "--empty-unused-memory-level", "--no-gradient-accumulation-fusion", "--mock-data",
    "--use-mcore-models", "--use-legacy-models", "--transformer-impl", "--timing-*", "--fp8-*",
    "--fp8", "--initial-loss-scale", "--loss-scale*", "--hysteresis", "--make-vocab-size-*",
    "--max-position-embeddings", "--rotary-*", "--no-rope-fusion", "--use-rotary-*",
    "--norm-epsilon", "--layernorm-epsilon", "--apply-layernorm-1p", "--apply-query-key-*",
    "--no-query-key-*", "--dataloader-type", "--no-create-attention-*", "--no-mmap-*",
    "--override-opt*", "--use-checkpoint-*", "--use-dist-ckpt", "--auto-detect-*", "--async-save",
    "--dist-ckpt*", "--moe-router-*", "--moe-aux-*", "--moe-z-loss*", "--moe-token-dispatcher-*",
    "--moe-grouped-gemm", "--moe-permute-fusion", "--moe-per-layer-*", "--moe-pad-*",
    "--disable-msc*", "--result-*", "--local-rank", "--max-restarts", "--tee", "--job-name",
    "--DDP-impl", "--use-contiguous-*", "--no-contiguous-*", "--num-dataset-*", "--reset-*",
    "--eod-*", "--cross-entropy-*", "--calculate-per-token-loss", "--check-*", "--no-check-*",
    "--lazy-mpu-init", "--accumulate-allreduce-*", "--optimizer", "--start-weight-decay",
    "--end-weight-decay", "--use-gpu-initialization", "--use-cpu-initialization", "--no-persist-*",
    "--no-async-*", "--tp-comm-bootstrap*", "--use-tp-pp-dp-mapping", "--deepspeed",
    "--no-pipeline-parallel", "--kill-switch-path", "--abort-on-*", "--run-*", "--container-*",
    "--output", "--bert-no-binary-head", "--masked-softmax-*", "--sample-*", "--no-position-*",
    "--vocab-extra-ids", "--short-seq-*", "--mask-*", "--high-priority*", "--nccl-*", "--ddp-*",
    "--gradient-accumulation-*", "--cp-comm-type", "--te-rng-tracker", "--inference-*",
    "--sequence-parallel", "--jobid", "--wait", "--kill-on-bad-exit", "--rank", "--help",
    "--deterministic-mode", "--tensorboard", "--per-split-*", "--dataset*", "--prompt-*",
    "--curriculum-*", "--hybrid-*", "--synchronize-*", "--memory-*", "--record-memory-*",
    "--module", "--nodes", "--ntasks-per-node", "--gres", "--time", "--partition", "--account",
)  # fmt: skip
NEMO: Mapping[str, str] = {
    "encoder_seq_length": "--seq-length", "seq_length": "--seq-length",
    "num_attention_heads": "--num-attention-heads", "num_layers": "--num-layers",
    "hidden_size": "--hidden-size", "ffn_hidden_size": "--ffn-hidden-size",
    "num_query_groups": "--num-query-groups", "kv_channels": "--kv-channels",
    "max_position_embeddings": "--max-position-embeddings",
    "micro_batch_size": "--micro-batch-size", "global_batch_size": "--global-batch-size",
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "sequence_parallel": "--sequence-parallel",
    "activations_checkpoint_granularity": "--recompute-granularity",
    "activations_checkpoint_method": "--recompute-method",
    "activations_checkpoint_num_layers": "--recompute-num-layers",
    "hidden_dropout": "--hidden-dropout", "attention_dropout": "--attention-dropout",
    "normalization": "--normalization", "position_embedding_type": "--position-embedding-type",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by", "fp8": "--fp8-format",
    "rampup_batch_size": "--rampup-batch-size", "ub_tp_comm_overlap": "--ub-tp-comm-overlap",
    "num_moe_experts": "--num-experts", "moe_router_topk": "--moe-router-topk",
    "moe_ffn_hidden_size": "--moe-ffn-hidden-size", "vocab_size": "--vocab-size",
    "cpu_offloading": "--cpu-offloading",
    "cpu_offloading_num_layers": "--cpu-offloading-num-layers",
}  # fmt: skip
"""Keys of NeMo's ``model`` section, and Megatron's arguments of the same meaning."""
