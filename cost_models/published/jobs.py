"""From a published row to the job it measured, or the reason why it cannot be priced.

What a row does not state is either taken from the public configuration of its source, and then
listed among the job's assumptions, or it is a reason to skip the row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.cost_models.hardware import load_device
from autopar.cost_models.published.known import (
    FAMILIES,
    Unpriceable,
    check_degrees,
    check_sizes,
    network_gbit,
)
from autopar.cost_models.published.rows import Row
from autopar.cost_models.published.sizes import inner_features, stage_layers
from autopar.cost_models.software import WIDE_ACCUMULATE_BYTES, SoftwareStack, on_device, stack
from autopar.presets.config import DecoderConfig, Positions

Recompute = Literal["none", "full", "attention", "ops"]
"""What backward computes again: nothing, whole blocks, only the core of attention, or what the
policy of torch's per-op checkpointing does not keep (every second matmul and all pointwise ops)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machines of a job.

    Attributes:
        device: Name in the device catalogue.
        per_node: Devices of a machine.
        domain: Devices that the fast link joins; more than a machine's for rack-scale systems.
        network_bytes_per_s: Network of a machine, one direction.
        memory_bytes: Memory of a device.
    """

    device: str
    per_node: int
    domain: int
    network_bytes_per_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job under a stated plan.

    Attributes:
        id: The row's name.
        group: The row's source.
        config: The model.
        seq: Tokens of a sample.
        global_batch: Samples of a step.
        micro_batch: Samples of a data-parallel rank at a time.
        dp: Data-parallel ranks.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages (ranks).
        cp: Context-parallel ranks.
        ep: Expert-parallel ranks, out of those of data and context.
        sequence_parallel: Whether norms and shortcuts are split over the tensor ranks by tokens.
        asynchronous_tp: Whether tensor collectives are hidden in the matmuls beside them.
        chunks: Stages per pipeline rank.
        stage_layers: Blocks of each stage.
        zero: ZeRO stage; 3 is FSDP.
        regather: Whether ZeRO-3 gathers weights again in backward.
        zero_group: Ranks over which the optimizer is split, 0 for all that hold equal parameters.
        recompute: What backward computes again.
        recompute_share: Share of the blocks to which that applies.
        dtype: Number format of matmuls: bf16, fp16, tf32 or fp8.
        expert_tp: Tensor ranks over which an expert is split.
        optimizer_copies: Copies of a sharded optimizer, each over a part of the ranks.
        grouped: Whether experts are grouped products with streams of their own.
        wide_gradients: Whether gradients are summed in float32 beside those in 16 bits.
        gradient_copy: Whether the optimizer keeps gradients in float32 beside those in 16 bits.
        stack: The software.
        hardware: The machines.
        assumed: What the row does not state and was taken to be.
    """

    id: str
    group: str
    config: DecoderConfig
    seq: int
    global_batch: int
    micro_batch: int
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    sequence_parallel: bool
    asynchronous_tp: bool
    chunks: int
    stage_layers: tuple[int, ...]
    zero: int
    regather: bool
    zero_group: int
    recompute: Recompute
    recompute_share: float
    dtype: str
    expert_tp: int
    optimizer_copies: int
    grouped: bool
    wide_gradients: bool
    gradient_copy: bool
    stack: SoftwareStack
    hardware: Hardware
    assumed: tuple[str, ...]

    @property
    def gpus(self) -> int:
        """Devices of the job."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on one pipeline."""
        return self.global_batch // (self.dp * self.micro_batch)


def read_job(row: Row, *, assume_recompute: str | None = None) -> Job:
    """The job that `row` measured.

    Args:
        row: The row.
        assume_recompute: What to take for a row that does not state what it recomputes: such rows
            are skipped by default.

    Raises:
        Unpriceable: If it cannot be priced, with the reason.
    """
    assumed: list[str] = []
    _check_features(row)
    config = _model(row, assumed)
    hardware = _hardware(row, assumed)
    software = _software(row, hardware.device, assumed)
    plan = {key: row.get("plan", key) for key in row.sections["plan"]}
    degrees = {key: plan[key] for key in ("dp", "tp", "pp", "cp")}
    degrees["cp"] = degrees["cp"] or 1
    for key, value in degrees.items():
        if value is None:
            raise Unpriceable(f"plan.{key} is not stated")
    check_degrees(row.sections["model"].__getitem__, {**plan, **degrees})
    _check_size(row, degrees)
    if degrees["cp"] > 1 and software.attention == "unfused":
        raise Unpriceable("context parallelism without fused attention is not priced")
    seq = _need(row, "model", "seq_len")
    micro, batch = _need(row, "plan", "micro_batch"), _need(row, "plan", "global_batch")
    if batch % (micro * degrees["dp"]):
        raise Unpriceable(
            f"plan.global_batch {batch} is no multiple of micro batch x dp {micro * degrees['dp']}"
        )
    if plan["offload"] not in (None, "none"):
        raise Unpriceable(f"plan.offload is {plan['offload']!r}, which is not priced")
    recompute, share = _recompute(row, software, config, assume_recompute, assumed)
    zero, regather, group = _zero(row, degrees, assumed)
    tp = degrees["tp"]
    sequence_parallel = plan["sp"]
    if sequence_parallel is None:
        sequence_parallel = software.name in ("mcore", "nemo") and tp > 1
        if tp > 1:
            assumed.append(f"sequence parallel {'on' if sequence_parallel else 'off'}")
    if config.positions == "learned":
        config = replace(config, context=seq)
    # Halves of a fused gate are products of their own where ranks share them: the strategy would
    # keep the fused one whole on every rank.
    fused = software.fused_gate and tp == 1
    config = replace(config, fused_qkv=software.fused_qkv, fused_gate=fused)
    if software.loss.endswith("vocab_parallel"):
        multiple = _VOCAB_MULTIPLE * tp  # as Megatron pads it
        config = replace(config, vocab=-(-config.vocab // multiple) * multiple)
    chunks = plan["vp"] or 1
    expert_tp = re.search(r"etp(\d+)", row.id)
    copies = re.search(r"num-distributed-optimizer-instances\": (\d+)", row.notes)
    return Job(
        id=row.id, group=row.group, config=config, seq=seq, global_batch=batch, micro_batch=micro,
        **degrees, ep=plan["ep"] or 1, sequence_parallel=bool(sequence_parallel) and tp > 1,
        asynchronous_tp=software.overlapped_tensor or "async" in (plan["schedule"] or "").lower(),
        chunks=chunks,
        stage_layers=stage_layers(row, config.layers, degrees["pp"], chunks), zero=zero,
        regather=regather, zero_group=group, recompute=recompute, recompute_share=share,
        dtype=_dtype(row, hardware.device, assumed),
        expert_tp=int(expert_tp[1]) if expert_tp else tp,
        optimizer_copies=int(copies[1]) if copies else 1,
        grouped='"--moe-grouped-gemm": true' in row.notes,
        wide_gradients="fp32 gradient" in (plan["precision"] or ""),
        gradient_copy="fp16" in (plan["precision"] or ""), stack=software, hardware=hardware,
        assumed=tuple(assumed),
    )  # fmt: skip


_VOCAB_MULTIPLE = 128
_UNPRICED = (
    (r"--multi-latent-attention|_mla\b|_mla-|deepseek", "latent attention"),
    (r"--mtp-num-layers|_mtp_", "multi-token prediction"),
    (r"muon", "the Muon optimizer"),
)


def _check_features(row: Row) -> None:
    text = f"{row.id} {row.notes}"
    for pattern, name in _UNPRICED:
        if row.group == "megatron-golden-tiny" and re.search(pattern, text):
            raise Unpriceable(f"{name} is not priced")


def _need(row: Row, section: str, field: str) -> Any:
    value = row.get(section, field)
    if value is None:
        raise Unpriceable(f"{section}.{field} is not stated")
    return value


def _check_size(row: Row, degrees: dict[str, Any]) -> None:
    gpus, product = row.get("hardware", "gpus"), 1
    for value in degrees.values():
        product *= value
    if gpus is not None and gpus != product:
        raise Unpriceable(f"plan.dp x tp x pp x cp is {product}, hardware.gpus is {gpus}")


_HYBRID = ("nemotron-hybrid",)
_LATENT = ("deepseek-v3", "kimi-k2")


def _model(row: Row, assumed: list[str]) -> DecoderConfig:
    get: Callable[[str], Any] = row.sections["model"].__getitem__
    family = get("family")
    if family is None or family in _HYBRID or family in _LATENT:
        kind = "not stated" if family is None else "of latent attention"
        if family in _HYBRID:
            kind = "a hybrid with state-space layers"
        raise Unpriceable(f"model.family is {kind}")
    for key in ("layers", "hidden", "heads"):
        _need(row, "model", key)
    check_sizes(get)
    if family not in FAMILIES:
        assumed.append(f"family {family!r} is a decoder of the sizes stated")
    gated, tied, vocab = get("gated_mlp"), get("tied_embeddings"), get("vocab")
    if vocab is None:
        vocab = 50304
        assumed.append("vocabulary of 50304 tokens (GPT-2's, padded)")
    if gated is None:
        gated = family.startswith(("llama", "qwen", "mixtral", "internlm"))
        assumed.append(f"{'SwiGLU' if gated else 'GELU'} perceptron, as the family has")
    if tied is None:
        tied = not gated
        assumed.append(f"embeddings {'tied' if tied else 'not tied'}, as the family has")
    experts = get("experts") or 0
    gpt = not gated
    positions: Positions = "learned" if gpt and family != "nemotron" else "rope"
    return DecoderConfig(
        layers=get("layers"), hidden=get("hidden"), heads=get("heads"), vocab=vocab,
        ffn=inner_features(row, gated), kv_heads=get("kv_heads") or 0,
        head_dim=get("head_dim") or 0,
        positions=positions, norm="layer" if gpt else "rms", gated=gated,
        bias=gpt and family != "nemotron", qkv_bias=family in ("qwen1", "internlm") or None,
        qk_norm=family == "qwen3-moe", tied=bool(tied), experts=experts,
        top_k=(get("topk") or 2) if experts else 0, expert_ffn=get("moe_ffn_hidden") or 0,
        shared_ffn=_shared_ffn(row, family) if experts else 0,
    )  # fmt: skip


def _shared_ffn(row: Row, family: str) -> int:
    stated = re.search(r"moe-shared-expert-intermediate-size\": (\d+)", row.notes)
    if stated:
        return int(stated[1])
    return row.get("model", "ffn_hidden") or 0 if family == "qwen1.5-moe" else 0


_FRAMEWORKS = (
    ("sailor", "sailor"),
    ("megatron-deepspeed, deepspeed 0.6.2 zero-3", "megatron-deepspeed"),
    ("megatron-deepspeed", "megatron-deepspeed"),
    ("composer", "llm-foundry"),
    ("torchtitan", "torchtitan"),
    ("internevo", "internevo"),
    ("paddle", "paddle"),
    ("pytorch fsdp1", "fms-fsdp"),
    ("liger", "deepspeed-hf"),
    ("deepspeed", "deepspeed-hf"),
    ("alpa", "alpa"),
    ("megatron-bridge", "nemo"),
    ("nemo", "nemo"),
    ("megatron", "mcore"),
    ("flagscale", "mcore"),
    ("nanotron", "mcore"),
)


def _software(row: Row, device: str, assumed: list[str]) -> SoftwareStack:
    framework = row.get("plan", "framework")
    if framework is None:
        raise Unpriceable("plan.framework is not stated")
    name = next((name for text, name in _FRAMEWORKS if text in framework.lower()), None)
    if name is None:
        raise Unpriceable(f"plan.framework {framework!r} is no known software stack")
    if name == "megatron-deepspeed" and "DeepSpeed" in (row.get("plan", "schedule") or ""):
        name = "deepspeed-pipeline"
    if row.group == "vtrain-single":
        name = "vtrain"
    found = _flags(row, on_device(stack(name), device), assumed)
    precision = row.get("plan", "precision") or ""
    if "fp32 gradient" in precision or "mixed_precision=DEFAULT" in precision:
        found = replace(found, gradient_bytes=4)
    if "fp32 gradient" in precision and found.accumulate_bytes:
        found = replace(found, accumulate_bytes=WIDE_ACCUMULATE_BYTES)
    flash, compiled = row.get("plan", "flash_attention"), row.get("plan", "compile")
    if flash is False and found.attention != "unfused":
        found = replace(found, attention="unfused")
    elif flash is True and found.attention == "unfused":
        found = replace(found, attention="flash2")
    elif flash is None:
        assumed.append(f"attention kernel {found.attention}, the stack's default")
    if compiled is not None and compiled != found.compiled:
        found = replace(found, compiled=compiled)
    elif compiled is None and found.compiled:
        assumed.append("compiled, the stack's default")
    return found


def _flags(row: Row, found: SoftwareStack, assumed: list[str]) -> SoftwareStack:
    """The stack as what a source says of its runs, or a row in its notes, changes it."""
    if row.group.startswith("bigscience-bloom"):
        # chronicles-prequel.md: jobs of 320 devices always hung without CUDA_LAUNCH_BLOCKING=1,
        # which made those of 80 and 160 0 to 7 % slower.
        found = replace(found, blocking=True)
        assumed.append("the host waits for every kernel")
    if re.search(r'"(--attention-backend": "unfused|--transformer-impl": "local)"', row.notes):
        found = replace(found, attention="unfused")
    if re.search(r"cross-entropy-loss-fusion|defer_embedding_wgrad", row.id + row.notes):
        found = replace(found, loss="compiled_vocab_parallel")
    if row.group == "megatron-golden-tiny":
        found = replace(found, dropout=True)
        assumed.append("dropout, the default of Megatron-LM's functional tests")
    return found


# Text of a row -> device of the catalogue, devices that the fast link joins. Jobs take 16 of the
# 18 trays of a rack of GB200 or GB300, so that groups of ranks do not straddle racks.
_DEVICES = (
    (r"H100-9[56]GB-HBM2e.*", "H100-SXM-96", 8),
    (r"A100-40GB.*", "A100-40-SXM", 8),
    (r"A100(-80GB.*)?( \(.*)?", "A100-80-SXM", 8),
    (r"A800.*", "A800-80-SXM", 8),
    (r"H100.*", "H100-SXM", 8),
    (r"H800.*", "H800-SXM", 8),
    (r"H200( .*)?", "H200-SXM", 8),
    (r"GH200.*", "GH200", 4),
    (r"B200.*", "B200", 8),
    (r"GB200.*", "GB200", 64),
    (r"GB300.*", "GB300", 64),
    (r"V100-32GB.*", "V100-SXM2-32", 8),
    (r"V100-16GB.*", "V100-SXM2-16", 8),
)
_NODE_GBIT = {"A100": 1600, "A800": 800, "H100": 3200, "H800": 3200, "H200": 3200, "GH20": 800,
              "B200": 3200, "B300": 6400, "GB20": 1600, "GB30": 3200, "V100": 400}  # fmt: skip


def _hardware(row: Row, assumed: list[str]) -> Hardware:
    gpu = _need(row, "hardware", "gpu")
    match = next((entry for entry in _DEVICES if re.fullmatch(entry[0], gpu)), None)
    if match is None or "text says" in gpu or "+" in gpu:
        raise Unpriceable(f"hardware.gpu {gpu!r} is no known device")
    _, device, domain = match
    per_node = row.get("hardware", "gpus_per_node")
    if per_node is None:
        per_node = 4 if device.startswith("G") else 8
        assumed.append(f"{per_node} devices per node")
    gbit = network_gbit(row.get("hardware", "inter_link") or "", per_node)
    if gbit is None:
        gbit = _NODE_GBIT[device[:4]] * per_node / (4 if device.startswith("G") else 8)
        if (row.get("hardware", "gpus") or 1) > min(per_node, domain):
            assumed.append(f"network of {gbit:g} Gbit/s per node")
    memory = row.get("hardware", "gpu_mem_gb") or {"A100-80-SXM": 80}.get(device, 80)
    return Hardware(
        device=device, per_node=per_node, domain=max(domain, per_node)
        if domain > 8 else per_node, network_bytes_per_s=gbit * 1e9 / 8,
        memory_bytes=int(memory * 2**30),
    )  # fmt: skip


def products(config: DecoderConfig) -> tuple[float, ...]:
    """Weights of the products of a dense block, in the order in which it does them."""
    keys = config.hidden * config.kv_heads * config.head_dim
    queries = config.hidden * config.heads * config.head_dim
    inner = config.hidden * config.ffn
    first = (queries + 2 * keys,) if config.fused_qkv else (queries, keys, keys)
    ups = (2 if config.gated else 1) * inner
    up = (inner, inner) if config.gated and not config.fused_gate else (ups,)
    return (*map(float, first), float(queries), *map(float, up), float(inner))


def last_product(config: DecoderConfig) -> float:
    """Share of the last of them, whose result backward does not need."""
    found = products(config)
    return found[-1] / sum(found)


def _recompute(
    row: Row,
    software: SoftwareStack,
    config: DecoderConfig,
    default: str | None,
    assumed: list[str],
) -> tuple[Recompute, float]:
    stated, detail = row.get("plan", "recompute"), row.get("plan", "recompute_detail") or ""
    if stated is None:
        if default is None:
            raise Unpriceable("plan.recompute is not stated")
        stated = default
        assumed.append(f"recompute {default}")
    if stated not in ("none", "full", "selective"):
        raise Unpriceable(f"plan.recompute is {stated!r}")
    if stated == "none":
        return "none", 0.0
    if software.name == "vtrain":
        # A sample more takes a block 2048 wide 1.88 ms: 335 GFLOP, or 447 with what is stated to be
        # done again, which would be 0.76 of the peak with softmax, dropout and norms in that time.
        assumed.append("nothing recomputed: blocks take the time of three passes, not of four")
        return "none", 0.0
    if stated == "full":
        return "full", 1.0
    if "2nd layer" in detail:
        return "full", 0.5
    if "nth block" in detail:
        done, counted = row.get("measured", "hfu"), row.get("measured", "mfu")
        if done is None or counted is None:
            assumed.append("every second block recomputed")
            return "full", 0.5
        # What was done beyond three forwards is what was done again.
        kept = last_product(config) if software.early_stop else 0.0
        again = min(1.0, max(0.0, 3 * (done / counted - 1)) / (1 - kept))
        assumed.append(f"{again:.0%} of the blocks recomputed, from the stated HFU and MFU")
        return "full", again
    if software.name == "torchtitan":
        return "ops", 1.0
    return "attention", 1.0


def _zero(row: Row, degrees: dict[str, Any], assumed: list[str]) -> tuple[int, bool, int]:
    stage, fsdp = row.get("plan", "zero_stage"), row.get("plan", "fsdp") or ""
    if stage is None:
        stage = 0
        if degrees["dp"] > 1:
            assumed.append("ZeRO stage 0: parameters and optimizer whole on every data rank")
    if stage not in (0, 1, 2, 3):
        raise Unpriceable(f"plan.zero_stage is {stage}")
    regather = stage == 3 and "SHARD_GRAD_OP" not in fsdp
    group = 0
    match = re.search(r"shard group (\d+)", row.get("plan", "framework") or "")
    if match:
        group = int(match[1])
    if "HSDP" in fsdp:
        group = row.get("hardware", "gpus_per_node") or 8
    return stage, regather, group


def _dtype(row: Row, device: str, assumed: list[str]) -> str:
    found = _stated_dtype(row, assumed)
    wanted, computed = load_device(device).computes_in(found)
    if computed != wanted:
        assumed.append(f"{device} has no products in {wanted}: {computed}")
    return found


def _stated_dtype(row: Row, assumed: list[str]) -> str:
    text = re.sub(r"\(.*\)", "", _need(row, "plan", "precision")).lower()
    if "nvfp4" in text:
        return "fp4"
    if "fp8" in text or "float8" in text:
        return "fp8"
    for name in ("bf16", "fp16"):
        if name in text:
            return name
    if "fp32" in text or "tf32" in text:
        assumed.append("float32 matmuls run as TF32")
        return "tf32"
    raise Unpriceable(f"plan.precision is {text!r}")
