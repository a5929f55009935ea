"""Live bytes of a pipeline rank over a step, event by event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from autopar.cost_models.buckets import Bucket
from autopar.cost_models.events import Event, EventKinds
from autopar.cost_models.frames import Frames
from autopar.cost_models.live import Change, Live
from autopar.cost_models.stages import StageModel
from autopar.cost_models.static import Static
from autopar.cost_models.tape.liveness import Summary, kept_for_later, summarise
from autopar.cost_models.tape.tensors import Memory
from autopar.cost_models.tape.zero import bucket_bytes


class Walk:
    """Live bytes of a rank, event by event.

    Args:
        mine: Its stages.
        held: What they hold at all times.
        resident: Bytes by kind before the step.
        asynchronous: Whether the schedule has updates among its actions.
        delayed: Stages whose forward reads older weights.
        gloo: Whether collectives need the memory that gloo needs; else NCCL's.
        moments: Whether to note live bytes action by action.
    """

    def __init__(
        self,
        mine: Mapping[int, StageModel],
        held: Mapping[int, Static],
        resident: Mapping[str, int],
        *,
        asynchronous: bool,
        delayed: frozenset[int],
        gloo: bool,
        moments: bool,
    ) -> None:
        self.mine, self.held = mine, held
        self.asynchronous, self.delayed, self.gloo = asynchronous, delayed, gloo
        # Of delayed stages: updates done, the update of the last microbatch begun, and whether that
        # one's weights are kept for nobody else.
        self.updates = dict.fromkeys(delayed, 0)
        self.begun = dict.fromkeys(delayed, -1)
        self.outdated = set(delayed)
        # Losses of the step before are gone when it starts; its seed is there.
        self.live = Live({**resident, "outputs": 0, "temporary": 8}, notes=moments)
        self.frames = Frames(mine, self.live)
        self.variants: dict[tuple[int, str, bool, frozenset[Memory]], Change] = {}

    def run(self, events: Iterable[Event]) -> Live:
        """Walk over all events of a step."""
        action = -1
        for event in events:
            if event.action != action:
                action = event.action
                if event.text:
                    self.live.begin(event.text)
                else:
                    self.live.end()
            self._step(event)
        self._finish()
        return self.live

    @property
    def is_plain(self) -> bool:
        """Whether what an event does depends on its kind alone: not on what came before."""
        frames = self.frames
        shared = any(frames.shared.values()) or frames.many
        return not (self.live.notes or self.asynchronous or self.delayed or shared)

    def run_kinds(self, events: EventKinds) -> Live:
        """The same as `run` where it is plain: each kind of event is looked at once."""
        live, changes = self.live, []
        for event in events.examples:
            self.live = self.frames.live = live.apart()
            self._step(event)
            changes.append(self.live)
        self.live = self.frames.live = live
        live.follow(changes, events.numbers)
        self._finish()
        return live

    def _step(self, event: Event) -> None:
        stage, way, peer, microbatch = event.stage, event.what, event.peer, event.microbatch
        if event.kind == "run":
            self._run(event)
        elif event.kind == "reduce":
            self._reduce(stage)
        elif event.kind == "update":
            if self.asynchronous:
                self._update(stage)
        elif event.kind == "send":
            self.frames.send(stage, way, peer, microbatch)
        elif event.kind == "release":
            self.frames.release(stage, way, peer, microbatch)
        elif event.kind == "post":
            self.frames.post(stage, way, peer)
        else:
            self.frames.receive(stage, way, peer, microbatch)

    def _finish(self) -> None:
        """What follows the actions: the optimizer step, unless they have some."""
        self.live.end()
        self._sum_shared()
        self.live.begin("update")
        self._update_all()
        self.live.begin("")

    def _sum_shared(self) -> None:
        self.live.look(self._shared_bytes(), "collective", "sum over stages")

    def _update_all(self) -> None:
        if not self.asynchronous:
            for stage in self.held:
                self._update(stage)

    def _shared_bytes(self) -> int:
        """What it takes to sum gradients of what several stages use."""
        users: Counter[str] = Counter()
        sizes: dict[str, int] = {}
        for model in self.mine.values():
            for item in model.parameters:
                if item.users > 1 and item.made_by:
                    users[item.name] += 1
                    sizes[item.name] = item.size_bytes
        # Those of one rank are stacked and added up, that of one stage is summed over ranks.
        parts = (size * (users[name] + 1 if users[name] > 1 else 1) for name, size in sizes.items())
        return max(parts, default=0)

    def _update(self, stage: int) -> None:
        static = self.held[stage]
        if stage in self.delayed:
            # A new version; the oldest stays until the next microbatch begins with another.
            self.live.look(static.version + static.update, where="update")
            self.updates[stage] += 1
            self._drop_outdated(stage)
        else:
            self.live.look(static.update, where="update")
        if not self.asynchronous:
            self.live.add("gradients", -reduced_bytes(self.mine[stage]))

    def _run(self, event: Event) -> None:
        stage, kind = event.stage, event.what
        if kind == "F" and stage in self.delayed:
            self.begun[stage] = event.update
            self._drop_outdated(stage)
        if stage in self.frames.local:
            held, rest = self.frames.take(stage, kind, event.microbatch)
            self.live.change(self._change(stage, kind, event.last, held), f"{stage}{kind}")
            self.live.add("boundary", -rest)
            self.frames.give(stage, kind, event.microbatch)
        else:
            self.live.change(self._change(stage, kind, event.last), f"{stage}{kind}")
        if event.last:
            # Results of reductions under way, or the rows that gloo exchanges.
            started = self._started(stage, kind)
            size = sum(b.size_bytes if self.gloo else b.shard_bytes for b in started)
            self.live.add("collective", size)

    def _drop_outdated(self, stage: int) -> None:
        """Count a version of the weights that only the last microbatch begun still names."""
        now = self.begun[stage] < self.updates[stage]
        if now != (stage in self.outdated):
            self.live.add("parameters", self.held[stage].version * (1 if now else -1))
            self.outdated ^= {stage}

    def _started(self, stage: int, kind: str) -> list[Bucket]:
        """Buckets of ZeRO-1 that the last program of a kind starts to reduce."""
        return [b for b in self.mine[stage].buckets if b.zero == 1 and b.made_by == kind]

    def _change(
        self, stage: int, kind: str, last: bool, held: frozenset[Memory] = frozenset()
    ) -> Change:
        """What a program does, while others hold some of the memory that it takes."""
        key = (stage, kind, last, held)
        found = self.variants.get(key)
        if found is not None:
            return found
        model = self.mine[stage]
        summary = model.summaries[kind]
        summary = self._summary(stage, kind, last, held)
        start, peak, end = Counter(summary.start), Counter(summary.peak), Counter(summary.end)
        # New versions of buffers take the place of the old, which backward may still want.
        end["buffers"] = model.version_bytes if kind == "F" else 0
        if kind == ("W" if "W" in model.summaries else "B"):
            start["buffers"] += model.version_bytes
            peak["buffers"] += model.version_bytes
        found = self.variants[key] = Change(start, peak, end, summary.where)
        return found

    def _summary(self, stage: int, kind: str, last: bool, held: frozenset[Memory]) -> Summary:
        model = self.mine[stage]
        started = self._started(stage, kind) if last else []
        if not held and not started:
            return model.summaries[kind]
        key = (kind, bool(started) and self.gloo, bool(started), held)
        found = model.variants.get(key)
        if found is None:
            stays = kept_for_later(model.programs)[kind]
            extra = model.buckets_live.get(kind)
            if started:
                extra = bucket_bytes(model.programs, kind, started, exchanges_rows=self.gloo)
            found = model.variants[key] = summarise(model.programs, kind, held | stays, extra)
        return found

    def _reduce(self, stage: int) -> None:
        for bucket in self.mine[stage].buckets:
            if bucket.zero != 1:
                continue
            if self.gloo:  # rows are added up into new memory
                self.live.add("gradients", bucket.shard_bytes)
                self.live.add("collective", -bucket.size_bytes)
            else:
                self.live.add("collective", -bucket.shard_bytes)
                self.live.add("gradients", bucket.shard_bytes)
            if self.asynchronous:  # it takes the place of that of the update before
                self.live.add("gradients", -bucket.shard_bytes)


def reduced_bytes(model: StageModel) -> int:
    """Bytes of the shards of gradients that ZeRO-1 makes for an update."""
    return sum(bucket.shard_bytes for bucket in model.buckets if bucket.zero == 1)
