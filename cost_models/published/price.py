"""Seconds of a training step of many jobs at once, from the kernels of their graphs.

Kernels, the race of host and device, and collectives are priced by `autopar.cost_models.compute`
and `autopar.cost_models.collectives`, as for any plan; only the schedule is a closed form here
instead of a simulation, because a fit prices hundreds of rows for every change of a constant. A
test holds both against each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_models import compute
from autopar.cost_models.compute import COLLECTIVE_LAUNCHES, Speeds, host_seconds, race, seconds_of
from autopar.cost_models.hardware import load_device
from autopar.cost_models.published import tables, wires
from autopar.cost_models.published.features import Work
from autopar.cost_models.published.jobs import Job, last_product, products
from autopar.cost_models.published.tables import Table
from autopar.cost_models.published.wires import Wires
from autopar.cost_models.software import (
    HIDDEN_TENSOR,
    SLOWDOWN,
    generation_of,
)

if TYPE_CHECKING:
    from autopar.cost_models.published.tables import Flags, Floats

DEVICE_CONSTANTS = (
    "matmul_share", "matmul_size", "misaligned_matmul", "attention_share", "misaligned_head",
    "low_precision_share", "grouped_matmul_share", "convolution_share", "memory_share", "launch_s",
    "link_share", "network_share",
)  # fmt: skip
STACK_CONSTANTS = ("time_factor", "overlap", "element_factor")
BROADCAST_S = 2.4e-3
"""What each of the broadcasts takes the host with which InternEvo's ZeRO-1 hands on the weights of
one rank after the other, beside the broadcast itself: seconds per rank."""

REDUCE_COPIES = 6.0
"""Bytes per parameter that ZeRO-2 moves where it sums each gradient at one rank: scaled before (4),
cleared after (2)."""
RING_FORWARD_BYTES, RING_BACKWARD_BYTES = 38.0, 46.0
"""Bytes per element of queries with which torch joins a part of attention with those before, and of
gradients of queries, keys and values: float32 results, each op a kernel."""
IMBALANCE = 0.25
"""What the most loaded expert gets beyond its even share where an auxiliary loss balances them:
with as much room to spare, Switch Transformer drops few tokens (arXiv 2101.03961, section 2.2)."""

Constants = Mapping[tuple[str, str], float]
"""``(device or stack, name)`` to value; what is absent is the catalogue's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of a step of every job, and where they go.

    Attributes:
        step_s: The whole step.
        compute_s: Computation of the busiest stage, its tensor collectives included.
        bubble_s: Waiting for other stages.
        tensor_s: Tensor, context and expert collectives within `compute_s`.
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


class Batch:
    """Jobs whose work is known, ready to be priced again and again.

    Args:
        jobs: The jobs.
        works: The work of one rank of each, per microbatch.
    """

    def __init__(self, jobs: Sequence[Job], works: Sequence[Work]) -> None:
        self.jobs = tuple(jobs)
        self.table = Table.of([work.pieces for work in works])
        self.wires = Wires(self.jobs, [work.shifts for work in works])
        self.devices = tuple(load_device(job.hardware.device) for job in jobs)

    def column(self, values: Sequence[float | bool]) -> Floats:
        """A column of numbers, one per job."""
        return np.array(values, dtype=np.float64)

    def bandwidth(self, device: Mapping[str, Floats]) -> Floats:
        """Bytes per second that plain kernels of each job move, by the constants of its device."""
        peaks = self.column([found.memory_bytes_per_s for found in self.devices])
        return np.asarray(peaks * device["memory_share"])

    @cached_property
    def sizes(self) -> Mapping[str, Floats]:
        """What the formulas need of every job, by name."""
        rows = [_sizes(job) for job in self.jobs]
        return {name: self.column([row[name] for row in rows]) for name in rows[0]} if rows else {}

    @cached_property
    def recompute(self) -> Sequence[str]:
        """What each job computes again."""
        return np.array([job.recompute for job in self.jobs])  # type: ignore[return-value]

    def constants(self, values: Constants) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Columns of the constants of each job's device and stack."""
        device = {
            name: self.column([
                values.get((found.name, name), getattr(found.efficiency, name))
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
        own = [values.get((job.stack.name, "launch_s"), job.stack.launch_s) for job in self.jobs]
        device["launch_s"] = np.where(
            np.array([launch is not None for launch in own], dtype=bool),
            self.column([launch or 0.0 for launch in own]), device["launch_s"],
        )  # fmt: skip
        return device, stack

    @cached_property
    def per_kernel(self) -> Mapping[str, Floats]:
        """Of every kernel: peak rate, 1 if in a low format, and rates of its attention kernel."""
        columns, job = self.table.columns, self.table.job
        formats = [_formats(found) for found in self.jobs]
        rate = np.ones(len(job))
        low = np.zeros(len(job), dtype=bool)
        for place, (kind, dtype, part) in enumerate(
            zip(columns.kind.tolist(), columns.dtypes, self.table.part.tolist(), strict=True)
        ):
            number = int(job[place])
            # The head stays in 16 bits where blocks are in 8 or 4 (Transformer Engine's recipes).
            found = formats[number]
            inside = part in (tables.BLOCK, tables.SPARSE)
            narrow = compute.format_of(dtype, kind, found if inside else _wide(found))
            low[place] = narrow in compute.LOW_FORMATS
            if kind != compute.STREAM:
                rate[place] = self.devices[number].peak(narrow)
        kernels = [generation_of(found.stack) for found in self.jobs]
        return {
            "peak": rate,
            "low": low.astype(np.float64),
            "speed": self.column([compute.ATTENTION_SPEED[name] for name in kernels])[job],
            "half": self.column([compute.HALF_RATE_HEAD[name] for name in kernels])[job],
            "bandwidth": self.column([found.memory_bytes_per_s for found in self.devices])[job],
        }

    @cached_property
    def cast_bytes(self) -> Floats:
        """Bytes that casting an element of an operand to 8 or 4 bits moves, by kernel.

        Where weights are cast before they are gathered only activations are left, and those that
        tensor ranks gather are cast before that, too.
        """
        found, columns = np.full(len(self.table.job), compute.CAST_BYTES), self.table.columns
        weights = np.array([phase == "weight_gradient" for phase in columns.phases], dtype=bool)
        owners = [self.jobs[number] for number in self.table.job.tolist()]
        cast = np.array([job.stack.low_gather for job in owners], dtype=bool)
        hidden = self.column([job.config.hidden for job in owners])
        ranks = self.column([job.tp if job.sequence_parallel else 1 for job in owners])
        whole = columns.m + columns.n
        features = np.where(weights, columns.m, columns.k) == hidden
        first = columns.m / np.where(features, ranks, 1.0)
        second = columns.n / np.where(columns.n == hidden, ranks, 1.0)
        share = (first + np.where(weights, second, 0.0)) / whole
        return np.where(cast, compute.DYNAMIC_CAST_BYTES * share, found)

    def speeds(self, device: Mapping[str, Floats], stack: Mapping[str, Floats]) -> Speeds:
        """What every kernel of the table reaches."""
        job, kernel = self.table.job, self.per_kernel
        low = kernel["low"] > 0
        of = {name: column[job] for name, column in device.items()}
        return Speeds(
            peak_flops_per_s=kernel["peak"] * np.where(low, of["low_precision_share"], 1.0),
            bytes_per_s=kernel["bandwidth"],
            matmul_share=of["matmul_share"],
            matmul_size=of["matmul_size"],
            misaligned_matmul=of["misaligned_matmul"],
            attention_share=of["attention_share"],
            misaligned_head=of["misaligned_head"],
            grouped_matmul_share=of["grouped_matmul_share"],
            convolution_share=of["convolution_share"],
            memory_share=of["memory_share"],
            launch_s=of["launch_s"],
            attention_speed=kernel["speed"],
            half_rate_head=kernel["half"],
            cast_bytes=np.where(low, self.cast_bytes, 0.0),
            element_factor=stack["element_factor"][job],
        )

    def price(self, values: Constants | None = None) -> Times:
        """Seconds of a step of every job.

        Args:
            values: Constants to use instead of the catalogue's.
        """
        device, stack = self.constants(values or {})
        speeds = self.speeds(device, stack)
        seconds = seconds_of(self.table.columns, speeds) * stack["time_factor"][self.table.job]
        grouped = self.table.columns.kind == compute.GROUPED
        seconds = seconds * np.where(grouped, self.sizes["load"][self.table.job], 1.0)
        hosts = host_seconds(self.table.columns, speeds)
        moved = self.wires.price(device["link_share"], device["network_share"])
        return _assemble(self, _block(self, seconds, hosts, moved, device), moved, device, stack)


def _formats(job: Job) -> Mapping[str, str]:
    if job.dtype == "tf32":
        return {"float32": "tf32"}
    return {"bfloat16": job.dtype}  # graphs of all 16-bit formats are traced in one


def _wide(formats: Mapping[str, str]) -> Mapping[str, str]:
    """The same without formats of 8 and 4 bits."""
    return {key: name for key, name in formats.items() if name not in compute.LOW_FORMATS}


def expert_load(job: Job) -> float:
    """Tokens of the rank whose experts get most, over those of all ranks on average.

    Loads of a rank's experts even out: their relative spread falls with the root of their number.
    """
    if job.ep <= 1 or job.stack.balanced:
        return 1.0
    return 1 + IMBALANCE / math.sqrt(job.config.experts / job.ep)


def _sizes(job: Job) -> dict[str, float]:
    config = job.config
    stages = [sum(job.stage_layers[rank :: job.pp]) for rank in range(job.pp)]
    sparse = config.layers - config.dense_layers if config.experts else 0
    layers, block, outer = wires.local_params(job)
    shards = job.zero_group or job.dp * job.cp
    return {
        "microbatches": job.microbatches,
        "pp": job.pp,
        "chunks": job.chunks,
        "zero": job.zero,
        "regather": job.regather,
        "layers": config.layers,
        "sparse_share": sparse / config.layers,
        "most_layers": max(stages),
        "first_layers": stages[0],
        "last_layers": stages[-1],
        "recompute_share": job.recompute_share,
        "last_product": last_product(config) if job.stack.early_stop else 0.0,
        "every_second": sum(products(config)[1::2]) / sum(products(config)),
        "hidden_tensor": HIDDEN_TENSOR if job.asynchronous_tp else 1.0,
        "hidden_sums": job.stack.hidden_sums and not job.sequence_parallel,
        "blocking": job.stack.blocking,
        "updated": (layers * block + outer) / (shards if job.zero else 1),
        "update_bytes": job.stack.update_bytes,
        "params": layers * block + outer,
        "shared": job.dp * job.cp > 1,
        "shards": job.dp * job.cp,
        "accumulate_bytes": job.stack.accumulate_bytes,
        "flatten_bytes": job.stack.flatten_bytes,
        "shard_copies": _shard_copies(job) if job.stack.shard_copies else 0.0,
        "rooted": job.stack.rooted_reduce and job.zero == 2,
        "joins": (job.cp - 1) * job.stack.eager_ring,
        "queries": job.micro_batch * (job.seq // job.cp) * job.config.hidden / job.tp,
        "broadcasts": job.dp * job.cp if wires.one_by_one(job) else 0,
        "step_s": job.stack.step_s,
        "load": expert_load(job),
    }


def _shard_copies(job: Job) -> float:
    """Bytes per parameter and microbatch with which FSDP2 copies weights out, and gradients in."""
    width = 4 if job.dtype == "tf32" else 2
    gathered = 1 if job.dtype in ("fp8", "fp4") and job.stack.low_gather else width
    return 2 * gathered * (2 if job.regather else 1) + width + job.stack.gradient_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Seconds of one block and of the parts around the blocks."""

    forward: Floats
    backward: Floats
    tensor: Floats
    first: Floats
    last: Floats


def _block(
    batch: Batch, seconds: Floats, hosts: Floats, moved: Floats, device: Mapping[str, Floats]
) -> _Block:
    table, size, calls = batch.table, batch.sizes, batch.wires.calls
    backward, kinds = table.columns.backward, batch.recompute
    sparse = size["sparse_share"]

    def part(mask: Flags, spent: Floats = seconds) -> Floats:
        dense = table.total(spent, mask & (table.part == tables.BLOCK))
        experts = table.total(spent, mask & (table.part == tables.SPARSE))
        return dense * (1 - sparse) + experts * sparse

    def tensor(values: Floats, dense: int, experts: int) -> Floats:
        return np.asarray(values[dense] * (1 - sparse) + values[experts] * sparse)

    def again(forward: Floats, attention: Floats, matmul: Floats) -> Floats:
        """What backward computes again of what forward computed."""
        whole = (forward - size["last_product"] * matmul) * size["recompute_share"]
        ops = forward - attention - (1 - size["every_second"]) * matmul
        return np.select(
            [kinds == "full", kinds == "attention", kinds == "ops"], [whole, attention, ops], 0.0
        )

    core, product = table.core, table.product
    device_of, host_of = (
        (part(~backward, spent), part(backward, spent)
         + again(part(~backward, spent), part(~backward & core, spent),
                 part(~backward & product, spent)))
        for spent in (seconds, hosts)
    )  # fmt: skip
    # Collectives of a forward done again; per-op checkpointing keeps what was reduced.
    last = np.where(size["last_product"] > 0, 1 / np.maximum(calls[wires.FORWARD], 1), 0.0)
    whole = size["recompute_share"] * (1 - last)
    repeated = np.select([kinds == "full", kinds == "ops"], [whole, 0.5], 0.0)
    ahead = tensor(moved, wires.FORWARD, wires.SPARSE_FORWARD) * size["hidden_tensor"]
    back = tensor(moved, wires.BACKWARD, wires.SPARSE_BACKWARD) * size["hidden_tensor"]
    beside = np.minimum(back, part(table.weights)) * size["hidden_sums"]
    back = back - (1 - SLOWDOWN) * beside
    routing, exchange = moved[wires.ROUTE] * sparse * size["load"], moved[wires.EXCHANGE]
    tensor_forward = ahead + 0.3 * exchange + 2 * routing
    tensor_backward = back + 0.6 * exchange + 2 * routing
    tensor_backward = tensor_backward + repeated * (ahead + 2 * routing)
    joined, joined_back = _joined(batch, device)
    call_s = COLLECTIVE_LAUNCHES * device["launch_s"]
    calls_forward = tensor(calls, wires.FORWARD, wires.SPARSE_FORWARD)
    calls_backward = tensor(calls, wires.BACKWARD, wires.SPARSE_BACKWARD) + repeated * calls_forward

    first, last = _ends(batch, seconds, hosts, moved, call_s)
    return _Block(
        forward=_together(
            batch, device_of[0] + joined + tensor_forward, host_of[0] + call_s * calls_forward
        ),
        backward=_together(
            batch, device_of[1] + joined_back + tensor_backward,
            host_of[1] + call_s * calls_backward,
        ),
        tensor=tensor_forward + tensor_backward,
        first=first,
        last=last,
    )  # fmt: skip


def _together(batch: Batch, device: Floats, host: Floats) -> Floats:
    """Seconds of device and host, which launches ahead or waits for every kernel."""
    return np.where(batch.sizes["blocking"] > 0, device + host, race(device, host))


def _ends(
    batch: Batch, seconds: Floats, hosts: Floats, moved: Floats, call_s: Floats
) -> tuple[Floats, Floats]:
    """Seconds of what comes before the blocks, and after them."""
    table, calls = batch.table, batch.wires.calls

    def end(part: int, slot: int) -> Floats:
        inside = table.part == part
        return _together(
            batch, table.total(seconds, inside) + moved[slot],
            table.total(hosts, inside) + call_s * calls[slot],
        )  # fmt: skip

    return end(tables.FIRST, wires.FIRST), end(tables.LAST, wires.LAST)


def _joined(batch: Batch, device: Mapping[str, Floats]) -> tuple[Floats, Floats]:
    """Seconds of joining parts of attention: of forward, and of backward with what it repeats."""
    size = batch.sizes
    one = size["joins"] * size["queries"] / batch.bandwidth(device)
    again = np.where(batch.recompute == "full", size["recompute_share"], 0.0)
    forward = one * RING_FORWARD_BYTES
    return np.asarray(forward), np.asarray(one * RING_BACKWARD_BYTES + again * forward)


def _assemble(
    batch: Batch, block: _Block, moved: Floats, device: Mapping[str, Floats],
    stack: Mapping[str, Floats],
) -> Times:  # fmt: skip
    size = batch.sizes
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
    # Messages forward and backward, that nothing hides.
    passes = 2 * (size["microbatches"] * size["chunks"] + size["pp"] - 1)
    sends = moved[wires.SEND] * passes
    bandwidth = batch.bandwidth(device)
    data = _data(batch, block, moved, stack["overlap"]) + _copies(batch) / bandwidth
    update = size["updated"] * size["update_bytes"] / bandwidth
    compute_s = busiest * size["microbatches"]
    layers = np.where(alone, size["layers"], size["most_layers"])
    return Times(
        step_s=compute_s + bubble + sends + data + update + size["step_s"],
        compute_s=compute_s, bubble_s=bubble,
        tensor_s=block.tensor * layers * size["microbatches"],
        send_s=sends, data_s=data, update_s=update,
    )  # fmt: skip


def _data(batch: Batch, block: _Block, moved: Floats, overlap: Floats) -> Floats:
    """Data-parallel collectives: what of them shows, and what the hidden part slows down."""
    size = batch.sizes
    layers = np.where(size["pp"] <= 1, size["layers"], size["most_layers"])
    forward, backward = layers * block.forward, layers * block.backward

    def shown(spent: Floats, beside: Floats) -> Floats:
        """What a collective adds to the computation beside it; see `pricing.ProgramCost.task`."""
        hidden = np.minimum(spent * overlap, beside)
        return np.asarray(spent - hidden + SLOWDOWN * hidden)

    # ZeRO-3: weights gathered block by block in every microbatch, gradients reduced.
    gather, reduce = moved[wires.GATHER], moved[wires.REDUCE]
    again = np.where(size["regather"] > 0, gather, 0.0) + reduce
    edges = (gather + reduce) / layers  # the first gather and the last sum have nothing beside them
    sharded = (shown(gather, forward) + shown(again, backward) + edges) * size["microbatches"]
    # Others: gradients summed beside the last backward (ZeRO-2: every one), weights handed on.
    often = np.where(size["zero"] == 2, size["microbatches"], 1)
    # A reduce to one rank passes everything along a chain, where a ring keeps a part.
    rooted = moved[wires.SUM] * size["shards"] / np.maximum(size["shards"] - 1, 1)
    summed = np.where(size["rooted"] > 0, rooted, shown(moved[wires.SUM], backward))
    plain = summed * often + moved[wires.SPREAD]
    plain = plain + moved[wires.BROADCAST] + size["broadcasts"] * BROADCAST_S
    return np.where(size["zero"] == 3, sharded, plain)


def _copies(batch: Batch) -> Floats:
    """Bytes of gradients and weights that are copied or added, in kernels of their own."""
    size = batch.sizes
    often = size["microbatches"]
    each = size["shard_copies"] * often
    plain = size["accumulate_bytes"] * (often - 1) + size["flatten_bytes"] * size["shared"]
    plain = plain + np.where(size["rooted"] > 0, REDUCE_COPIES * often, 0.0)
    return np.asarray(size["params"] * np.where(size["zero"] == 3, each, plain))
