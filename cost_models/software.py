"""Software stacks: what of a framework decides speed and memory, beside the plan.

Kernels and defaults are facts about a release and are stated, not fitted. What is left, at most
four constants a stack, is fitted on published rows; each has a prior, a range in which it stays
plausible, and a meaning:

=================  ==============================================================================
time_factor        measured over modelled seconds of computation: what the stack's kernels and
                   its host code add to those of the model
overlap            share of the computation beside which data-parallel collectives can hide
element_factor     bytes that pointwise kernels move over those that the graph implies: what is
                   fused less, or more, than the model takes it to be
reserved_factor    what its allocator holds over what its tensors need
=================  ==============================================================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from autopar.cost_models.implementation import Implementation
from autopar.errors import InputError, meant

if TYPE_CHECKING:
    from autopar.cost_models.compute import Generation

AttentionKernel = Literal["unfused", "flash1", "flash2", "flash3"]
LossKernel = Literal["eager", "fused", "vocab_parallel", "compiled_vocab_parallel"]
SLOWDOWN = 0.2
"""Seconds that computation loses per second of a collective beside it: NCCL's 16 to 24 channels
take as many of 108 or 132 multiprocessors."""
HIDDEN_TENSOR = 0.5
"""What asynchronous tensor parallelism leaves of the time of its collectives: the first of the
parts in which a product is done (torch's ``_symmetric_memory``), and what they slow down."""
STEP_S = 15e-3
"""Work of the host once per step: optimizer loop, logging, data."""
UPDATE_BYTES = 30.0
"""Bytes that a fused Adam moves per parameter: float32 weight, gradient and two moments are read,
all but the gradient written, and the weight once more in 16 bits."""
CLIPPED_BYTES = UPDATE_BYTES + 12
"""The same after gradients are clipped to a norm: they are read for it, then read and written."""
MIXED_BYTES = UPDATE_BYTES + 30
"""The same in Megatron's mixed precision: before, gradients are copied to float32 (6), unscaled and
checked (8), read for their norm (4) and clipped (8); after, float32 weights are read again (4)."""
ACCUMULATE_BYTES = 6
"""Bytes per parameter to add a gradient in 16 bits to that of the microbatches before."""
WIDE_ACCUMULATE_BYTES = 18
"""The same where the sum is in float32: the gradient is cast (6), then added (12)."""
FLATTEN_BYTES = 12
"""Bytes per parameter to copy gradients in 16 bits into a buffer, divide it by the ranks, and copy
what was summed back."""
EAGER_ELEMENTS = 1.2
"""Prior of `SoftwareStack.element_factor` where pointwise ops run one by one: casts, sums and parts
of gates that compilers and fused kernels leave out."""
FITTED = Path(__file__).parent / "published" / "fitted.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number that a fit may move.

    Attributes:
        prior: Value when nothing is known.
        spread: Standard deviation of the logarithm that the prior allows.
        low: Smallest plausible value.
        high: Largest plausible value.
        meaning: What it is.
    """

    prior: float
    spread: float
    low: float
    high: float
    meaning: str


CONSTANTS: Mapping[str, Constant] = MappingProxyType({
    "time_factor": Constant(
        prior=1.0, spread=0.05, low=0.85, high=1.3,
        meaning="measured over modelled seconds of computation",
    ),
    "overlap": Constant(
        prior=0.75, spread=0.3, low=0.05, high=1.0,
        meaning="share of computation beside which data-parallel collectives can hide",
    ),
    "element_factor": Constant(
        prior=1.0, spread=0.3, low=0.5, high=2.5,
        meaning="bytes moved by pointwise kernels over those of the graph",
    ),
    "reserved_factor": Constant(
        prior=1.08, spread=0.05, low=1.0, high=1.35,
        meaning="bytes the allocator holds over bytes of live tensors",
    ),
})  # fmt: skip
"""The constants that are fitted per stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareStack:
    """A training framework at about one time of its history.

    Attributes:
        name: Its name.
        attention: Attention kernel.
        hopper_attention: The one that it prefers on Hopper, if another.
        loss: Cross-entropy kernel: ``eager`` makes float32 logits and their gradient, ``fused``
            works in place, ``vocab_parallel`` splits the vocabulary over tensor ranks, and its
            compiled form keeps more of it.
        compiled: Whether pointwise ops are fused by a compiler.
        fused_qkv: Whether queries, keys and values are one product.
        fused_gate: Whether both halves of SwiGLU are one product.
        fused_dropout_add: Whether the dropout of a block and the sum after it are one kernel.
        softmax_keys: Keys up to which Megatron's fused softmax of scores is used where its other
            limits are met (``fused_softmax.py``): 16-bit numbers, more than 16 keys, a multiple of
            four of queries, and of sequences times local heads; 0 where the softmax is another.
        separate_bias: Whether a product's bias is added by a kernel of its own.
        tensor_copies: Whether what tensor ranks need no collective for is copied instead: the input
            of a column parallel product, and the gradient of what a row parallel one gives.
        fused_rotary: Whether queries and keys are rotated in place, by a kernel each.
        wide_norms: Whether norms take float32, to which their input is cast.
        norms_again: Whether norms run again in backward where blocks do not.
        hidden_sums: Whether sums of gradients over tensor ranks run beside the products that make
            gradients of weights, as far as those last.
        blocking: Whether the host waits for every kernel before it launches the next; a setting of
            a run (CUDA_LAUNCH_BLOCKING), not of a framework.
        fused_norm: Whether an RMS norm is one kernel where nothing is compiled.
        balanced: Whether tokens go to experts evenly, whatever the router says (benchmarks).
        regather: Whether what sequence parallelism gathers is gathered again in backward, not kept.
        scatter_messages: Whether tensor ranks that hold the same activation send a part each to the
            next stage, where it is gathered (arXiv 2104.04473, 4.1), instead of all of it.
        low_gather: Whether sharded weights, and activations over tensor ranks, are cast before they
            are gathered where products are in fp8.
        dropout: Whether models train with dropout (random numbers, masks).
        master_weights: Whether sharded weights are in 16 bits beside float32 ones of the optimizer;
            FSDP shards float32 weights, and casts what it gathers.
        gradient_bytes: Bytes of an element of a gradient as data-parallel ranks sum it.
        update_bytes: Bytes that an update moves per parameter.
        accumulate_bytes: Bytes per parameter to add a microbatch's gradient to those before; none
            where the product that makes it adds it.
        flatten_bytes: Bytes per parameter to copy gradients to where they are summed, and back.
        shard_copies: Whether gathered weights are copied out of the buffer of the collective, and
            gradients into one, beside computation: weights sharded one by one.
        rooted_reduce: Whether ZeRO-2 sums each gradient at the rank that updates it while
            computation waits, having scaled it, and clears it after.
        eager_ring: Whether context ranks exchange keys and values of every query head, and join
            their parts of attention in float32 by kernels of their own.
        context_bytes: Memory outside of the allocator: CUDA context, libraries, NCCL buffers.
        bucket_bytes: Buffers in which gradients are gathered to be reduced.
        time_factor: See the module.
        overlap: See the module.
        element_factor: See the module.
        reserved_factor: See the module.
        fitted: Which of the constants a fit may move.
        overlapped_tensor: Whether tensor collectives are hidden in the products beside them.
        step_s: Work of the host once per step.
        launch_s: Time of the host per kernel, if another than the device's with other stacks.
        local_ends: Whether each tensor rank embeds, and has a loss, over its part of the vocabulary
            as if that were all: no collectives, and no padding.
        early_stop: Whether a block that is run again ends with the last value that backward needs,
            so that its last product is left out (torch.utils.checkpoint without re-entrance, 2.1).
        like: Stack whose fitted constants it takes, having no rows of its own.
        source: Where the facts are from.
    """

    name: str
    attention: AttentionKernel = "flash2"
    hopper_attention: AttentionKernel | None = None
    loss: LossKernel = "eager"
    compiled: bool = False
    fused_qkv: bool = False
    fused_gate: bool = False
    fused_dropout_add: bool = False
    softmax_keys: int = 0
    separate_bias: bool = False
    tensor_copies: bool = False
    fused_rotary: bool = False
    wide_norms: bool = False
    norms_again: bool = False
    hidden_sums: bool = False
    blocking: bool = False
    fused_norm: bool = True
    balanced: bool = False
    regather: bool = False
    scatter_messages: bool = True
    low_gather: bool = False
    dropout: bool = False
    master_weights: bool = True
    gradient_bytes: int = 2
    update_bytes: float = UPDATE_BYTES
    accumulate_bytes: float = 0.0
    flatten_bytes: float = 0.0
    shard_copies: bool = False
    rooted_reduce: bool = False
    eager_ring: bool = False
    context_bytes: int = 1_500_000_000
    bucket_bytes: int = 0
    time_factor: float = CONSTANTS["time_factor"].prior
    overlap: float = CONSTANTS["overlap"].prior
    element_factor: float = CONSTANTS["element_factor"].prior
    reserved_factor: float = CONSTANTS["reserved_factor"].prior
    fitted: tuple[str, ...] = tuple(CONSTANTS)
    overlapped_tensor: bool = False
    step_s: float = STEP_S
    launch_s: float | None = None
    local_ends: bool = False
    early_stop: bool = False
    like: str = ""
    source: str

    def constants(self) -> dict[str, float]:
        """The fitted constants by name."""
        return {name: getattr(self, name) for name in CONSTANTS}


_STACKS = (
    SoftwareStack(
        name="autopar", attention="flash2", loss="eager", compiled=True, scatter_messages=False,
        source="this package: programs compiled per stage, buckets overlapped with backward",
    ),
    SoftwareStack(
        name="megatron-deepspeed", attention="unfused", loss="vocab_parallel",
        fused_qkv=True, fused_gate=True, softmax_keys=2048,
        dropout=True, fused_dropout_add=True, bucket_bytes=1_000_000_000, overlap=0.0,
        update_bytes=MIXED_BYTES, accumulate_bytes=ACCUMULATE_BYTES, flatten_bytes=FLATTEN_BYTES,
        fitted=("time_factor", "element_factor", "reserved_factor"),
        source="microsoft/Megatron-DeepSpeed 2021-22 with Megatron's schedules: fused softmax, "
        "bias-gelu and bias-dropout-add; gradients are summed after backward",
    ),
    SoftwareStack(
        name="vtrain", attention="unfused", loss="eager", fused_qkv=True, dropout=True,
        fused_dropout_add=True, softmax_keys=2048, overlap=0.0,
        fitted=(), like="megatron-deepspeed",
        step_s=0.0, launch_s=60e-6, local_ends=True,
        source="VIA-Research/vTrain f8dda84, src/predictor.py and src/model: steps composed from "
        "the kernels and gaps that one device traced for a model of one block, layer after layer; "
        "launch_s, which the tracing is part of, fitted on 720 rows of vtrain-single",
    ),
    SoftwareStack(
        name="deepspeed-pipeline", attention="unfused", loss="vocab_parallel",
        fused_qkv=True, fused_gate=True, softmax_keys=2048,
        dropout=True, fused_dropout_add=True, bucket_bytes=2_000_000_000,
        context_bytes=3_000_000_000, overlap=0.0,
        update_bytes=MIXED_BYTES, accumulate_bytes=ACCUMULATE_BYTES, flatten_bytes=FLATTEN_BYTES,
        fitted=("time_factor", "element_factor", "reserved_factor"),
        source="the same with DeepSpeed's pipeline engine and ZeRO-1 (BLOOM): gradients are summed "
        "after backward",
    ),
    SoftwareStack(
        name="llm-foundry", attention="flash1", loss="fused", fused_qkv=True, master_weights=False,
        update_bytes=CLIPPED_BYTES, element_factor=EAGER_ELEMENTS,
        source="mosaicml/llm-foundry 2023: flash or Triton attention, fused cross entropy",
    ),
    SoftwareStack(
        name="mcore", attention="flash2", hopper_attention="flash3", loss="vocab_parallel",
        fused_qkv=True, fused_gate=True, fused_rotary=True, update_bytes=CLIPPED_BYTES,
        gradient_bytes=4, context_bytes=3_000_000_000,
        source="NVIDIA/Megatron-LM core 0.5 and later with Transformer Engine, which prefers the "
        "fused attention of cuDNN on compute capability 9.0; rotary embeddings in kernels of their "
        "own unless --no-rope-fusion; NeMo, FlagScale",
    ),
    SoftwareStack(
        name="nemo", attention="flash3", loss="vocab_parallel",
        fused_qkv=True, fused_gate=True, fused_rotary=True, overlapped_tensor=True,
        gradient_bytes=4, context_bytes=3_000_000_000, fitted=(), like="mcore",
        update_bytes=CLIPPED_BYTES,
        balanced=True,
        source="NVIDIA NeMo and Megatron-Bridge of 2024 and later: core as above with the fused "
        "attention of cuDNN 9 on Hopper, tensor collectives overlapped (ub_tp_comm_overlap), "
        "benchmarks with moe_router_force_load_balancing",
    ),
    SoftwareStack(
        name="torchtitan", attention="flash2", loss="eager", compiled=True, gradient_bytes=4,
        reserved_factor=1.02, master_weights=False,
        fused_norm=False, low_gather=True, early_stop=True, update_bytes=CLIPPED_BYTES,
        shard_copies=True, eager_ring=True,
        source="pytorch/torchtitan: FSDP2, SDPA, float32 reductions; compile is a flag of rows; "
        "torch's _fsdp_collectives.py (copies) and experimental/_attention.py (convert_to_f32), "
        "torchao's float8_tensor_parallel.py",
    ),
    SoftwareStack(
        name="internevo", attention="flash1", loss="fused",
        fused_qkv=True, fused_rotary=True, wide_norms=True, norms_again=True, hidden_sums=True,
        update_bytes=MIXED_BYTES, accumulate_bytes=ACCUMULATE_BYTES, flatten_bytes=FLATTEN_BYTES,
        element_factor=EAGER_ELEMENTS,
        source="InternLM/InternEvo and, before it, InternLM/InternLM fa7337b: doc/en/install.md "
        "(flash-attention v1.0.5 with its cross entropy, rotary embeddings and fused_dense, which "
        "sums gradients beside products; Apex's norms), internlm/model/modeling_internlm.py "
        "(norms of float32, dropout_selective_checkpoint), configs/7B_sft.py",
    ),
    SoftwareStack(
        name="paddle", attention="flash1", loss="vocab_parallel", dropout=True,
        separate_bias=True, tensor_copies=True,
        update_bytes=CLIPPED_BYTES, accumulate_bytes=ACCUMULATE_BYTES, flatten_bytes=FLATTEN_BYTES,
        rooted_reduce=True,
        element_factor=EAGER_ELEMENTS,
        source="PaddlePaddle 2.5.1 with PaddleNLP: fp16 O2, flash attention, "
        "group_sharded_stage2.py without reduce_overlap; mpu/mp_ops.py (c_identity copies); "
        "FlagOpen/FlagPerf training/nvidia/*-paddle/config (fuse_attention_qkv = 0; fused_linear "
        "is off, and needs CUDA 11.6 where 11.2 was used)",
    ),
    SoftwareStack(
        name="fms-fsdp", attention="flash2", loss="eager", compiled=True, early_stop=True,
        master_weights=False, update_bytes=CLIPPED_BYTES,
        source="foundation-model-stack/fms-fsdp: FSDP1, compiled, bfloat16 reductions",
    ),
    SoftwareStack(
        name="sailor", attention="unfused", loss="vocab_parallel", fused_qkv=True,
        softmax_keys=2048, gradient_bytes=4, element_factor=EAGER_ELEMENTS,
        update_bytes=CLIPPED_BYTES, accumulate_bytes=2 * ACCUMULATE_BYTES,
        flatten_bytes=2 * FLATTEN_BYTES,
        source="eth-easl/sailor: Megatron-DeepSpeed with its pipeline engine, float32; without "
        "dropout, whose masks and copies the memory of its runs has no room for",
    ),
    SoftwareStack(
        name="deepspeed-hf", attention="flash2", loss="fused",
        element_factor=EAGER_ELEMENTS,
        source="DeepSpeed with Hugging Face models and Liger kernels",
    ),
    SoftwareStack(
        name="alpa", attention="unfused", loss="eager", compiled=True,
        source="alpa-projects/alpa on XLA, OSDI 2022 artifact",
    ),
)  # fmt: skip


@cache
def implementation_of(stack: SoftwareStack) -> Implementation:
    """What a stack's kernels mean for the work that a graph implies."""
    return Implementation(
        device="cuda",
        attention="unfused" if stack.attention == "unfused" else "flash",
        loss="fused" if stack.loss == "fused" else "torch",
        dropout="native",
        fused_rms_norm=stack.fused_norm,
        compiled=stack.compiled,
        regather=stack.regather,
    )


def on_device(stack: SoftwareStack, device: str) -> SoftwareStack:
    """The stack with the kernels that it chooses on a device of the catalogue."""
    preferred = stack.hopper_attention
    if preferred is None or not device.startswith(("H100", "H200", "H800", "GH200")):
        return stack
    return replace(stack, attention=preferred)


def generation_of(stack: SoftwareStack) -> Generation:
    """Generation of a stack's fused attention kernel; the second where it has none."""
    return "flash2" if stack.attention == "unfused" else stack.attention


@cache
def stacks() -> Mapping[str, SoftwareStack]:
    """The known stacks by name, with their fitted constants.

    Raises:
        InputError: If the fitted constants that ship name something unknown.
    """
    found = {stack.name: stack for stack in _STACKS}
    for name, values in fitted_constants().items():
        found[name] = with_constants(stack(name, found), values)
    for name, item in found.items():
        if item.like:
            like = found[item.like]
            values = {key: value for key, value in like.constants().items() if key in like.fitted}
            found[name] = with_constants(item, values)
    return MappingProxyType(found)


def prior_of(name: str, constant: str) -> Constant:
    """A constant of a stack before anything is fitted: what the stack states is its prior.

    Raises:
        InputError: If there is no such stack.
    """
    stated = stack(name, {stack.name: stack for stack in _STACKS})
    return replace(CONSTANTS[constant], prior=getattr(stated, constant))


@cache
def fitted_constants() -> Mapping[str, Mapping[str, float]]:
    """What the last fit stored, by stack and constant."""
    if not FITTED.is_file():
        return {}
    found: Mapping[str, Mapping[str, float]] = json.loads(FITTED.read_text("utf-8"))["stacks"]
    return found


def stack(name: str, known: Mapping[str, SoftwareStack] | None = None) -> SoftwareStack:
    """The stack called `name`.

    Raises:
        InputError: If there is none.
    """
    known = stacks() if known is None else known
    if name not in known:
        raise InputError(
            f"unknown software stack {name!r}",
            expected=", ".join(sorted(known)),
            fix=meant(name, known),
        )
    return known[name]


def with_constants(base: SoftwareStack, values: Mapping[str, float]) -> SoftwareStack:
    """The stack with other values of its fitted constants.

    Raises:
        InputError: If a name is none of `CONSTANTS`, or a value is implausible.
    """
    for name, value in values.items():
        if name not in CONSTANTS:
            raise InputError(f"{base.name} has no constant {name!r}", expected=", ".join(CONSTANTS))
        bounds = CONSTANTS[name]
        if not bounds.low <= value <= bounds.high:
            raise InputError(
                f"{name} of {base.name} is {value}", expected=f"{bounds.low} to {bounds.high}"
            )
    found = {name: values.get(name, getattr(base, name)) for name in CONSTANTS}
    return replace(
        base, time_factor=found["time_factor"], overlap=found["overlap"],
        element_factor=found["element_factor"], reserved_factor=found["reserved_factor"],
    )  # fmt: skip
