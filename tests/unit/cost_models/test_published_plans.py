"""Published jobs as plans of this package: the simulation and the closed form price them alike."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from autopar import api
from autopar.cost_models.evaluate import Evaluator, Software
from autopar.cost_models.hardware import load_device
from autopar.cost_models.published.features import work_of
from autopar.cost_models.published.jobs import Job, read_job
from autopar.cost_models.published.price import Batch
from autopar.cost_models.published.rows import Row, read_rows
from autopar.cost_models.published.wires import cluster_of
from autopar.cost_models.software import SLOWDOWN, implementation_of, stack
from autopar.presets.registry import build_decoder
from autopar.trace import trace

SHORT = (
    ("foundry-a100_80gb-760m-s1024-g8-mb48-amp_bf16", 2),
    ("vtrain-multi-40L6144h-g256-b1024-mb4-t2d32p4", 1),
)
LONG = (
    ("foundry-a100_40gb-13b-s512-g8-mb16-bf16", 4),
    ("foundry-h100_80gb-7b-s8192-g8-mb8-amp_bf16", 4),
    ("vtrain-multi-30L3072h-g64-b512-mb8-t8d8p1", 4),
    ("vtrain-multi-30L3072h-g64-b512-mb2-t4d16p1", 4),
    ("vtrain-multi-96L12288h-g512-b1536-mb2-t4d8p16", 1),
    ("flagperf-llama3-8b-h100-p1d4t2", 4),
    ("vtrain-multi-40L6144h-g256-b1024-mb2-t4d32p2", 2),
    ("flagperf-paddle-gpt3-6.7b-80-t2p1z1", 4),
    ("flagperf-paddle-gpt3-6.7b-80-t2p4z1", 2),
    ("flagperf-paddle-gpt3-13b-80-t2p1z1", 4),
    ("titan-old-a100-llama3-8b-0", 4),
    ("titan-async-llama3-70b-bf16-0", 3),
    ("flagperf-llama2-70b-h800-t8p4", 2),
)
"""Row, and blocks of a stage."""
AS_HERE = {
    "scatter_messages": False, "separate_bias": False, "tensor_copies": False,
    "fused_rotary": False,
}  # fmt: skip
"""Messages as this package sends them, and no kernels but those of the graph."""


@functools.cache
def rows() -> dict[str, Row]:
    return {row.id: row for row in read_rows()}


def shorter(row: Row, layers: int) -> Job:
    """The job with few layers a stage and few microbatches, which trace and schedule faster."""
    job = read_job(row)
    stages = job.pp * job.chunks
    count = min(job.microbatches, 2 * job.pp if job.pp > 1 else 2)
    return replace(
        job,
        stack=replace(job.stack, **AS_HERE),
        config=replace(job.config, layers=layers * stages),
        stage_layers=(layers,) * stages,
        global_batch=count * job.dp * job.micro_batch,
    )


def tolerance(job: Job) -> tuple[float, float]:
    """By how much the plan of this package may be cheaper, and dearer.

    Frameworks run whole blocks again; this package leaves out the last product, whose result
    backward does not need (8 of the 24 units of work of a GPT's block, done four times), and with
    it the sum over tensor ranks.
    """
    again = 0.89 if job.tp > 1 else 0.92
    return (again if job.recompute == "full" else 0.96), 1.04


def simulated(job: Job) -> float:
    """Seconds of a step of the plan that says what the job does."""
    config = replace(job.config, dropout=0.1) if job.stack.dropout else job.config
    model, args, kwargs = build_decoder(config, batch=job.global_batch, seq=job.seq)
    strategy = "megatron_sp" if job.sequence_parallel else "megatron" if job.tp > 1 else "ddp"
    constraints = [strategy, f"microbatches={job.microbatches}"]
    if job.pp > 1:
        interleaved = f"schedule=interleaved_1f1b,chunks={job.chunks}"
        constraints.append(interleaved if job.chunks > 1 else "schedule=1f1b")
    constraints += [f"zero={job.zero}"] if job.zero and job.dp > 1 else []
    constraints += ["recompute=full"] if job.recompute == "full" else []
    axes = (("pp", job.pp), ("dp", job.dp), ("tp", job.tp))
    mesh = ",".join(f"{name}={size}" for name, size in axes if size > 1) or "dp=1"
    traced = trace(model, args, kwargs, None)
    plan = api.plan(model, None, args, mesh=mesh, constraints=",".join(constraints))
    cluster = cluster_of(job)
    software = Software.of(cluster.hardware(), "mixed_adamw", job.stack.name)
    return Evaluator(traced.graph, traced.loss, cluster, software).evaluate(plan).step_s


def check(name: str, layers: int) -> None:
    job = shorter(rows()[name], layers)
    ratio = simulated(job) / float(Batch([job], [work_of(job)]).price().step_s[0])
    low, high = tolerance(job)
    assert low <= ratio <= high


@pytest.mark.parametrize(("name", "layers"), SHORT)
def test_a_plan_costs_what_the_published_job_does(name, layers):
    check(name, layers)


@pytest.mark.long
@pytest.mark.parametrize(("name", "layers"), LONG)
def test_many_plans_cost_what_published_jobs_do(name, layers):
    check(name, layers)


def test_a_stack_decides_how_a_plan_is_priced():
    device = load_device("H100-SXM")
    foundry = Software.of(device, "mixed_adamw", "llm-foundry")
    known = stack("llm-foundry")
    assert foundry.implementation == implementation_of(known)
    assert foundry.speed.time_factor == known.time_factor
    assert foundry.speed.overlap == known.overlap
    assert foundry.speed.element_factor == known.element_factor
    assert foundry.speed.slowdown == SLOWDOWN
    assert foundry.speed.attention == known.attention == "flash1"
    assert foundry.context_bytes == known.context_bytes
    assert foundry.reserved_factor == known.reserved_factor
    assert Software.of(device).implementation.device == "cuda"


def test_formats_and_the_attention_of_a_device_are_inputs():
    hopper, ampere = load_device("H100-SXM"), load_device("A100-80-SXM")
    narrow = Software.of(hopper, "mixed_adamw", "mcore", formats={"bfloat16": "fp8"})
    assert narrow.speed.formats == {"float32": "tf32", "bfloat16": "fp8"}
    assert Software.of(hopper, formats={"bfloat16": "fp8"}).speed.formats == {"bfloat16": "fp8"}
    assert narrow.speed.attention == "flash3"  # cuDNN's
    assert Software.of(ampere, "mixed_adamw", "mcore").speed.attention == "flash2"
