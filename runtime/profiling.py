"""Measures a real step: when every action of the schedule and every collective began and ended.

Actions are timed where the executor carries them out, collectives where the communicator hands
them to its backend; outside of a recording neither knows of it, and nothing is slower. On CUDA the
times are those of the device: events are put on the stream that computes, and read when the step is
over.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.plan.fingerprint import choices_digest
from autopar.plan.plan import Plan
from autopar.runtime.comm import Communicator, Ranks
from autopar.runtime.engine import Engine
from autopar.runtime.handles import Handle
from autopar.schedules.actions import MESSAGES, Action
from autopar.schedules.chrome import Bar, RankStep, Recording, Stream

_TIMED = (
    "_all_reduce", "_all_reduce_start", "_all_gather", "_reduce_scatter", "_all_to_all",
    "_broadcast",
)  # fmt: skip
"""Methods of a communicator that move data of a group; the last argument of those that may do so
beside computation says whether they do."""
_MAYBE_BESIDE = frozenset(("_all_gather", "_reduce_scatter", "_all_to_all"))
Mark = Any
"""A point in time: seconds of the host, or an event of the device."""


class _Clock:
    """Points in time of a rank's device."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.synchronize(device)
        self.host_s = time.perf_counter()
        self.zero = self.mark()

    def mark(self) -> Mark:
        """Now, or when the device comes to it."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        """Seconds from the clock's start; on CUDA the device must have come to it."""
        return self.zero.elapsed_time(mark) / 1e3 if self.cuda else mark - self.zero


@dataclass(slots=True)
class _Open:
    """A bar whose times are not read yet."""

    name: str
    stream: Stream
    start: Mark
    end: Mark | None
    details: dict[str, Any]
    waited: Mark | None = None


class _Watched:
    """Handle of a collective whose end is noted when somebody waits for it."""

    def __init__(self, handle: Handle, bar: _Open, clock: _Clock) -> None:
        self._handle, self._bar, self._clock = handle, bar, clock

    def wait(self) -> Tensor:
        """See `Handle.wait`."""
        bar = self._bar
        if bar.end is None:
            bar.waited = self._clock.mark()
        result = self._handle.wait()
        if bar.end is None:
            bar.end = self._clock.mark()
        return result

    def done(self) -> bool:
        """See `Handle.done`."""
        return self._handle.done()


class Recorder:
    """Notes what a rank does.

    Args:
        comm: Communicator of all ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.bars: list[_Open] = []
        self.action = ""
        self.inside = False  # a collective that others are made of
        comm.barrier()
        self.clock = _Clock(comm.device)

    def act(self, action: Action, run: Callable[[], None]) -> None:
        """Carry out an action; see `autopar.runtime.execute.Executor.observe`."""
        self.action = str(action)
        stream: Stream = "message" if action.kind in MESSAGES else "compute"
        details = {"stage": action.stage, "microbatch": action.microbatch}
        bar = _Open(self.action, stream, self.clock.mark(), None, details)
        self.bars.append(bar)
        run()
        bar.end = self.clock.mark()
        self.action = ""

    def timed(self, name: str, move: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the communicator, timed."""

        def call(tensor: Tensor, ranks: Ranks, *rest: Any) -> Any:
            if self.inside:
                return move(tensor, ranks, *rest)
            beside = rest[-1] if name in _MAYBE_BESIDE else name.endswith("_start")
            bar = _Open(
                name.removeprefix("_").removesuffix("_start"), "collective", self.clock.mark(),
                None, self._details(name, tensor, ranks, bool(beside)),
            )  # fmt: skip
            self.bars.append(bar)
            self.inside = True
            try:
                result = move(tensor, ranks, *rest)
            finally:
                self.inside = False
            if isinstance(result, Tensor):
                bar.end = self.clock.mark()
                return result
            return _Watched(result, bar, self.clock)

        return call

    def _details(self, name: str, tensor: Tensor, ranks: Ranks, beside: bool) -> dict[str, Any]:
        size_bytes = tensor.numel() * tensor.element_size()
        if name == "_all_gather":
            size_bytes *= len(ranks)
        return {
            "action": self.action,
            "size_bytes": size_bytes,
            "ranks": list(ranks),
            "beside": beside,
        }

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """While this lasts, what `engine` does is noted."""
        comm = self.comm
        for name in _TIMED:  # of this communicator alone, and gone afterwards
            setattr(comm, name, self.timed(name, getattr(comm, name)))
        engine.executor.observe = self.act
        try:
            yield
        finally:
            engine.executor.observe = None
            for name in _TIMED:
                delattr(comm, name)

    def read(self) -> tuple[Bar, ...]:
        """What was noted, in seconds from the clock's start, in the order in which it began."""
        end = self.clock.mark()
        if self.clock.cuda:
            torch.cuda.synchronize(self.comm.device)
        found = []
        for item in self.bars:
            details = item.details
            stop = end if item.end is None else item.end
            if item.waited is not None and details["beside"]:
                waited_s = self.clock.seconds(stop) - self.clock.seconds(item.waited)
                details = {**details, "waited_s": round(waited_s, 9)}
            found.append(
                Bar(
                    name=item.name,
                    stream=item.stream,
                    start_s=self.clock.seconds(item.start),
                    end_s=self.clock.seconds(stop),
                    details=details,
                )
            )
        return tuple(found)


def record_step(
    engine: Engine, inputs: Mapping[str, Tensor], plan: Plan
) -> tuple[Tensor, Recording]:
    """Take a training step and measure it; every rank must call.

    The first step of all compiles programs; take one before.

    Args:
        engine: The rank.
        inputs: Full inputs of the global batch by value name.
        plan: The plan that runs.

    Returns:
        The loss, and the step of all ranks, the same on every rank.
    """
    recorder = Recorder(engine.comm)
    with recorder.watching(engine):
        loss = engine.step(inputs)
    bars = recorder.read()
    place = engine.execution.pipeline_rank(engine.comm.rank)
    mine = (platform.node(), recorder.clock.host_s, place, bars)
    everyone = engine.comm.gather_objects(mine)
    # Ranks of one machine have one clock; those of others began when the barrier let them go.
    begun: dict[str, float] = {}
    for node, host_s, _, _ in everyone:
        begun[node] = min(host_s, begun.get(node, host_s))
    ranks = tuple(
        RankStep(
            rank=rank,
            pipeline_rank=pipeline_rank,
            bars=tuple(_later(bar, host_s - begun[node]) for bar in theirs),
        )
        for rank, (node, host_s, pipeline_rank, theirs) in enumerate(everyone)
    )
    recording = Recording(
        choices=choices_digest(plan),
        device=_device_name(engine.comm.device),
        step_s=max((bar.end_s for step in ranks for bar in step.bars), default=0.0),
        ranks=ranks,
        plan=json.loads(plan.to_json()),
    )
    return loss, recording


def _later(bar: Bar, seconds: float) -> Bar:
    return Bar(
        name=bar.name,
        stream=bar.stream,
        start_s=bar.start_s + seconds,
        end_s=bar.end_s + seconds,
        details=bar.details,
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
