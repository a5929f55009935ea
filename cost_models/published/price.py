"""Seconds of a training step of many jobs at once, from the kernels of their graphs.

The same physics as for one plan, written over columns: a fit has to price hundreds of rows for
every change of a constant. All constants that it may change are in `Constants`; the others are
here, each with its meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_models.hardware import Device, load_device
from autopar.cost_models.published import tables
from autopar.cost_models.published.jobs import Job
from autopar.cost_models.published.tables import Entry, Table
from autopar.cost_models.software import fitted_constants

if TYPE_CHECKING:
    from autopar.cost_models.published.tables import Flags, Floats

DEVICE_CONSTANTS = (
    "matmul_share", "matmul_size", "misaligned_matmul", "attention_share", "misaligned_head",
    "low_precision_share", "grouped_matmul_share", "memory_share", "launch_s", "link_share",
    "network_share",
)  # fmt: skip
STACK_CONSTANTS = ("time_factor", "overlap", "element_factor")

ATTENTION_SPEED = {"flash1": 0.6, "flash2": 1.0, "flash3": 1.4, "unfused": 1.0}
"""Rate of a generation of fused attention kernels against the second (arXiv 2307.08691, figure 5:
1.6 to 2 times the first; 2407.08608: the third 1.5 to 2 times the second)."""
HALF_RATE_HEAD = 64.0
"""Head features at which the second generation loses half of what small heads can lose."""
SHORT_KEYS = 200.0
"""Keys at which a row of attention takes as long to begin and end as to compute."""
ATTENTION_BACKWARD = 0.85
"""Rate of the backward of fused attention against its forward (2307.08691, figures 4 and 6)."""
BATCHED_SHARE = 0.55
"""Rate of many small products, one a head, against one large."""
ODD_HEAD = 1.1
"""Time factor of such products when a head is a multiple of 8 but not of 64 features."""
CONTENTION = 0.7
"""Share of a hidden collective's time that the computation beside it takes longer: it has fewer
multiprocessors and less memory bandwidth."""
CAST_BYTES = 1.5
"""Bytes that casting an operand of an fp8 product moves per element: reading 2 and writing 1, for
half of the operands, as each is used twice."""
HIDDEN_TENSOR = 0.35
"""What asynchronous tensor parallelism leaves of the time of its collectives."""
RING_HOP_S = 15e-6
"""One hop of a ring over many nodes, per bucket of `BUCKET_BYTES`."""
BUCKET_BYTES = 1e9
COLLECTIVE_S = 25e-6
NETWORK_COLLECTIVE_S = 60e-6
"""Time a tensor-parallel collective takes beside its bytes, within a node and across nodes."""
RACE = 3.0
"""Power mean of the times of host and device: infinity would be the plain maximum."""
COLLECTIVE_LAUNCHES = 4.0
"""Launches that a collective takes the host: NCCL's kernel, two events and framework code."""
SEND_S = 30e-6
STEP_S = 15e-3
"""Host work of a step: optimizer loop, logging, data."""
OPTIMIZER_BYTES = 30.0
"""Bytes that Adam moves per parameter: weight, gradient and two moments read, three written."""
BROADCAST_S = 2.4e-3
"""InternEvo's ZeRO-1 over all ranks broadcasts the updated parameters from one rank after the
other: seconds per rank."""

Constants = Mapping[tuple[str, str], float]
"""``(device or stack, name)`` to value; what is absent is the catalogue's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step of every job, and where they go.

    Attributes:
        step_s: The whole step.
        compute_s: Computation of the busiest stage, its tensor collectives included.
        bubble_s: Waiting for other stages.
        tensor_s: Tensor and context collectives within `compute_s`.
        send_s: Messages between stages.
        data_s: Exposed data-parallel collectives, and what the hidden ones slow down.
        update_s: The optimizer.
    """

    step_s: Floats
    compute_s: Floats
    bubble_s: Floats
    tensor_s: Floats
    send_s: Floats
    data_s: Floats
    update_s: Floats


def device_value(device: Device, name: str) -> float:
    """An efficiency constant of a device: as fitted with these formulas, else the catalogue's."""
    fitted = fitted_constants()["devices"].get(device.name, {})
    return float(fitted.get(name, getattr(device.efficiency, name)))


class Batch:
    """Jobs whose kernels are known, ready to be priced again and again.

    Args:
        jobs: The jobs.
        entries: The kernels of one rank of each, per microbatch.
    """

    def __init__(self, jobs: Sequence[Job], entries: Sequence[Sequence[Entry]]) -> None:
        self.jobs = tuple(jobs)
        self.table = Table.of(entries)
        self.devices = tuple(load_device(job.hardware.device) for job in jobs)

    def column(self, values: Sequence[float | bool]) -> Floats:
        """A column of numbers, one per job."""
        return np.array(values, dtype=np.float64)

    @cached_property
    def sizes(self) -> Mapping[str, Floats]:
        """What the formulas need of every job, by name."""
        rows = [_sizes(job, device) for job, device in zip(self.jobs, self.devices, strict=True)]
        return {name: self.column([row[name] for row in rows]) for name in rows[0]} if rows else {}

    def constants(self, values: Constants) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Columns of the constants of each job's device and stack."""
        device = {
            name: self.column([
                values.get((found.name, name), device_value(found, name))
                for found in self.devices
            ])
            for name in DEVICE_CONSTANTS
        }  # fmt: skip
        stack = {
            name: self.column([
                values.get((job.stack.name, name), getattr(job.stack, name)) for job in self.jobs
            ])
            for name in STACK_CONSTANTS
        }  # fmt: skip
        return device, stack

    @cached_property
    def per_kernel(self) -> Mapping[str, Floats | Flags]:
        """What the price of a kernel needs of its job, spread over the kernels."""
        job, columns = self.table.job, self.table.columns
        flash1 = np.array([found.stack.attention == "flash1" for found in self.jobs])
        speed = self.column([ATTENTION_SPEED[found.stack.attention] for found in self.jobs])
        heads = columns["head_dim"]
        with np.errstate(divide="ignore", invalid="ignore"):
            wide = heads / (heads + HALF_RATE_HEAD) * (128 + HALF_RATE_HEAD) / 128
            keys = 1 / (1 + SHORT_KEYS / columns["keys"])
            sides = 1 / columns["m"] + 1 / columns["n"] + 1 / columns["k"]
        low = (columns["low"] > 0) & (self.sizes["low"][job] > 0)
        batched = self.table.is_("kind", tables.BATCHED)
        return {
            "attention": np.where(flash1[job], 1.0, wide) * speed[job] * keys
            * np.where(columns["backward"] > 0, ATTENTION_BACKWARD, 1.0),
            "sides": sides,
            "low": low,
            "cast": np.where(low, CAST_BYTES * self._operands, 0.0),
            "misaligned": self.table.misaligned,
            "odd_head": batched & (np.mod(heads, 8) != 0),
            "half_head": batched & (np.mod(heads, 8) == 0) & (np.mod(heads, 64) != 0),
        }  # fmt: skip

    @property
    def _operands(self) -> Floats:
        """Elements of both operands of every product, for all of its runs."""
        columns = self.table.columns
        with np.errstate(divide="ignore", invalid="ignore"):
            one = columns["m"] * columns["n"] * columns["k"] * 2
            runs = columns["flops"] / one
            return np.nan_to_num(runs * columns["k"] * (columns["m"] + columns["n"]))

    def kernel_seconds(self, device: Mapping[str, Floats], stack: Mapping[str, Floats]) -> Floats:
        """Seconds of every kernel of the table."""
        job, columns, kernel = self.table.job, self.table.columns, self.per_kernel
        peak, bandwidth = self.sizes["peak"][job], self.sizes["bandwidth"]
        moving = columns["moved"] / (bandwidth * device["memory_share"])[job]
        kind = columns["kind"]
        size = device["matmul_size"][job] * np.where(kernel["low"], 2.0, 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = peak * device["matmul_share"][job] / (1 + size * kernel["sides"])
            rate = rate * np.where(kernel["low"], 2 * device["low_precision_share"][job], 1.0)
            rate = rate * np.where(kind == tables.GROUPED, device["grouped_matmul_share"][job], 1.0)
            product = columns["flops"] / rate
            attention = columns["flops"] / (
                peak * device["attention_share"][job] * kernel["attention"]
            )
        product = product * np.where(kernel["misaligned"], device["misaligned_matmul"][job], 1.0)
        product = (
            np.maximum(product, moving) + kernel["cast"] / (bandwidth * device["memory_share"])[job]
        )
        batched = columns["flops"] / (peak * device["matmul_share"][job] * BATCHED_SHARE)
        batched = np.maximum(batched, moving)
        batched = batched * np.where(kernel["odd_head"], device["misaligned_head"][job], 1.0)
        batched = batched * np.where(kernel["half_head"], ODD_HEAD, 1.0)
        return np.select(
            [kind == tables.ATTENTION, kind == tables.BATCHED, kind == tables.ELEMENT],
            [attention, batched, moving * stack["element_factor"][job]],
            product,
        )

    def price(self, values: Constants | None = None) -> Times:
        """Seconds of a step of every job.

        Args:
            values: Constants to use instead of the catalogue's.
        """
        device, stack = self.constants(values or {})
        seconds = self.kernel_seconds(device, stack)
        return _assemble(self, seconds, device, stack)


def _sizes(job: Job, device: Device) -> dict[str, float]:
    config, hardware = job.config, job.hardware
    width = 4 if job.dtype == "tf32" else 2
    tokens = job.micro_batch * (job.seq // job.cp)
    low = job.dtype in ("fp8", "fp4")
    stages = [sum(job.stage_layers[rank :: job.pp]) for rank in range(job.pp)]
    sparse = config.layers - config.dense_layers if config.experts else 0
    dense_params = config.block_params(False) / job.tp
    experts = 3 if config.gated else 2
    spread = config.experts * experts * config.hidden * config.expert_ffn
    sparse_params = (config.block_params(True) - spread) / job.tp + spread / job.tp / job.ep
    blocks = (dense_params * (config.layers - sparse) + sparse_params * sparse) / config.layers
    return {
        "peak": device.peak("bf16" if low else job.dtype) * hardware.device_factor,
        "bandwidth": device.memory_bytes_per_s,
        "link": device.link.bytes_per_s,
        "network": hardware.network_bytes_per_s,
        "per_node": hardware.per_node,
        "domain": hardware.domain,
        "low": low,
        "microbatches": job.microbatches,
        "pp": job.pp, "tp": job.tp, "dp": job.dp * job.cp, "cp": job.cp, "ep": job.ep,
        "chunks": job.chunks,
        "zero": job.zero, "regather": job.regather, "zero_group": job.zero_group,
        "layers": config.layers, "sparse_share": sparse / config.layers,
        "most_layers": max(stages), "first_layers": stages[0], "last_layers": stages[-1],
        "recompute_share": job.recompute_share,
        "activation": tokens * config.hidden * width,
        "keys": tokens * 2 * config.kv_heads * config.head_dim / job.tp * width,
        "routed": tokens * max(config.top_k, 0) * config.hidden * width
        / (job.tp if job.sequence_parallel else 1) if job.ep > 1 else 0.0,
        "asynchronous": job.asynchronous_tp,
        "block_params": blocks,
        "embedding_params": config.vocab * config.hidden / job.tp,
        "tied": config.tied,
        "gather_width": 1 if low and job.stack.low_gather else width,
        "gradient_width": job.stack.gradient_bytes, "width": width,
    }  # fmt: skip


def _tensor(batch: Batch, link: Floats, network: Floats) -> tuple[Floats, Floats, Floats]:
    """Seconds of the collectives of one block that are not data-parallel.

    Returns:
        An all-reduce of an activation over the tensor ranks; the exchange of keys over the context
        ranks; one routing of tokens to experts.
    """
    size = batch.sizes
    across = size["tp"] > size["domain"]
    share = np.minimum(size["tp"], size["per_node"]) / size["per_node"]
    speed = np.where(across, np.minimum(link, network * share), link)
    wait = np.where(across, NETWORK_COLLECTIVE_S, COLLECTIVE_S)
    reduce = 2 * (size["tp"] - 1) / size["tp"] * size["activation"] / speed + wait
    reduce = np.where(size["tp"] > 1, reduce, 0.0)
    exchange = (size["cp"] - 1) * size["keys"] / link
    inside = np.minimum(size["ep"], np.maximum(1, size["domain"] / size["tp"]))
    outside = 1 - inside / size["ep"]
    local = size["routed"] * (1 - 1 / size["ep"])
    routing = local / link + size["routed"] * outside / (network / size["per_node"])
    routing = np.where(size["ep"] > 1, routing + COLLECTIVE_S, 0.0)
    return reduce, exchange, routing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Seconds of one block and of the parts around the blocks."""

    forward: Floats
    backward: Floats
    tensor: Floats
    first: Floats
    last: Floats


def _race(device: Floats, host: Floats) -> Floats:
    """Seconds of work that the host launches ahead of the device: those of the slower of the two.

    Where both take about as long, each waits for the other now and then.
    """
    return np.power(device**RACE + host**RACE, 1 / RACE)


def _block(
    batch: Batch, seconds: Floats, factor: Floats, launch: Floats, link: Floats, network: Floats
) -> _Block:
    table, size = batch.table, batch.sizes
    backward = table.columns["backward"] > 0
    core = table.columns["core"] > 0
    products = table.is_("kind", tables.MATMUL) | table.is_("kind", tables.GROUPED)

    def part(mask: Flags, spent: Floats = seconds) -> Floats:
        dense = table.total(spent, mask & table.is_("part", tables.BLOCK))
        sparse = table.total(spent, mask & table.is_("part", tables.SPARSE))
        return dense * (1 - size["sparse_share"]) + sparse * size["sparse_share"]

    forward = part(~backward)
    attention, matmul = part(~backward & core), part(~backward & products)
    kinds = np.array([job.recompute for job in batch.jobs])
    again = np.select(
        [kinds == "full", kinds == "attention", kinds == "ops"],
        [forward * size["recompute_share"], attention, forward - attention - 0.5 * matmul],
        0.0,
    )
    reduce, exchange, routing = _tensor(batch, link, network)
    hidden = np.where(size["asynchronous"] > 0, HIDDEN_TENSOR, 1.0)
    times = np.select([kinds == "full", kinds == "ops"], [2 * size["recompute_share"], 1.0], 0.0)
    routing = routing * size["sparse_share"]
    tensor_forward = 2 * reduce * hidden + 0.3 * exchange + 2 * routing
    tensor_backward = (2 + times) * reduce * hidden + 0.6 * exchange + (2 + times) * routing
    host = table.columns["launches"] * launch[table.job]
    split = np.where(size["tp"] > 1, COLLECTIVE_LAUNCHES * launch, 0.0)
    host_forward = part(~backward, host) + 2 * split
    host_again = np.where(kinds == "full", host_forward * size["recompute_share"], 0.0)
    host_backward = part(backward, host) + 2 * split + host_again
    ends = {
        place: _race(
            table.total(seconds, table.is_("part", place)) * factor + reduce,
            table.total(host, table.is_("part", place)) + split,
        )
        for place in (tables.FIRST, tables.LAST)
    }
    return _Block(
        forward=_race(forward * factor + tensor_forward, host_forward),
        backward=_race((part(backward) + again) * factor + tensor_backward, host_backward),
        tensor=tensor_forward + tensor_backward,
        first=ends[tables.FIRST],
        last=ends[tables.LAST],
    )


def _assemble(
    batch: Batch, seconds: Floats, device: Mapping[str, Floats], stack: Mapping[str, Floats]
) -> Times:
    size = batch.sizes
    link = size["link"] * device["link_share"]
    network = size["network"] * device["network_share"]
    block = _block(batch, seconds, stack["time_factor"], device["launch_s"], link, network)
    layer = block.forward + block.backward
    alone = size["pp"] <= 1
    whole = size["layers"] * layer + block.first + block.last
    busiest = np.maximum.reduce([
        size["first_layers"] * layer + block.first,
        size["last_layers"] * layer + block.last,
        size["most_layers"] * layer,
    ])  # fmt: skip
    busiest = np.where(alone, whole, busiest)
    bubble = np.where(alone, 0.0, (whole - busiest) / size["chunks"])
    sends = _sends(size, link, network)
    data = _data(batch, block, link, network, stack["overlap"])
    update = _update(batch, device)
    compute = busiest * size["microbatches"]
    layers = np.where(alone, size["layers"], size["most_layers"])
    return Times(
        step_s=compute + bubble + sends + data + update + STEP_S,
        compute_s=compute, bubble_s=bubble,
        tensor_s=block.tensor * layers * size["microbatches"],
        send_s=sends, data_s=data, update_s=update,
    )  # fmt: skip


def _sends(size: Mapping[str, Floats], link: Floats, network: Floats) -> Floats:
    """Messages between stages, forward and backward, that nothing hides."""
    across = size["tp"] * size["dp"] >= size["per_node"]
    speed = np.where(across, network / size["per_node"], link)
    # Tensor ranks send a part each and gather it at the other end (arXiv 2104.04473, 4.1).
    gather = size["activation"] * (size["tp"] - 1) / size["tp"] / link
    one = size["activation"] / size["tp"] / speed + gather + SEND_S
    count = 2 * (size["microbatches"] * size["chunks"] + size["pp"] - 1)
    return np.where(size["pp"] > 1, one * count, 0.0)


def local_params(size: Mapping[str, Floats]) -> Floats:
    """Parameters of the rank that holds most, before data-parallel ranks share them."""
    alone = size["pp"] <= 1
    outer = np.where(alone & (size["tied"] <= 0), 2, 1) * size["embedding_params"]
    layers = np.where(alone, size["layers"], size["first_layers"])
    return np.maximum(layers * size["block_params"] + outer,
                      size["most_layers"] * size["block_params"])  # fmt: skip


def _data(batch: Batch, block: _Block, link: Floats, network: Floats, overlap: Floats) -> Floats:
    """Data-parallel collectives: what of them shows, and what the hidden part slows down."""
    size = batch.sizes
    params, ranks = local_params(size), size["dp"]
    inside = np.minimum(ranks, np.maximum(1, size["domain"] / size["tp"]))
    groups = np.maximum(1, size["per_node"] / np.minimum(inside, size["per_node"]))
    speed = np.where(ranks > inside, np.minimum(link, network / groups), link)
    wait = 30e-6 * np.log2(np.maximum(ranks, 2))
    share = (ranks - 1) / ranks
    layers = np.where(size["pp"] <= 1, size["layers"], size["most_layers"])
    # ZeRO-3: weights gathered block by block in every microbatch, gradients reduced.
    gather = share * params * size["gather_width"] / speed + wait * layers
    reduce = share * params * size["gradient_width"] / speed + wait * layers
    slowed = speed / link  # what crosses a network uses as much memory bandwidth, for longer
    forward, backward = layers * block.forward * overlap, layers * block.backward * overlap
    again = np.where(size["regather"] > 0, gather, 0.0) + reduce
    sharded = (
        np.maximum(0, gather - forward) + np.maximum(0, again - backward)
        + CONTENTION * slowed * (np.minimum(gather, forward) + np.minimum(again, backward))
        + (gather + reduce) / layers
    ) * size["microbatches"]  # fmt: skip
    # Others: gradients reduced once (ZeRO-2: in every microbatch), updated weights gathered.
    split, grouped = size["zero"] >= 1, size["zero_group"] > 0
    ring = 2 * (ranks - 1) * RING_HOP_S * params * size["gradient_width"] / BUCKET_BYTES
    volume = share * params * size["gradient_width"] / speed
    summed = np.where(split & ~grouped, volume, 2 * volume) + wait + ring
    gathered = np.where(split, share * params * size["width"], 0.0)
    gathered = gathered / np.where(grouped, link, speed)
    names = np.array([job.stack.name for job in batch.jobs])
    one_by_one = (names == "internevo") & (size["zero"] == 1) & ~grouped
    shown = np.maximum(0, summed - backward) + CONTENTION * slowed * np.minimum(
        summed, backward
    ) * (size["zero"] == 2)
    shown = shown * np.where(size["zero"] == 2, size["microbatches"], 1)
    plain = shown + gathered * (1 - 0.5 * overlap) + np.where(one_by_one, ranks * BROADCAST_S, 0)
    return np.where(ranks > 1, np.where(size["zero"] == 3, sharded, plain), 0.0)


def _update(batch: Batch, device: Mapping[str, Floats]) -> Floats:
    """The optimizer: memory-bound, over what of the parameters a rank updates."""
    size = batch.sizes
    ranks = np.where(size["zero_group"] > 0, size["zero_group"], size["dp"])
    ranks = np.where(size["zero"] >= 1, ranks, 1)
    moved = OPTIMIZER_BYTES / ranks + np.where(size["zero"] == 3, 0.0, 6.0)
    return local_params(size) * moved / (size["bandwidth"] * device["memory_share"])
