"""Steps of plans on local ranks: against the clock, and counting live bytes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.plan.plan import Plan
from autopar.runtime.comm import Communicator
from autopar.runtime.compiled import CompiledModel, CompileOptions
from autopar.runtime.launch import LocalRanks
from autopar.runtime.programs.measure import Tracker
from autopar.trace import trace
from tests.bench.prediction_plans import MODELS, Case

Models = Mapping[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Some steps of one rank, or of all.

    Attributes:
        steps_s: Seconds of each step; of all ranks those of the slowest.
        cpu_s: CPU seconds of a step, the median; of all ranks their sum.
        peak_bytes: Most bytes of live tensors in a step, inputs included.
    """

    steps_s: tuple[float, ...]
    cpu_s: float
    peak_bytes: int

    @property
    def step_s(self) -> float:
        """The median step."""
        return statistics.median(self.steps_s)


def over_ranks(ranks: Sequence[Measured]) -> Measured:
    """What all ranks take together."""
    return Measured(
        steps_s=tuple(map(max, zip(*(rank.steps_s for rank in ranks), strict=True))),
        cpu_s=sum(rank.cpu_s for rank in ranks),
        peak_bytes=max(rank.peak_bytes for rank in ranks),
    )


def tensors_alive() -> list[Tensor]:
    """Every tensor that Python knows of in this process."""
    gc.collect()
    return [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]


def run_steps(
    comm: Communicator, name: str, plan: str, count: int, models: Models = MODELS
) -> Measured:
    """What every rank runs: some steps against the clock, then some that count live bytes."""
    model, inputs = models[name]()
    traced = trace(model, inputs, {}, None)
    others = tensors_alive()  # kept, so that no new storage takes the place of one of them
    known = {item.untyped_storage()._cdata for item in others}
    options = CompileOptions(plan=Plan.from_json(plan), optimizer="adamw")
    compiled = CompiledModel(model, comm, options, traced)
    for _ in range(2):
        compiled.step(*inputs)
    steps, cpu = [], []
    for _ in range(count):
        comm.barrier()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        compiled.step(*inputs)
        steps.append(time.perf_counter() - begun)
        cpu.append(time.process_time() - begun_cpu)
    tracker = Tracker([*model.parameters(), *model.buffers()])
    mine = [item for item in tensors_alive() if item.untyped_storage()._cdata not in known]
    tracker.watch(mine)
    tracker.watch(inputs)
    del mine, others
    peaks = []
    for _ in range(2):
        comm.barrier()
        tracker.peak_bytes = tracker.live_bytes
        with tracker:
            compiled.step(*inputs)
        peaks.append(tracker.peak_bytes)
    return Measured(steps_s=tuple(steps), cpu_s=statistics.median(cpu), peak_bytes=min(peaks))


def run_all(cases: Sequence[Case], steps: int) -> dict[str, Measured]:
    """Measure all cases."""
    found = {}
    for count in sorted({case.ranks for case in cases}):
        with LocalRanks(count) as ranks:
            for case in (case for case in cases if case.ranks == count):
                plan = case.plan().to_json()
                found[case.name] = over_ranks(ranks.run(run_steps, case.model, plan, steps))
                print(f"measured {case.name}: {found[case.name].step_s * 1e3:.0f} ms", flush=True)
    return found
