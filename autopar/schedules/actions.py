"""A pipeline schedule is a tuple of actions per rank.

The same data is checked, timed, drawn, priced and executed, so that what is priced is what is
run. `str` gives its text form, which `autopar.schedules.text` describes and reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from autopar.errors import PlanError

Kind = Literal[
    "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE", "UPDATE"
]  # fmt: skip

KINDS: tuple[Kind, ...] = (
    "F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE", "UPDATE",
)  # fmt: skip

SENDS: frozenset[Kind] = frozenset(("SEND_F", "SEND_B"))
RECEIVES: frozenset[Kind] = frozenset(("RECV_F", "RECV_B"))
MESSAGES = SENDS | RECEIVES
BACKWARDS: frozenset[Kind] = frozenset(("B", "I", "W"))
"""Parts of a backward."""
INPUT_GRADIENTS: frozenset[Kind] = frozenset(("B", "I"))
"""Actions that make the gradients of a stage's boundary inputs."""
WEIGHT_GRADIENTS: frozenset[Kind] = frozenset(("B", "W"))
"""Actions that make the gradients of a stage's parameters."""


class Action(NamedTuple):
    """One thing a rank does.

    A named tuple, as schedules have hundreds of thousands of them.

    Attributes:
        kind: ``F`` forward; ``B`` whole backward; ``I`` and ``W`` its halves: gradients of the
            inputs and of the parameters; ``SEND_F`` and ``RECV_F`` a boundary activation,
            ``SEND_B`` and ``RECV_B`` its gradient; ``REDUCE`` finishes the gradients of a stage
            after the last backward of an update; ``UPDATE`` is its optimizer step.
        stage: The stage that acts; of a message the stage at this rank's end.
        microbatch: Number of the microbatch; of ``REDUCE`` and ``UPDATE`` that of the update.
        peer: Of a message the stage at the other end.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        sign = ">" if self.kind in SENDS else "<"
        end = "" if self.peer is None else f"{sign}{self.peer}"
        return f"{self.stage}{self.kind}{self.microbatch}{end}"

    def __repr__(self) -> str:
        return str(self)

    @property
    def counterpart(self) -> Action:
        """The receive of a send, the send of a receive."""
        assert self.peer is not None
        return Action(_COUNTERPARTS[self.kind], self.peer, self.microbatch, self.stage)


_COUNTERPARTS: dict[Kind, Kind] = {
    "SEND_F": "RECV_F",
    "RECV_F": "SEND_F",
    "SEND_B": "RECV_B",
    "RECV_B": "SEND_B",
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every pipeline rank does in one training step.

    Microbatches of an update are consecutive, equal groups. Update u is computed at weights that
    are ``delays[stage]`` updates old: a delay of 0 is ordinary training; PipeDream and
    PipeDream-2BW (arXiv 1806.03377, 2006.09503) have others. Delays reach back over the start of
    a step, so that training does not depend on how microbatches are grouped into steps.

    Attributes:
        name: What it is called.
        actions: For each pipeline rank what it does, in order.
        stage_ranks: For each stage its pipeline rank.
        num_microbatches: Microbatches in a step.
        updates: Optimizer updates in a step; 0 for a schedule of forwards only.
        delays: For each stage how many updates old the weights are that it uses; empty for 0
            everywhere.

    Raises:
        PlanError: If the counts do not fit each other.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    updates: int = 1
    delays: tuple[int, ...] = ()
    _hash: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise PlanError(f"schedule {self.name!r} {problem}")

    def __hash__(self) -> int:
        """Worked out once: what is known of schedules is looked up often."""
        if not self._hash:
            self._hash.append(hash((self.name, self.actions, self.stage_ranks, self.delays)))
        return self._hash[0]

    def _problem(self) -> str | None:
        if not self.stage_ranks or set(self.stage_ranks) != set(range(len(self.actions))):
            return (
                f"has stages on the ranks {self.stage_ranks} but actions for"
                f" {len(self.actions)} ranks; every rank needs a stage"
            )
        if self.num_microbatches < 1:
            return f"has {self.num_microbatches} microbatches"
        if self.updates < 0 or (self.updates and self.num_microbatches % self.updates):
            return (
                f"cannot divide {self.num_microbatches} microbatches"
                f" equally among {self.updates} updates"
            )
        if self.delays and (len(self.delays) != len(self.stage_ranks) or min(self.delays) < 0):
            return f"has delays {self.delays} for {len(self.stage_ranks)} stages"
        return None

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.stage_ranks)

    @property
    def microbatches_per_update(self) -> int:
        """Microbatches whose gradients an update adds up."""
        return self.num_microbatches // max(1, self.updates)

    @property
    def has_messages(self) -> bool:
        """Whether sends and receives are in it already."""
        return any(action.kind in MESSAGES for row in self.actions for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages of pipeline rank `rank`, lowest first."""
        return tuple(s for s, owner in enumerate(self.stage_ranks) if owner == rank)

    def update_of(self, microbatch: int) -> int:
        """The update that gets the gradient of `microbatch`."""
        return microbatch // self.microbatches_per_update

    def delay(self, stage: int) -> int:
        """How many updates old the weights are that `stage` uses."""
        return self.delays[stage] if self.delays else 0

    def version(self, stage: int, microbatch: int, *, updates_before: int = 0) -> int:
        """The weights that forward and backward of `microbatch` use on `stage`.

        Args:
            stage: Number of the stage.
            microbatch: Number of the microbatch in the step.
            updates_before: Updates done in earlier steps.

        Returns:
            The number of updates these weights have seen since training began. The first
            updates of all have no older weights and use version 0.
        """
        return max(0, updates_before + self.update_of(microbatch) - self.delay(stage))

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.actions)

    def __str__(self) -> str:
        delays = ", delays " + " ".join(map(str, self.delays)) if self.delays else ""
        lines = [
            f"schedule {self.name}: microbatches {self.num_microbatches},"
            f" updates {self.updates}{delays}"
        ]
        for rank, row in enumerate(self.actions):
            lines.append(" ".join((f"rank {rank}:", *map(str, row))))
        return "\n".join(lines) + "\n"


def only(schedule: Schedule, kinds: Collection[Kind]) -> Schedule:
    """`schedule` with actions of `kinds` only, in the same order.

    Without backwards it has no updates: ``only(schedule, ("F",))`` is its evaluation.
    """
    trained = not BACKWARDS.isdisjoint(kinds)
    return replace(
        schedule,
        actions=tuple(
            tuple(action for action in row if action.kind in kinds) for row in schedule.actions
        ),
        updates=schedule.updates if trained else 0,
        delays=schedule.delays if trained else (),
    )
