"""Published measurements: one JSON object a line, checked field by field.

The rows that ship are in ``rows.jsonl``; ``SOURCES.md`` says where they are from. A file of one's
own has the same fields. A field that is absent or null is not stated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import InputError

SHIPPED = Path(__file__).parent / "rows.jsonl"

_TEXT, _NUMBER, _COUNT, _FLAG = "text", "a number", "a whole number", "true or false"
_KINDS: Mapping[str, tuple[type, ...]] = {
    _TEXT: (str,),
    _NUMBER: (int, float),
    _COUNT: (int,),
    _FLAG: (bool,),
    "a list of texts": (list,),
    "an object": (dict,),
}


def _section(text: str = "", count: str = "", number: str = "", flag: str = "") -> dict[str, str]:
    groups = ((_TEXT, text), (_COUNT, count), (_NUMBER, number), (_FLAG, flag))
    return {name: kind for kind, names in groups for name in names.split()}


SCHEMA: Mapping[str, Mapping[str, str]] = {
    "source": _section(text="repo path commit date locator"),
    "model": _section(
        text="family name arch_from",
        count="layers hidden ffn_hidden heads kv_heads head_dim vocab seq_len experts topk "
        "moe_ffn_hidden",
        number="params active_params",
        flag="gated_mlp tied_embeddings",
    ),
    "hardware": _section(
        text="gpu intra_link inter_link", count="gpus gpus_per_node", number="gpu_mem_gb"
    ),
    "plan": _section(
        text="fsdp recompute recompute_detail offload precision schedule framework task",
        count="dp tp pp vp cp ep zero_stage micro_batch grad_accum global_batch",
        flag="sp flash_attention compile",
    ),
    "measured": _section(
        text="peak_mem_kind",
        number="iter_time_s tflops_per_gpu mfu hfu tokens_per_s_per_gpu peak_mem_gib "
        "mem_allocated_gib",
        flag="oom",
    ),
    "derived": _section(number="iter_time_s tokens_per_s_per_gpu mfu tflops_per_gpu"),
}
"""The fields of every section, and what they hold."""
_TOP = _section(text="id group tier flops_kind notes") | {"flags": "a list of texts"}
_POSITIVE = frozenset((
    "layers", "hidden", "heads", "kv_heads", "seq_len", "gpus", "dp", "tp", "pp", "cp", "ep",
    "micro_batch", "global_batch", "iter_time_s", "tokens_per_s_per_gpu", "peak_mem_gib",
    "mem_allocated_gib", "gpus_per_node", "gpu_mem_gb", "vp", "head_dim", "vocab", "mfu", "hfu",
))  # fmt: skip
_MOST = 1e15
"""No number of a row is as large; counts beyond it are no longer exact in floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published measurement.

    Attributes:
        id: Its name, unique in a file.
        group: The source it belongs to.
        tier: A to C, how much of it the source states.
        sections: The sections of `SCHEMA`; all fields, None where not stated.
        flags: Doubts about it.
        notes: Remarks.
        flops_kind: What a printed FLOP/s counts.
    """

    id: str
    group: str
    tier: str
    sections: Mapping[str, Mapping[str, Any]]
    flags: tuple[str, ...]
    notes: str
    flops_kind: str

    def get(self, section: str, field: str) -> Any:
        """What the row states for a field of `SCHEMA`, or None."""
        return self.sections[section][field]

    @property
    def step_time_s(self) -> float | None:
        """Measured seconds per step, as stated or by arithmetic on what is stated."""
        found = self.get("measured", "iter_time_s") or self.get("derived", "iter_time_s")
        return None if found is None else float(found)


def read_rows(path: str | Path | None = None) -> tuple[Row, ...]:
    """The rows of a file, those that ship by default.

    Raises:
        InputError: If the file cannot be read or a row is malformed; the message names line, row
            and field.
    """
    path = SHIPPED if path is None else Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(f"cannot read rows {str(path)!r}: {reason}") from None
    return parse_rows(text.splitlines(), str(path))


def parse_rows(lines: Iterable[str], where: str) -> tuple[Row, ...]:
    """The rows in `lines`, one JSON object each; empty lines do not count.

    Args:
        lines: The lines.
        where: What they are from, for errors.

    Raises:
        InputError: See `read_rows`.
    """
    found: dict[str, Row] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{where}:{number}"
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"line {number} is no JSON: {error}", where=place) from None
        row = _row(data, number, place)
        if row.id in found:
            raise InputError(f"line {number}: a second row has id {row.id!r}", where=place)
        found[row.id] = row
    return tuple(found.values())


def _row(data: Any, number: int, place: str) -> Row:
    if not isinstance(data, dict):
        raise InputError(f"line {number} is of type {type(data).__name__}", expected="an object",
                         where=place)  # fmt: skip
    name = data.get("id")
    label = f"line {number}" + (f", row {name!r}" if isinstance(name, str) else "")
    for key in ("id", "group", "model", "hardware", "plan", "measured"):
        if data.get(key) is None:
            raise InputError(f"{label}: no field {key!r}", where=place)
    for key in data:
        if key not in SCHEMA and key not in _TOP:
            raise InputError(f"{label}: unknown field {key!r}", where=place,
                             expected=", ".join((*SCHEMA, *_TOP)))  # fmt: skip
    for key, kind in _TOP.items():
        _check(data.get(key), kind, key, label, place)
    sections = {key: _read_section(key, data.get(key), label, place) for key in SCHEMA}
    return Row(
        id=data["id"],
        group=data["group"],
        tier=data.get("tier") or "",
        sections=sections,
        flags=tuple(data.get("flags") or ()),
        notes=data.get("notes") or "",
        flops_kind=data.get("flops_kind") or "",
    )


def _read_section(key: str, data: Any, label: str, place: str) -> dict[str, Any]:
    _check(data, "an object", key, label, place)
    data = data or {}
    fields = SCHEMA[key]
    for name in data:
        if name not in fields:
            raise InputError(f"{label}: unknown field '{key}.{name}'", where=place,
                             expected=", ".join(fields))  # fmt: skip
    for name, kind in fields.items():
        _check(data.get(name), kind, f"{key}.{name}", label, place)
    return {name: data.get(name) for name in fields}


def _check(value: Any, kind: str, field: str, label: str, place: str) -> None:
    if value is None:
        return
    right = isinstance(value, _KINDS[kind]) and (kind == _FLAG or not isinstance(value, bool))
    if not right:
        raise InputError(f"{label}: field {field!r} is {value!r}", expected=kind, where=place)
    if isinstance(value, int | float) and not abs(value) < _MOST:
        raise InputError(
            f"{label}: field {field!r} is {str(value)[:40]}", expected="a number below 1e15",
            where=place,
        )  # fmt: skip
    if isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
        raise InputError(f"{label!a}: field {field!r} has half of a character", where=place)
    if field.rpartition(".")[2] in _POSITIVE and not value > 0:
        raise InputError(
            f"{label}: field {field!r} is {value!r}", expected="a positive number", where=place
        )
