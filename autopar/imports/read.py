"""Which framework a file is for, by what stands in it, and the constraints that it amounts to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.imports import accelerate, deepspeed, megatron, torchtitan
from autopar.imports.document import Document, parse_json, parse_toml, parse_yaml
from autopar.imports.imported import Imported
from autopar.plan.advice import is_endless, nearby
from autopar.registry import Registry
from autopar.sharding.mesh import Mesh

SUFFIXES = (".json", ".yaml", ".yml", ".toml", ".sh", ".slurm", ".sbatch", ".txt", ".args")
"""Ends of file names: constraints that end so are a file."""
MOST_BYTES = 4_000_000
"""Configurations are small; what is larger is something else."""

SOURCES = Registry[Callable[[Document], Imported]]("configuration", error=InputError)
SOURCES.add("deepspeed", deepspeed.read)
SOURCES.add("megatron", megatron.read_yaml)
SOURCES.add("torchtitan", torchtitan.read)
SOURCES.add("accelerate", accelerate.read)

_SIGNS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "deepspeed": deepspeed.is_one,
    "torchtitan": torchtitan.is_one,
    "accelerate": accelerate.is_one,
    "megatron": megatron.is_one,
}


@dataclass(frozen=True, slots=True)
class Own:
    """Constraints of this package in a file.

    Attributes:
        constraints: The map.
    """

    constraints: dict[str, Any]


def read_config(path: str | Path) -> Imported:
    """A configuration of another framework.

    Args:
        path: DeepSpeed's JSON, Megatron-LM's arguments (a shell script, a text of arguments, or
            YAML), torchtitan's TOML, or Accelerate's YAML; told apart by what stands in them.

    Raises:
        InputError: If the file cannot be read or is none of these; names the line.
    """
    found = read_constraints(path)
    if isinstance(found, Own):
        raise InputError(
            f"{str(path)!r} is no configuration of a framework that is known here",
            expected=_KNOWN,
            fix="`autopar plan MODEL --constraints FILE` takes constraints of autopar itself",
            where=str(path),
        )
    return found


_CHECK = "check that this is the configuration that your framework starts with"
_KNOWN = (
    "a DeepSpeed JSON (zero_optimization, train_batch_size, ...), Megatron-LM arguments"
    " (--tensor-model-parallel-size, ...) as a script, text or YAML, a torchtitan TOML"
    " ([parallelism], [training]) or an Accelerate YAML (distributed_type, fsdp_config, ...)"
)


def read_constraints(path: str | Path) -> Imported | Own:
    """What a file of constraints holds: a framework's configuration, or this package's map.

    Raises:
        InputError: If the file cannot be read; names the line.
    """
    text, where = _read(path), str(path)
    if megatron.is_script(text):
        return megatron.read_script(text, where)
    suffix = Path(path).suffix.lower()
    if suffix == ".toml" or (suffix not in SUFFIXES and re.search(r"(?m)^\s*\[\w+\]\s*$", text)):
        document = parse_toml(text, where)
    elif suffix == ".json" or text.lstrip().startswith("{"):
        document = parse_json(text, where)
    elif suffix in (".yaml", ".yml"):
        document = parse_yaml(text, where)
    else:
        raise InputError(
            f"cannot tell what {where!r} is: it has no arguments such as --num-layers",
            expected=_KNOWN,
            fix=_CHECK,
            where=where,
        )
    for name, sign in _SIGNS.items():
        if sign(document.data):
            return SOURCES[name](document)
    return Own(dict(document.data))


def _read(path: str | Path) -> str:
    try:
        if Path(path).stat().st_size > MOST_BYTES:
            raise InputError(
                f"{str(path)!r} is larger than {MOST_BYTES:,} bytes", expected=_KNOWN, fix=_CHECK
            )
        if is_endless(path):
            raise InputError(
                f"{str(path)!r} is a device or a pipe, not a file", expected=_KNOWN, fix=_CHECK
            )
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot read constraints {str(path)!r}: {error.strerror}",
            expected=_KNOWN,
            fix=nearby(path, "check the path"),
        ) from None
    except (UnicodeDecodeError, ValueError):
        raise InputError(
            f"cannot read constraints {str(path)!r}: it is no text in UTF-8",
            expected=_KNOWN,
            fix=_CHECK,
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Constraints without a file in them.

    Attributes:
        mesh: The mesh, if it is known.
        constraints: What else is asked for.
        notes: What the file says beside that.
        imported: The configuration, if the file was a framework's.
    """

    mesh: Mesh | None
    constraints: str | Mapping[str, object] | None
    notes: tuple[str, ...] = ()
    imported: Imported | None = None


def is_file(constraints: object) -> bool:
    """Whether constraints are the name of a file."""
    return isinstance(constraints, Path) or (
        isinstance(constraints, str)
        and constraints.lower().endswith(SUFFIXES)
        and not constraints.lstrip().startswith("{")
    )


def resolve(
    constraints: str | Path | Mapping[str, object] | None,
    mesh: Mesh | None,
    num_devices: int | None,
    *,
    search: bool = False,
    batch: int | None = None,
    call: tuple[Sequence[Any], Mapping[str, Any] | None] | None = None,
) -> Resolved:
    """Constraints with what their file says instead of its name.

    Args:
        constraints: As users give them; perhaps the name of a file.
        mesh: The mesh that was given, if one was: it wins over the file's.
        num_devices: Devices to plan for; None if not known but by `mesh`, or by the file.
        search: Whether a search is to keep what the file says and choose the rest.
        batch: Samples of a step, if not those of the file.
        call: Arguments of a call of the model with a step's samples, to tell them by.

    Raises:
        AutoparError: If the file is wrong, or does not fit the devices.
    """
    if not is_file(constraints):
        assert not isinstance(constraints, Path)
        return Resolved(mesh=mesh, constraints=constraints)
    found = read_constraints(str(constraints))
    if isinstance(found, Own):
        return Resolved(mesh=mesh, constraints=found.constraints)
    found = on_devices(found, mesh, num_devices)
    if batch is None and call is not None:
        batch = samples(*call, stated=found.global_batch)
    if mesh is None and (found.parallel or not search):
        mesh = found.mesh()
    kept = _searchable(found, mesh) if search else found.constraints(batch)
    notes = found.notes()
    if batch is not None and found.global_batch not in (None, batch):
        other = f"says {found.global_batch:,} samples a step, and the model is given {batch:,}"
        notes = (f"{found.where}: {other}, for which the plan is", *notes)
    return Resolved(mesh=mesh, constraints=kept, notes=notes, imported=found)


def samples(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, stated: int | None = None
) -> int | None:
    """Samples of a call: the first dim of its first tensor; None if there is none.

    Args:
        args: Positional arguments of the model.
        kwargs: Keyword arguments.
        stated: What a configuration says: this, if it is one of the first two dims.
    """
    known = (shape(value) for value in (*args, *(kwargs or {}).values()))
    sizes = next(filter(None, known), ())
    return stated if stated in sizes[:2] else sizes[0] if sizes else None


def shape(value: Any) -> tuple[int, ...]:
    """Sizes of a tensor; of anything else none."""
    return tuple(getattr(value, "shape", ()))


def on_devices(found: Imported, mesh: Mesh | None, num_devices: int | None) -> Imported:
    """A configuration with its data ranks filled in.

    Args:
        found: The configuration.
        mesh: The mesh that was given, if one was.
        num_devices: Devices to plan for; None if not known but by `mesh`, or by the file.

    Raises:
        AutoparError: If it is not known how many devices there are, or it does not fit them.
    """
    count = mesh.size if mesh is not None else num_devices or found.devices
    if count is None:
        raise InputError(
            f"{found.where} does not say how many devices there are",
            expected="a cluster or a mesh beside it",
            fix='give a cluster such as "8xH100-SXM"',
        )
    return found.on(_data_ranks(mesh) if mesh is not None and not found.parallel else count)


def _data_ranks(mesh: Mesh) -> int:
    """Ranks of a mesh that a file which leaves all other parallelism open is about."""
    return math.prod(size for name, size in mesh.axes if name not in ("pp", "cp", "tp"))


def _searchable(found: Imported, mesh: Mesh | None) -> dict[str, Any]:
    """What of it a search can keep.

    Raises:
        AutoparError: If it needs an axis that no search fills.
    """
    odd = [] if mesh is None else [name for name in mesh.names if name not in ("pp", "dp", "tp")]
    if odd:
        raise InputError(
            f"a search cannot keep mesh axis {odd[0]!r}, which the file asks for",
            expected="degrees of pipeline, data and tensor parallelism",
            fix="plan with the file as it is (autopar plan --constraints), or leave it out",
            where=found.where,
        )
    return found.kept()
