"""What a configuration of another framework says, in the words of this package.

The degrees of parallelism become mesh axes, outermost first: ``pp`` (pipeline), ``replica`` (data
ranks over which ZeRO divides nothing), ``dp``, ``cp`` (context), ``tp``. Expert parallelism over
data ranks has no axis: it is a remark.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.errors import PlanError
from autopar.presets.config import DecoderConfig
from autopar.sharding.mesh import Mesh
from autopar.units import counted

Precision = Literal["bf16", "fp16", "fp32", "fp8"]
Recompute = Literal["none", "full", "selective", "attention", "ops"]
"""What backward computes again: nothing, whole blocks, what is large and cheap, the core of
attention, or every second product and all pointwise ops (torch's per-op checkpointing)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """A setting that a plan cannot hold.

    Attributes:
        name: The setting, as the file writes it.
        value: Its value.
        meaning: What it does there, and what is made of it here.
        line: Where it stands.
    """

    name: str
    value: str
    meaning: str
    line: int | None = None

    def text(self) -> str:
        """The remark in one line."""
        place = f"line {self.line}: " if self.line is not None else ""
        value = f" {self.value}" if self.value not in ("", "True") else ""
        return f"{place}{self.name}{value}: {self.meaning}"


def expert_remarks(name: str, size: int, line: int | None) -> tuple[Remark, ...]:
    """What is made of expert parallelism over `size` data ranks; nothing if there is none."""
    if size == 1:
        return ()
    meaning = (
        "divides experts among data ranks; plans divide them among tensor ranks, so the step is"
        " priced, and must fit, with as many experts on every data rank"
    )
    return (Remark(name=name, value=str(size), meaning=meaning, line=line),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A model that a configuration describes.

    Attributes:
        kind: ``decoder``, ``bert`` or ``t5``.
        sizes: A `DecoderConfig`, or keyword arguments of an encoder's configuration.
        name: Its name, for people.
        preset: The preset that it is, if it is one.
    """

    kind: Literal["decoder", "bert", "t5"] = "decoder"
    sizes: DecoderConfig | dict[str, Any]
    name: str
    preset: str | None = None

    @property
    def layers(self) -> int:
        """Blocks; of one side of T5."""
        if isinstance(self.sizes, DecoderConfig):
            return self.sizes.layers
        return int(self.sizes["layers"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A configuration.

    Attributes:
        source: The framework: a key of `autopar.imports.SOURCES`.
        where: The file.
        stack: The software that would run it, see `autopar.cost_models.software`.
        pp: Pipeline ranks.
        tp: Tensor-parallel ranks.
        cp: Context-parallel ranks.
        ep: Expert-parallel ranks, out of those of data; no plan has them.
        replicas: Data ranks over which ZeRO divides nothing (HSDP).
        shards: Data ranks over which it divides; None for all that are left.
        parallel: Whether the file says how many ranks each kind of parallelism has.
        devices: Devices that the file mentions.
        zero: ZeRO stage.
        stated: Of ``zero`` and ``accumulation`` what the file says in so many words, and does not
            leave to the framework.
        sequence_parallel: Whether tensor ranks split norms and shortcuts by tokens.
        micro_batch: Samples of a data rank at a time.
        accumulation: Microbatches of a step on one data rank.
        global_batch: Samples of a step.
        schedule: Schedule of the pipeline.
        chunks: Stages per pipeline rank.
        first_layers: Blocks of the first stage; None for as many as others.
        last_layers: Blocks of the last stage; None for as many as others.
        ends_count: Whether embedding and head each count as a block where stages are cut.
        recompute: What backward computes again; None if the file leaves it to the model's code.
        recompute_layers: Blocks of each stage to which that applies, or None for all.
        recompute_every: Of how many blocks one is computed again.
        seq_len: Tokens of a sample.
        precision: Number format of products.
        master_weights: Whether the optimizer has float32 moments and copies of 16-bit weights.
        gradient_bytes: Bytes of an element of a gradient; None for what the software usually has.
        optimizer: Name of the optimizer.
        compiled: Whether pointwise ops are fused by a compiler; None for what is usual.
        model: The model, if the file describes one.
        remarks: Settings that a plan cannot hold.
        ignored: Settings that say nothing about a plan.
    """

    source: str
    where: str
    stack: str
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    replicas: int = 1
    shards: int | None = None
    parallel: bool = False
    devices: int | None = None
    zero: int = 0
    stated: frozenset[str] = frozenset()
    sequence_parallel: bool = False
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    schedule: str = "1f1b"
    chunks: int = 1
    first_layers: int | None = None
    last_layers: int | None = None
    ends_count: bool = False
    recompute: Recompute | None = None
    recompute_layers: int | None = None
    recompute_every: int = 1
    seq_len: int | None = None
    precision: Precision = "bf16"
    master_weights: bool = True
    gradient_bytes: int | None = None
    optimizer: str = "adamw"
    compiled: bool | None = None
    model: Described | None = None
    remarks: tuple[Remark, ...] = ()
    ignored: tuple[str, ...] = ()

    def on(self, num_devices: int) -> Imported:
        """The configuration with its data ranks filled in for a number of devices.

        Raises:
            PlanError: If its degrees do not divide the devices.
        """
        fixed = self.pp * self.tp * self.cp
        data, left = divmod(num_devices, fixed)
        if left or not data:
            raise PlanError(
                f"{self._degrees()} takes a multiple of "
                f"{counted(fixed, 'device')}, not {num_devices}",
                expected=(
                    f"{counted(fixed * max(1, data), 'device')}, "
                    f"or degrees that divide {num_devices}"
                ),
                fix="name another cluster, or change the degrees in the file",
                where=self.where,
            )
        shards = self.shards
        if shards is None:
            shards, left = divmod(data, self.replicas)
        if left or self.replicas * shards != data:
            raise PlanError(
                f"{self._degrees()} takes "
                f"{counted(fixed * self.replicas * (self.shards or 1), 'device')},"
                f" not {num_devices}",
                expected=f"data ranks that multiply to {data}",
                where=self.where,
            )
        if data * self.cp % self.ep:
            raise PlanError(
                f"expert parallelism over {counted(self.ep, 'rank')}, "
                f"of {counted(data * self.cp, 'data rank')}",
                expected="a divisor",
                where=self.where,
            )
        return replace(self, shards=shards)

    def _degrees(self) -> str:
        named = (("pp", self.pp), ("cp", self.cp), ("tp", self.tp), ("replicas", self.replicas))
        parts = [f"{name}={size}" for name, size in named if size > 1]
        parts += [f"shards={self.shards}"] if self.shards is not None else []
        return " x ".join(parts) or "dp"

    @property
    def data(self) -> int:
        """Data ranks of a configuration that is on its devices."""
        return self.replicas * (self.shards or 1)

    def batch(self) -> int | None:
        """Samples of a step, stated or by arithmetic, on its devices."""
        if self.global_batch is not None:
            return self.global_batch
        if self.micro_batch is None:
            return None
        return self.micro_batch * self.data * (self.accumulation or 1)

    def microbatches(self, batch: int | None = None) -> int:
        """Microbatches of a step of `batch` samples, on its devices.

        Raises:
            PlanError: If the samples do not divide among data ranks and microbatches.
        """
        batch = self.batch() if batch is None else batch
        if self.micro_batch is None or batch is None:
            return self.accumulation or 1
        each = self.micro_batch * self.data
        if batch % each:
            raise PlanError(
                f"a global batch of {batch} is no multiple of micro batch {self.micro_batch} x"
                f" {self.data} data ranks",
                expected=f"a multiple of {each}",
                fix="change the batch, or the number of devices",
                where=self.where,
            )
        return batch // each

    def mesh(self) -> Mesh:
        """The mesh on its devices; axes of one rank are left out."""
        axes = (
            ("pp", self.pp), ("replica", self.replicas), ("dp", self.shards or 1), ("cp", self.cp),
            ("tp", self.tp),
        )  # fmt: skip
        return Mesh(tuple(axis for axis in axes if axis[1] > 1) or (("dp", 1),))

    def constraints(self, batch: int | None = None) -> dict[str, Any]:
        """The rest as constraints of `autopar.plan`, on its devices.

        Args:
            batch: Samples of a step, if not those of the file.
        """
        found: dict[str, Any] = {"strategy": self.strategy}
        count = self.microbatches(batch)
        found |= {"microbatches": count} if count > 1 else {}
        names = self.mesh().names
        divided = [name for name in ("dp", "cp") if name in names]
        if self.zero and divided:
            found["zero"] = {"stage": self.zero, "axes": divided}
        return found | self._time_and_memory()

    def _time_and_memory(self) -> dict[str, Any]:
        """Its pipeline, and what backward computes again, as constraints."""
        found: dict[str, Any] = {}
        if self.pp > 1:
            found["schedule"] = self.schedule
            found |= {"chunks": self.chunks} if self.chunks > 1 else {}
        if self.recompute not in (None, "none"):
            found["recompute"] = self.recompute if self.recompute in _POLICIES else "selective"
        return found

    def kept(self) -> dict[str, Any]:
        """The rest as constraints of a search, which chooses what the file leaves open.

        How many data ranks there are may be among that, so that samples of a microbatch are kept
        where the file states these, and not their number.
        """
        found: dict[str, Any] = {"tensor": self.strategy} if self.tp > 1 else {}
        if self.micro_batch is not None:
            found["micro_batch"] = self.micro_batch
        if self.accumulation is not None and (
            "accumulation" in self.stated or (self.micro_batch is None and self.accumulation > 1)
        ):
            found["microbatches"] = self.accumulation
        alone = self.parallel and self.data == 1  # nothing is divided, whatever the stage
        if self.pp > 1 and (self.first_layers is not None or self.last_layers is not None):
            ends = {"first": self.first_layers, "last": self.last_layers}
            found["stage_layers"] = {**ends, "stages": self.pp * self.chunks}
        if not alone and (self.zero or "zero" in self.stated):
            found["zero"] = self.zero
        return found | self._time_and_memory()

    @property
    def strategy(self) -> str:
        """The named strategy that its tensor ranks follow."""
        if self.tp == 1:
            return "ddp"
        return "megatron_sp" if self.sequence_parallel else "megatron"

    def stage_layers(self, layers: int) -> tuple[int, ...] | None:
        """Blocks of every stage, first to last; None if they cannot be told.

        Args:
            layers: Blocks of the model.
        """
        stages = self.pp * self.chunks
        if stages == 1:
            return (layers,)
        if self.first_layers is None and self.last_layers is None:
            whole = layers + 2 if self.ends_count else layers
            least, more = divmod(whole, stages)
            found = [least + (stage < more) for stage in range(stages)]
            if self.ends_count:
                found[0], found[-1] = found[0] - 1, found[-1] - 1
            return tuple(found) if min(found) > 0 else None
        ends = [n for n in (self.first_layers, self.last_layers) if n is not None]
        inner = stages - len(ends)
        if inner < 1 or (layers - sum(ends)) % inner:
            return None
        middle = [(layers - sum(ends)) // inner] * inner
        first = [self.first_layers] if self.first_layers is not None else []
        last = [self.last_layers] if self.last_layers is not None else []
        return tuple(first + middle + last)

    def notes(self) -> tuple[str, ...]:
        """What a plan that is made from it should say: the remarks, and what was ignored."""
        found = [f"{self.where}: {remark.text()}" for remark in self.remarks]
        if self.ignored:
            found.append(f"{self.where}: {self.ignored_text()}")
        return tuple(found)

    def ignored_text(self) -> str:
        """How many settings say nothing about a plan."""
        count = len(self.ignored)
        verb = "settings do" if count > 1 else "setting does"
        return f"{count} other {verb} not concern the plan (data, optimisation, logging)"


_POLICIES = ("full", "selective")
