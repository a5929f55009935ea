"""What a plan's actions take, in the form in which a step is simulated again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models.sharing import faster
from autopar.cost_models.simulate import Task, Timeline, simulate
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.communicate import Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All that the simulator is told of a plan beside its schedule.

    Attributes:
        tasks: What an action asks of its rank, by stage, kind of action, and whether it is the last
            of its kind before an update.
        messages: Seconds of a message, by the stage that sends, the one that receives, and the
            kind of the send.
        edges: Pairs (from, to) of stages with a boundary tensor.
        gradient_edges: Those whose tensors get a gradient.
        slowdown: Seconds that computation loses per second of a collective beside it.
        factor: Factor on all seconds because of what idle ranks leave to others.
    """

    tasks: Mapping[tuple[int, str, bool], Task]
    messages: Mapping[tuple[int, int, str], float]
    edges: frozenset[Edge]
    gradient_edges: frozenset[Edge]
    slowdown: float = 0.0
    factor: float = 1.0

    def timeline(self, schedule: Schedule) -> Timeline:
        """When everything in a step happens.

        Args:
            schedule: The plan's schedule, without messages.
        """
        per_update = schedule.microbatches_per_update
        done: Counter[tuple[int, str]] = Counter()

        def task_of(action: Action) -> Task:
            if action.kind == "REDUCE":
                return Task()
            if action.kind == "UPDATE":
                return self.tasks[action.stage, "UPDATE", False]
            # As the runtime counts: the last to run, whatever its number.
            done[action.stage, action.kind] += 1
            last = done[action.stage, action.kind] % per_update == 0
            return self.tasks[action.stage, action.kind, last]

        def transfer_s(action: Action) -> float:
            assert action.peer is not None
            return self.messages[action.stage, action.peer, action.kind]

        found = simulate(
            schedule, task_of, transfer_s,
            edges=self.edges, gradient_edges=self.gradient_edges, slowdown=self.slowdown,
        )  # fmt: skip
        return faster(found, self.factor)
