"""Single changes of a configuration, each priced again, and which of them to make first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.check.language import language_of
from autopar.check.price import Priced, Pricer
from autopar.errors import PlanError
from autopar.imports.imported import Imported
from autopar.schedules.make import SCHEDULES
from autopar.units import format_bytes

WORTH = 0.01
"""Share of a step that a change must save to be named."""
TIGHT = 0.03
"""Room below this share of a device: what needs less memory is worth a word then."""

SPELLINGS: Mapping[str, Mapping[str, str]] = {
    "tp": {
        "megatron": "--tensor-model-parallel-size {}",
        "torchtitan": "parallelism.tensor_parallel_degree = {}",
        "deepspeed": "tensor_parallel.autotp_size: {}",
        "accelerate": "parallelism_config_tp_size: {}",
    },
    "pp": {
        "megatron": "--pipeline-model-parallel-size {}",
        "torchtitan": "parallelism.pipeline_parallel_degree = {}",
    },
    "zero": {
        "megatron": "--use-distributed-optimizer",
        "deepspeed": "zero_optimization.stage: {}",
    },
    "micro_batch": {
        "megatron": "--micro-batch-size {}",
        "torchtitan": "training.local_batch_size = {}",
        "deepspeed": "train_micro_batch_size_per_gpu: {}",
    },
    "recompute": {
        "megatron": "--recompute-granularity {}",
        "torchtitan": "activation_checkpoint.mode = {}",
        "accelerate": "fsdp_activation_checkpointing",
    },
    "chunks": {
        "megatron": "--num-virtual-stages-per-pipeline-rank {}",
        "torchtitan": "parallelism.pipeline_parallel_schedule = Interleaved1F1B",
    },
    "schedule": {"torchtitan": "parallelism.pipeline_parallel_schedule = {}"},
    "sequence_parallel": {"megatron": "--sequence-parallel"},
}  # fmt: skip
"""How frameworks write a setting, by its name and the framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A configuration that differs in one thing.

    Attributes:
        text: What differs.
        spelled: How the framework writes it; empty where that is not known.
        priced: What it takes.
        saved: Share of the step that it saves; negative if it is slower.
        saved_bytes: Bytes that it saves on the fullest device; negative if it needs more.
    """

    text: str
    spelled: str
    priced: Priced
    saved: float
    saved_bytes: int

    def line(self) -> str:
        """The change in a line."""
        fits = "" if self.priced.fits else ", does not fit"
        sign = "-" if self.saved_bytes > 0 else "+"
        memory = f"{sign}{format_bytes(abs(self.saved_bytes))}"
        named = f" ({self.spelled})" if self.spelled else ""
        return f"{self.text}{named}: {-self.saved:+.1%} time, {memory}{fits}"


def single_changes(setting: Imported, batch: int) -> Iterator[tuple[str, str, Imported]]:
    """What can be changed alone: what it is, its name, and the configuration that it makes.

    What the framework has no words for is left out.

    Args:
        setting: A configuration on its devices.
        batch: Samples of a step.
    """
    language = language_of(setting)
    for text, name, changed in _changes(setting, batch):
        if language.says(setting, changed):
            yield text, name, changed


def _changes(setting: Imported, batch: int) -> Iterator[tuple[str, str, Imported]]:
    yield from _recomputes(setting)
    yield from _degrees(setting)
    yield from _micro_batches(setting, batch)
    yield from _zeros(setting)
    yield from _schedules(setting, batch)
    if setting.tp > 1 and setting.cp == 1:
        now = setting.sequence_parallel
        text = "sequence parallelism " + ("off" if now else "on")
        yield text, "sequence_parallel", replace(setting, sequence_parallel=not now)


def _recomputes(setting: Imported) -> Iterator[tuple[str, str, Imported]]:
    part = setting.recompute_layers is not None or setting.recompute_every > 1
    now = setting.recompute or "none"
    for kind in ("none", "attention", "selective", "full"):
        if kind == now and not part:
            continue
        if {kind, now} == {"attention", "selective"} or (kind == "attention" and now == "ops"):
            continue  # two names of nearly the same
        shown = f"{now} of some layers" if part else now
        yield (
            f"recompute {shown} -> {kind}", "recompute",
            replace(setting, recompute=kind, recompute_layers=None, recompute_every=1),
        )  # fmt: skip


def _degrees(setting: Imported) -> Iterator[tuple[str, str, Imported]]:
    """A degree doubled or halved, and data ranks to match; or moved between pp and tp."""
    for name in ("tp", "pp"):
        size = getattr(setting, name)
        if size % 2 == 0:
            changed = _with(setting, **{name: size // 2})
            yield f"{name} {size} -> {size // 2}", name, changed
            other = "pp" if name == "tp" else "tp"
            more = {name: size // 2, other: getattr(setting, other) * 2}
            text = f"{name} {size} -> {size // 2} and {other} {more[other] // 2} -> {more[other]}"
            yield text, "", replace(setting, **more)
        if setting.shards is not None and setting.shards % 2 == 0:
            yield f"{name} {size} -> {2 * size}", name, _with(setting, **{name: 2 * size})


def _with(setting: Imported, **degrees: int) -> Imported:
    """The configuration with other degrees, and data ranks that fill the same devices."""
    total = setting.pp * setting.tp * (setting.shards or 1)
    changed = replace(setting, **degrees)  # type: ignore[arg-type]
    changed = replace(changed, shards=max(1, total // (changed.pp * changed.tp)))
    if changed.pp == 1:
        changed = replace(
            changed, schedule="1f1b", chunks=1, first_layers=None, last_layers=None
        )  # a single stage has neither
    if changed.tp > 1 and setting.tp == 1:
        changed = replace(changed, sequence_parallel=True in language_of(setting).sequence)
    return changed


def _micro_batches(setting: Imported, batch: int) -> Iterator[tuple[str, str, Imported]]:
    """The same batch in more or fewer microbatches."""
    share, left = divmod(batch, setting.data)
    if left or not share:
        return
    now = setting.micro_batch or share // setting.microbatches(batch)
    for size in (max(1, now // 2), 2 * now):
        if size != now and share % size == 0:
            changed = replace(
                setting, micro_batch=size, global_batch=batch, accumulation=share // size
            )
            yield f"micro batch {now} -> {size}", "micro_batch", changed


def _zeros(setting: Imported) -> Iterator[tuple[str, str, Imported]]:
    if (setting.shards or 1) * setting.cp == 1:
        return
    for stage in range(4):
        if stage != setting.zero:
            yield f"ZeRO {setting.zero} -> {stage}", "zero", replace(setting, zero=stage)


def _schedules(setting: Imported, batch: int) -> Iterator[tuple[str, str, Imported]]:
    if setting.pp == 1:
        return
    count = setting.microbatches(batch)
    wanted = [("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zb_h1", 1),
              ("zbv", 2)]  # fmt: skip
    for name, chunks in wanted:
        if (name, chunks) == (setting.schedule, setting.chunks) or name not in SCHEDULES:
            continue
        if name == "interleaved_1f1b" and count % setting.pp:
            continue
        many = name == "interleaved_1f1b"
        text = f"schedule {name}" + (f" with {chunks} chunks" if many else "")
        changed = replace(
            setting, schedule=name, chunks=chunks, first_layers=None, last_layers=None
        )
        yield text, "chunks" if many else "schedule", changed


def best_changes(now: Priced, pricer: Pricer, most: int = 6) -> tuple[Change, ...]:
    """Which changes help most.

    If the configuration does not fit, those that make it fit come first, the fastest of them in
    front, then those that lack least; else those that make it faster, and fit.

    Args:
        now: The configuration.
        pricer: Prices others.
        most: How many to name.
    """
    found: list[Change] = []
    for text, name, setting in single_changes(now.setting, pricer.batch):
        try:
            priced = pricer.price(setting)
        except PlanError:
            continue  # it cannot be carried out
        found.append(
            Change(
                text=text,
                spelled=_spelled(now.setting.source, name, setting),
                priced=priced,
                saved=1 - priced.step_s / now.step_s,
                saved_bytes=now.over_bytes - priced.over_bytes,
            )
        )
    found = _said_once(found)
    if now.fits:
        useful = [item for item in found if item.priced.fits and item.saved > WORTH]
        return tuple(sorted(useful, key=lambda item: -item.saved)[:most])
    fitting = [item for item in found if item.priced.fits]
    if fitting:
        return tuple(sorted(fitting, key=lambda item: item.priced.step_s)[:most])
    smaller = [item for item in found if item.saved_bytes > 0]
    return tuple(sorted(smaller, key=lambda item: -item.saved_bytes)[:most])


def _said_once(changes: list[Change]) -> list[Change]:
    """Of changes that a framework writes alike the fastest that fits, if one does."""
    found: dict[str, Change] = {}
    for item in sorted(changes, key=lambda item: (not item.priced.fits, -item.saved)):
        found.setdefault(item.spelled or item.text, item)
    return [item for item in changes if found[item.spelled or item.text] is item]


_MODES = {"megatron": {"attention": "selective", "selective": "selective"},
          "torchtitan": {"attention": "selective"}}  # fmt: skip


_SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "zbv": "ZBVZeroBubble"}


def _spelled(source: str, name: str, setting: Imported) -> str:
    """How a framework writes a setting; empty where it has no word for it."""
    form = SPELLINGS.get(name, {}).get(source, "")
    value = getattr(setting, name, "") if name else ""
    if name == "schedule":
        value = _SCHEDULES.get(str(value), value)
    if name == "recompute":
        value = _MODES.get(source, {}).get(str(value), value)
    if name == "zero" and source == "megatron" and value != 1:
        return ""
    return form.format(value)
