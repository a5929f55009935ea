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


class _Runner:
    """A plan on this rank, ready to be measured.

    Args:
        comm: The ranks.
        name: Of `models`.
        plan: The plan, as JSON.
        models: What can be run.
    """

    def __init__(self, comm: Communicator, name: str, plan: str, models: Models) -> None:
        model, inputs = models[name]()
        traced = trace(model, inputs, {}, None)
        others = tensors_alive()  # kept, so that no new storage takes the place of one of them
        known = {item.untyped_storage()._cdata for item in others}
        options = CompileOptions(plan=Plan.from_json(plan), optimizer="adamw")
        self.comm, self.inputs = comm, inputs
        self.compiled = CompiledModel(model, comm, options, traced)
        self.steps: list[float] = []
        self.cpu: list[float] = []
        for _ in range(2):
            self.compiled.step(*inputs)
        tracker = Tracker([*model.parameters(), *model.buffers()])
        mine = [item for item in tensors_alive() if item.untyped_storage()._cdata not in known]
        tracker.watch(mine)
        tracker.watch(inputs)
        del mine, others
        self.peak_bytes = min(self._peak_bytes(tracker) for _ in range(2))

    def _peak_bytes(self, tracker: Tracker) -> int:
        """Most live bytes in a step."""
        self.comm.barrier()
        tracker.peak_bytes = tracker.live_bytes
        with tracker:
            self.compiled.step(*self.inputs)
        return tracker.peak_bytes

    def step(self) -> None:
        """A step against the clock."""
        self.comm.barrier()
        begun, begun_cpu = time.perf_counter(), time.process_time()
        self.compiled.step(*self.inputs)
        self.steps.append(time.perf_counter() - begun)
        self.cpu.append(time.process_time() - begun_cpu)

    @property
    def measured(self) -> Measured:
        """All of it."""
        return Measured(
            steps_s=tuple(self.steps),
            cpu_s=statistics.median(self.cpu),
            peak_bytes=self.peak_bytes,
        )


def run_steps(
    comm: Communicator, plans: Sequence[tuple[str, str]], count: int, models: Models = MODELS
) -> list[Measured]:
    """What every rank runs: steps that count live bytes, then some against the clock.

    The plans take turns, a step each: what slows the machine down for some seconds then meets one
    step of many plans, and not all steps of one.

    Args:
        comm: The ranks.
        plans: Name of the model, and plan as JSON, of each.
        count: Steps of each against the clock.
        models: What can be run.
    """
    runners = []
    for name, plan in plans:
        runners.append(_Runner(comm, name, plan, models))
    gc.collect()
    comm.report(f"{len(plans)} plans are compiled")
    for number in range(count):
        for runner in runners:
            runner.step()
        comm.report(f"round {number + 1} of {count}")
    return [runner.measured for runner in runners]


def run_all(cases: Sequence[Case], steps: int) -> dict[str, Measured]:
    """Measure all cases."""

    def told(rank: int, value: str) -> None:
        if rank == 0:
            print(f"{count} ranks: {value}", flush=True)

    found = {}
    for count in sorted({case.ranks for case in cases}):
        chosen = [case for case in cases if case.ranks == count]
        plans = [(case.model, case.plan().to_json()) for case in chosen]
        with LocalRanks(count) as ranks:
            rows = ranks.run(run_steps, plans, steps, on_report=told)
        for case, *of_ranks in zip(chosen, *rows, strict=True):
            found[case.name] = over_ranks(of_ranks)
    return found
