"""Check a configuration: does it fit, how long is a step, how far is that from the best plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from autopar.check.changes import Change, best_changes
from autopar.check.language import language_of
from autopar.check.price import Priced, Pricer, gradient_bytes_of, software_of
from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Software
from autopar.errors import InputError, PlanError
from autopar.graph.ir import Graph
from autopar.imports.imported import Imported
from autopar.search import exact
from autopar.search.problem import Candidate, Problem
from autopar.units import counted, format_bytes, format_seconds

SEARCH_S = 20.0
"""Seconds that the best plan is looked for."""
GAP = 0.02
OTHERS = 10
"""Runners-up that are looked at where the framework's own memory leaves the best no room."""
CLOSE = 0.005
"""Share of a step below which one plan is as fast as another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best plan that a search found, carried out by the same software.

    Attributes:
        text: The plan in a few words.
        step_s: Seconds of its step, predicted.
        device_bytes: Bytes of its fullest device, predicted.
        bound_s: No plan that was searched takes less.
        seconds: Seconds that the search took.
        complete: Whether it ended by itself.
    """

    text: str
    step_s: float
    device_bytes: int
    bound_s: float
    seconds: float
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What there is to say about a configuration.

    Attributes:
        setting: The configuration, on its devices.
        model: Name of the model.
        cluster: The cluster.
        stack: Name of the software it was priced for.
        batch: Samples of a step.
        seq_len: Tokens of a sample, if the model has such.
        now: What it takes.
        best: The best plan of those that the framework has words for; None if it was not looked
            for, or nothing fits.
        searched: Whether it was looked for.
        changes: What to change first.
        exhausted: Whether the search ended by itself without a plan.
    """

    setting: Imported
    model: str
    cluster: ClusterSpec
    stack: str
    batch: int
    seq_len: int | None
    now: Priced
    best: Best | None
    searched: bool
    changes: tuple[Change, ...]
    exhausted: bool = False

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory, predicted."""
        return self.now.fits

    def lines(self) -> Iterator[str]:
        """The report as text."""
        now, setting = self.now, self.setting
        yield f"{setting.where}: {setting.source} configuration of {self.model}, as {self.stack}"
        seq = f" of {counted(self.seq_len, 'token')}" if self.seq_len else ""
        yield f"on       {self.cluster}, {counted(self.batch, 'sample')}{seq} a step"
        yield f"plan     {describe(setting, self.batch)}"
        yield self._memory_line()
        parts = [f"{name} {format_bytes(size)}" for name, size in list(now.kinds.items())[:5]]
        yield f"         largest: {', '.join(parts)}"
        yield f"step     {format_seconds(now.step_s)} (predicted), {self._rate()}"
        yield from self._best_lines()
        yield from self._change_lines()
        if setting.remarks:
            yield "what the file says and a plan cannot hold"
            yield from (f"  {remark.text()}" for remark in setting.remarks)
        if setting.ignored:
            yield setting.ignored_text()

    def _memory_line(self) -> str:
        now = self.now
        used, room = now.device_bytes[now.fullest], now.capacity_bytes[now.fullest]
        where = f"pipeline rank {now.fullest}" if len(now.device_bytes) > 1 else "every rank"
        short = (
            f"{format_bytes(-now.over_bytes)} free"
            if now.fits
            else f"{format_bytes(now.over_bytes)} too much, most of it {now.binding}"
        )
        word = "yes" if now.fits else "no"
        text = f"{format_bytes(used)} of {format_bytes(room)} on {where} (predicted), {short}"
        return f"fits     {word}: {text}"

    def _rate(self) -> str:
        per_s = self.batch / self.now.step_s
        if self.seq_len is None:
            return f"{per_s:.4g} samples/s"
        each = per_s * self.seq_len / self.cluster.num_devices
        return f"{per_s:.4g} samples/s, {each:.4g} tokens/s per device"

    def _best_lines(self) -> Iterator[str]:
        if self.best is None:
            if self.searched:
                text = "found no plan within its time: --time-limit gives it more"
                if self.exhausted:
                    text = "looked at all plans, and none fits"
                yield f"best     not known: the search {text}"
            return
        yield f"best     {self._far(self.best)}"

    def _far(self, best: Best) -> str:
        """How far the configuration is from the best plan that a search has found."""
        ratio = self.now.step_s / best.step_s - 1
        found = f"{format_seconds(best.step_s)} (predicted): {best.text}"
        length = format_seconds(best.seconds)
        ended = f"search of {length}" if best.complete else f"search stopped after {length}"
        if not self.fits:
            word = "less" if ratio > 0 else "more"
            share = f"{abs(best.step_s / self.now.step_s - 1):.1%} {word} time than this one would"
            return f"{found}; it fits, and takes {share}, which does not fit ({ended})"
        if ratio > CLOSE:
            return f"{found}; this one takes {ratio:+.1%} ({ended})"
        stopped = "" if best.complete else f", stopped after {length},"
        return f"the search{stopped} found nothing faster; its fastest takes {found}"

    def _change_lines(self) -> Iterator[str]:
        if not self.changes:
            yield "change   nothing alone makes it better" + (
                "" if self.fits else ", or makes room"
            )
            return
        yield "what to change first (predicted, each alone)"
        yield from (f"  {i}. {item.line()}" for i, item in enumerate(self.changes, 1))

    def to_data(self) -> dict[str, Any]:
        """The report as a JSON document."""
        now, setting = self.now, self.setting
        return {
            "config": setting.where, "source": setting.source, "model": self.model,
            "cluster": str(self.cluster), "software": self.stack, "global_batch_size": self.batch,
            "seq_len": self.seq_len, "plan": describe(setting, self.batch),
            "mesh": dict(setting.mesh().axes),
            "constraints": setting.constraints(self.batch),
            "fits": now.fits,
            "predicted": {
                "step_s": now.step_s,
                "device_bytes": list(now.device_bytes),
                "capacity_bytes": list(now.capacity_bytes),
                "fullest_rank": now.fullest,
                "bytes_by_kind": dict(now.kinds),
            },
            "best": None if self.best is None else {
                "plan": self.best.text, "step_s": self.best.step_s,
                "device_bytes": self.best.device_bytes, "bound_s": self.best.bound_s,
                "complete": self.best.complete, "seconds": self.best.seconds,
                "faster": self.now.step_s / self.best.step_s - 1 > CLOSE,
            },
            "searched": self.searched, "exhausted": self.exhausted,
            "changes": [
                {
                    "change": item.text, "setting": item.spelled,
                    "step_s": item.priced.step_s, "fits": item.priced.fits,
                    "device_bytes": max(item.priced.device_bytes),
                }
                for item in self.changes
            ],
            "not_held": [
                {"name": r.name, "value": r.value, "line": r.line, "meaning": r.meaning}
                for r in setting.remarks
            ],
            "ignored": list(setting.ignored),
        }  # fmt: skip


def describe(setting: Imported, batch: int) -> str:
    """A configuration on its devices in a few words."""
    parts = [str(setting.mesh())]
    if setting.tp > 1:
        parts.append(setting.strategy)
    parts.append(f"ZeRO {setting.zero}")
    count = setting.microbatches(batch)
    parts.append(
        f"{count} microbatch{'es' if count > 1 else ''} of {batch // count // setting.data}"
    )
    if setting.pp > 1:
        chunks = f" of {setting.chunks} chunks" if setting.chunks > 1 else ""
        parts.append(f"{setting.schedule}{chunks}")
    again: str = setting.recompute or "none"
    if setting.recompute_layers is not None:
        again += f" of {counted(setting.recompute_layers, 'layer')} a stage"
    elif setting.recompute_every > 1:
        again += f" of every {setting.recompute_every} layers one"
    return ", ".join((*parts, f"recompute {again}", setting.precision))


def check(
    imported: Imported,
    graph: Graph,
    loss: str | None,
    cluster: ClusterSpec,
    *,
    model: str,
    batch: int,
    seq_len: int | None = None,
    stack: str | None = None,
    search_s: float | None = SEARCH_S,
    on_progress: Callable[[str], None] | None = None,
) -> Report:
    """Check a configuration of another framework.

    Args:
        imported: The configuration.
        graph: The traced model.
        loss: Name of its loss.
        cluster: The cluster.
        model: Name of the model, for people.
        batch: Samples of a step.
        seq_len: Tokens of a sample, if the model has such.
        stack: Name of other software than the configuration's; see `autopar.cost_models.software`.
        search_s: Seconds for which to look for the best plan; None not to.
        on_progress: Called with a line about what is going on.

    Raises:
        PlanError: If the configuration contradicts itself, the model or the cluster.
        InputError: If the model has no loss.
    """
    if loss is None:
        raise InputError(
            "a check needs the model's loss: without one there is no backward to price",
            expected="a model that returns a scalar, or loss_fn",
        )
    setting = imported.on(cluster.num_devices)
    setting.microbatches(batch)  # says what does not divide
    software = software_of(setting, cluster, stack)
    pricer = Pricer(graph, loss, cluster, software, batch, gradient_bytes_of(setting, stack))
    now = pricer.price(setting)
    if on_progress is not None:
        on_progress("single changes")
    changes = best_changes(now, pricer)
    best, exhausted = None, False
    if search_s is not None:
        best, exhausted = _best(pricer, setting, loss, software, search_s, on_progress)
    return Report(
        setting=setting, model=model, cluster=cluster, stack=stack or setting.stack, batch=batch,
        seq_len=seq_len, now=now, best=best, searched=search_s is not None, changes=changes,
        exhausted=exhausted,
    )  # fmt: skip


def _best(
    pricer: Pricer,
    setting: Imported,
    loss: str,
    software: Software,
    search_s: float,
    on_progress: Callable[[str], None] | None,
) -> tuple[Best | None, bool]:
    """The best plan that fits with the framework's own memory, and whether there is none."""
    try:
        problem = Problem(
            pricer.graph, loss, pricer.cluster, software=software,
            allowed=language_of(setting).allowed(pricer.cluster.num_devices),
        )  # fmt: skip
        result = exact.search(
            problem, gap=GAP, op_level=False, time_limit_s=search_s, on_progress=on_progress
        )
    except PlanError:
        return None, True  # the space is empty
    if result.best is None:
        return None, result.certificate.complete
    for outcome in (result.best, *result.alternatives[:OTHERS]):
        priced = _as_priced(pricer, problem, setting, outcome.candidate)
        if priced.fits:
            found = Best(
                text=outcome.candidate.point.text(),
                step_s=priced.step_s,
                device_bytes=max(priced.device_bytes),
                bound_s=result.certificate.bound_s,
                seconds=result.seconds,
                complete=result.certificate.complete,
            )
            return found, False
    return None, False


def _as_priced(pricer: Pricer, problem: Problem, setting: Imported, candidate: Candidate) -> Priced:
    """A candidate of the search with the memory that is the framework's own."""
    point = candidate.point
    like = replace(setting, zero=point.zero, pp=point.pipeline)
    return pricer.priced(like, problem.plan(candidate), problem.predict(candidate))
