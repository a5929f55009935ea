"""Bytes that a rank of a published job holds: what stays, what peaks, what the device shows.

What stays after a step is arithmetic on parameters (arXiv 1910.02054, section 3). What peaks adds
the activations that the graph saves, once per microbatch in flight (2205.05198, section 4), and
what the loss needs. Each kind of measurement is its own quantity: tensors in use, what the
allocator holds, what the device shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.published.features import Activations, activations_of
from autopar.cost_models.published.jobs import Job

WORKSPACE_BYTES = 98 * 2**20
"""Workspaces that stay allocated: those of cuBLAS, 32 MiB a stream, and of attention."""
MESSAGE_BYTES = 12 * 2**20
"""Messages between stages that stay allocated."""
GROUPED_BYTES = 128 * 2**20
"""Workspaces of the four streams on which Transformer Engine runs grouped products."""
LOGIT_BYTES = {"eager": 12.0, "fused": 4.0, "vocab_parallel": 6.0, "compiled_vocab_parallel": 10.0}
"""Bytes per logit at the peak of the loss, by kernel: 16-bit logits, float32 logits and what of
softmax and gradient is not written over them."""
SPLIT_LOGIT_BYTES = 16.0
"""The same of torch's ``loss_parallel`` over tensor ranks: its backward holds log-probabilities,
their gradient, probabilities and the sum of both, all in float32."""
LEFT_LOGIT_BYTES = 2.0
"""16-bit logits of the eager loss are freed before its backward, whose tensors are of 32 bits and
have no use for their segment: it is held besides."""
ADAM_BYTES = 12.0
"""Float32 master weight and two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the rank that holds most, by what they are.

    Attributes:
        weights_bytes: Parameters.
        gradients_bytes: Gradients.
        optimizer_bytes: Optimizer state and master weights.
        workspace_bytes: Workspaces that stay allocated.
        activations_bytes: Saved for backward, all microbatches in flight.
        transient_bytes: What backward needs beside them: the loss, or one block computed again.
        reserve_bytes: What the allocator holds and no tensor uses.
        context_bytes: CUDA context, libraries, communication buffers.
    """

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    workspace_bytes: float
    activations_bytes: float
    transient_bytes: float
    reserve_bytes: float
    context_bytes: float

    @property
    def static_bytes(self) -> float:
        """What is allocated between steps."""
        return (
            self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.workspace_bytes
        )

    @property
    def peak_allocated_bytes(self) -> float:
        """Most bytes that tensors use."""
        return self.static_bytes + self.activations_bytes + self.transient_bytes

    @property
    def peak_reserved_bytes(self) -> float:
        """Most bytes that the allocator holds."""
        return self.peak_allocated_bytes + self.reserve_bytes

    @property
    def peak_device_bytes(self) -> float:
        """Most bytes of the device in use."""
        return self.peak_reserved_bytes + self.context_bytes


def rank_params(job: Job, stage: int) -> tuple[float, float]:
    """Parameters of a rank of a pipeline stage, and those of its experts."""
    config, tp = job.config, job.tp
    layers = sum(job.stage_layers[stage :: job.pp])
    ups = 2 if config.gated else 1
    keys = config.kv_heads * config.head_dim
    wide = config.heads * config.head_dim + 2 * keys
    attention = config.hidden * (wide + config.heads * config.head_dim) / tp
    attention += (wide / tp if config.qkv_bias else 0) + (config.hidden if config.bias else 0)
    block, experts = 2 * config.norm_params + attention, 0.0
    if config.experts:
        one = (ups + 1) * config.hidden * config.expert_ffn
        experts = layers * config.experts / job.ep * one / job.expert_tp
        block += config.hidden * config.experts
        block += (ups + 1) * config.hidden * config.shared_ffn / tp
    else:
        block += (ups + 1) * config.hidden * config.ffn / tp
        block += ups * config.ffn / tp + config.hidden if config.bias else 0
    rest = layers * block
    if stage == 0:
        rest += config.vocab * config.hidden / tp
        rest += config.context * config.hidden if config.positions == "learned" else 0
    if stage == job.pp - 1:
        rest += config.norm_params
        if stage > 0 or not config.tied:
            rest += config.vocab * config.hidden / tp
    return rest, experts


def stage_memory(job: Job, stage: int, *, peak: bool = True) -> Memory:
    """Memory of a rank of a pipeline stage.

    Args:
        job: The job.
        stage: The pipeline rank.
        peak: Whether activations are wanted; they need a trace.
    """
    rest, experts = rank_params(job, stage)
    ranks = job.zero_group or job.dp * job.cp // job.optimizer_copies
    expert_ranks = max(1.0, job.dp * job.cp * job.tp / (job.ep * job.expert_tp))
    expert_ranks = max(1.0, expert_ranks / job.optimizer_copies)

    def total(width: float, stage_of_zero: int) -> float:
        split = job.zero >= stage_of_zero
        return width * (rest / (ranks if split else 1) + experts / (expert_ranks if split else 1))

    whole = job.dtype == "tf32"
    weight, gradient = 4 if whole else 2, float(job.stack.gradient_bytes)
    if job.gradient_copy:
        gradient = 2.0
    state = 8.0 if whole else ADAM_BYTES
    if job.zero == 3 and not job.stack.master_weights:
        weight, gradient, state = 4, 4.0, 8.0
    copy = total(4.0, 1) if job.gradient_copy else 0.0
    if job.wide_gradients:  # 16-bit gradients and their buffer beside the float32 sums
        copy += total(4.0, 2)
    saved, transient, left = _activations(job, stage) if peak else (0.0, 0.0, 0.0)
    workspace = WORKSPACE_BYTES + (MESSAGE_BYTES if job.pp > 1 else 0)
    workspace += GROUPED_BYTES if job.grouped else 0
    held = Memory(
        weights_bytes=total(weight, 3), gradients_bytes=total(gradient, 2) + copy,
        optimizer_bytes=total(state, 1), workspace_bytes=workspace, activations_bytes=saved,
        transient_bytes=transient, reserve_bytes=0.0,
        context_bytes=job.stack.context_bytes,
    )  # fmt: skip
    reserve = (job.stack.reserved_factor - 1) * held.peak_allocated_bytes
    return Memory(
        **{name: getattr(held, name) for name in held.__slots__ if name != "reserve_bytes"},
        reserve_bytes=reserve + left + job.stack.bucket_bytes,
    )


def _activations(job: Job, stage: int) -> tuple[float, float, float]:
    """Bytes around the peak.

    Returns:
        What is saved of all microbatches in flight, what the peak adds to it, and what is free then
        in pieces that are too small for the logits.
    """
    config, found = job.config, activations_of(job)
    layers = sum(job.stage_layers[stage :: job.pp])
    flight = float(min(job.pp - stage, job.microbatches))
    if job.chunks > 1:  # warm-up of the interleaved schedule, in chunks (2104.04473, 2.2)
        warm = 2 * (job.pp - stage - 1) + (job.chunks - 1) * job.pp + 1
        flight = min(warm / job.chunks, float(job.microbatches))
    block, again = _block(job, found)
    first = found.first if stage == 0 else 0.0
    saved = flight * (layers * block + first)
    transient, left = again, 0.0
    if stage == job.pp - 1:
        logits, unused = _logits(job)
        saved += 2 * found.inputs
        transient = max(transient, logits)
        # Blocks ran before the logits: what they needed for a time is cached in their sizes.
        left = unused + min(again, logits)
    if job.zero == 3:
        transient += 2 * 2 * config.block_params(bool(config.experts)) / job.tp
        if not job.stack.master_weights:  # FSDP's root keeps what it has gathered for its forward
            transient += 2 * config.vocab * config.hidden / job.tp * (1 if config.tied else 2)
    return saved, transient, left


def _logits(job: Job) -> tuple[float, float]:
    """Bytes of the loss at its peak, and those of freed tensors that are of no use to it."""
    loss, tokens = job.stack.loss, job.micro_batch * (job.seq // job.cp)
    count = tokens * job.config.vocab / job.tp
    width = LOGIT_BYTES[loss]
    if loss == "eager" and job.tp > 1:
        width = SPLIT_LOGIT_BYTES
    width *= 2 if job.dtype == "tf32" and loss == "fused" else 1
    return count * width, count * (LEFT_LOGIT_BYTES if loss == "eager" else 0.0)


def _block(job: Job, found: Activations) -> tuple[float, float]:
    """Bytes that one block keeps, and what computing it again needs for a time."""
    if job.recompute == "full":
        kept = found.inputs * job.recompute_share + found.block * (1 - job.recompute_share)
        return kept, found.block
    if job.recompute == "attention":
        return found.block - found.scores, found.scores
    if job.recompute == "ops":
        kept = per_op_kept(job)
        return kept, max(0.0, found.block - kept)
    return found.block, 0.0


def per_op_kept(job: Job) -> float:
    """Bytes of a block that torch's per-op checkpointing keeps.

    Its input, what attention gives, and the results of every second product, the first among them.
    """
    config = job.config
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    wide = [queries + 2 * keys] if config.fused_qkv else [queries, keys, keys]
    inner = [2 * config.ffn] if config.fused_gate else [config.ffn] * (2 if config.gated else 1)
    results = [*wide, config.hidden, *inner, config.hidden]
    split = config.hidden / (job.tp if job.sequence_parallel else 1)
    kept = split + queries / job.tp
    for size in results[::2]:
        kept += split if size == config.hidden else size / job.tp
    return job.micro_batch * (job.seq // job.cp) * kept * (4 if job.dtype == "tf32" else 2)


def worst_memory(job: Job) -> Memory:
    """Memory of the rank that shows most on its device."""
    return max(
        (stage_memory(job, stage) for stage in range(job.pp)),
        key=lambda found: found.peak_device_bytes,
    )
