"""Which rows count, which belong together, and which are held out together.

A random split leaks: neighbouring plans of one model on one cluster share all that the constants
could learn. So whole families are held out, and rows that say the same are counted once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_models.published.jobs import Job
from autopar.cost_models.published.rows import Row

FOLDS = 3
SALTS = ("a", "b", "c")

SET_APART = {
    "sailor-GPT-NEO-N4_N4_D4": "mislabelled: layers, time and memory are those of OPT-350M",
    "titan-async-llama3-70b-float8rowwise-0": "its source calls the measurement abnormal",
    "titan-async-llama3-70b-float8rowwise-1": "its source calls the measurement abnormal",
    "titan-async-llama3-8b-float8rowwise-0": "its source calls the measurement abnormal",
    "titan-async-llama3-8b-float8rowwise-1": "its source calls the measurement abnormal",
    "vtrain-multi-96L12288h-g512-b1536-mb2-t4d4p32#2": "the same plan measured a second time",
    "vtrain-multi-30L3072h-g64-b512-mb64-t8d8p1": "twice the time of half its micro batch",
    "bloom-182B-13824h78L-t4p12d8-mb1-b2048": "30 % above all its neighbours",
    "bloom-177B-12288h96L-t8p6d8-mb4-b2048#3": "30 % above all its neighbours",
}
"""Rows that are predicted and shown, but neither fitted nor counted, and why."""

REPORT_ONLY = {
    "vtrain-single": "composed by a simulator: linear in layers and microbatches to the nanosecond",
    "megatron-golden-tiny": "toy sizes, bound by launches",
    "alpa-intra": "one device generation, one row",
    "alpa-e2e": "plans chosen by a search and not stated",
    "bigscience-v100": "its source warns of a spread of 40 % from run to run",
    "deepspeed-azure": "read off bar charts",
    "colossalai": "rows contradict themselves",
}
"""Sources whose step times are shown apart from the others, and why."""


def family(job: Job) -> str:
    """The model and kind of cluster that a job belongs to, as text: source, sizes, device.

    How many devices there are is left out: runs of a model on 64 and on 128 devices of one cluster
    are of one family.
    """
    config = job.config
    return f"{job.group}/{config.layers}x{config.hidden}/{job.hardware.device}"


def fold(name: str, salt: str, folds: int = FOLDS) -> int:
    """The fold that holds out the family called `name`: a hash, so that nobody chose it."""
    return int(hashlib.sha256(f"{salt}:{name}".encode()).hexdigest(), 16) % folds


def distinct(rows: Sequence[Row], jobs: Sequence[Job]) -> list[int]:
    """Places of the rows that are left when each job with the same measured time counts once."""
    seen: set[object] = set()
    kept = []
    for place, (row, job) in enumerate(zip(rows, jobs, strict=True)):
        time = row.step_time_s
        same = (replace(job, id="", assumed=()), None if time is None else round(time, 3))
        if same not in seen:
            seen.add(same)
            kept.append(place)
    return kept


def counts(row: Row) -> bool:
    """Whether the row's step time counts in the totals."""
    return row.id not in SET_APART and row.group not in REPORT_ONLY
