"""Figures in data files: the unit is in the key, and only this module converts to SI.

A file of the catalogue or of a cluster says ``bandwidth_tb_per_s: 3.35``; what is loaded is
``bandwidth_bytes_per_s == 3.35e12``. The scale and the name of the loaded quantity both follow from
the end of the key, so a key and its conversion cannot disagree. A key that is not declared is
refused, with file and line and the key that was meant; so is a value outside the plausible range of
its figure, which is how ``memory_gib: 85899345920`` is found.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import ClusterError
from autopar.units import GB, GIB, MIB, TB

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE]\d+")
# End of a key -> value of one unit in SI, end of the name of the loaded quantity, how to write it.
_UNITS: dict[str, tuple[float, str, str]] = {
    "gb_per_s_per_direction": (GB, "bytes_per_s", "GB/s in one direction"),
    "gbit_per_s": (GB / 8, "bytes_per_s", "Gbit/s in one direction"),
    "gb_per_s": (GB, "bytes_per_s", "GB/s"),
    "tb_per_s": (TB, "bytes_per_s", "TB/s"),
    "tflop_per_s": (1e12, "flops_per_s", "Tflop/s"),
    "top_per_s": (1e12, "flops_per_s", "Top/s"),
    "usd_per_hour": (1.0, "usd_per_hour", "US dollars per hour"),
    "gib": (GIB, "bytes", "GiB (2**30 bytes)"),
    "mib": (MIB, "bytes", "MiB (2**20 bytes)"),
    "tb": (TB, "bytes", "TB (10**12 bytes)"),
    "us": (1e-6, "s", "microseconds"),
}
# Ends that people write by mistake or for another unit; they only help to find what was meant.
_OTHER_ENDS = (
    "gbps", "gb", "mb", "tib", "bytes", "bytes_per_s", "gib_per_s", "tbit_per_s", "ms", "ns", "s",
    "flops_per_s", "gflop_per_s", "pflop_per_s", "tflops", "usd", "percent",
)  # fmt: skip


def split_key(key: str) -> tuple[str, str]:
    """Stem and unit of a key: ``("bandwidth", "tb_per_s")``; the unit is ``""`` for a plain number.

    Example:
        >>> split_key("launch_us"), split_key("matmul_share")
        (('launch', 'us'), ('matmul_share', ''))
    """
    for unit in _UNITS:
        if key == unit:
            return "", unit
        if key.endswith("_" + unit):
            return key[: -len(unit) - 1], unit
    return key, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number a file may hold.

    Attributes:
        key: Key in the file, with the unit at its end unless it is a count, a share or a factor.
        low: Smallest plausible value, in the unit of the key.
        high: Largest plausible value, in the unit of the key.
        required: Whether a file without it is refused.
        whole: Whether it must be a whole number.
    """

    key: str
    low: float
    high: float
    required: bool = True
    whole: bool = False

    @property
    def name(self) -> str:
        """Name of the loaded quantity, e.g. ``"bandwidth_bytes_per_s"``."""
        stem, unit = split_key(self.key)
        return "_".join(part for part in (stem, _UNITS[unit][1] if unit else "") if part)

    @property
    def unit(self) -> str:
        """The unit of the key in words, empty for a count, a share or a factor."""
        _, unit = split_key(self.key)
        return _UNITS[unit][2] if unit else ""

    def to_si(self, value: float) -> float:
        """`value`, in the unit of the key, in SI; whole numbers and bytes stay whole."""
        _, unit = split_key(self.key)
        if not unit:
            return value
        scale, ending, _ = _UNITS[unit]
        if ending == "bytes":
            return round(value * scale)
        # Dividing by a million is exact where multiplying by 1e-6 is not.
        return float(value * scale) if scale >= 1 else value / round(1 / scale)

    def read(self, value: object, *, where: str) -> float:
        """`value`, in the unit of the key, in SI.

        Args:
            value: What was found.
            where: Place it was found at, for messages.

        Raises:
            ClusterError: If it is no number, not whole where it must be, or not plausible.
        """
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or (self.whole and value % 1 != 0)
        ):
            raise ClusterError(
                f"{self.key} is {value!r}",
                expected="a whole number" if self.whole else "a number",
                where=where,
            )
        if not self.low <= value <= self.high:
            raise ClusterError(
                f"{self.key} is {value:g}, which is not plausible",
                expected=f"from {self.low:g} to {self.high:g}{self.unit and ' ' + self.unit}",
                where=where,
            )
        return int(value) if self.whole else self.to_si(value)

    def from_si(self, value: float) -> float:
        """The inverse of `to_si`: `value` in the unit of the key."""
        _, unit = split_key(self.key)
        if not unit:
            return value
        in_unit = value / _UNITS[unit][0]
        # Five GB/s must be written as 5.0, not as 4.999999999999999.
        short = float(f"{in_unit:.12g}")
        return short if self.to_si(short) == value else in_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A mapping of a file, with the line of every key.

    Attributes:
        entries: Key to number, text, list or `Table`.
        lines: Key to line, from 1.
        file: Name of the file, for messages.
        line: Line on which the mapping starts.
        path: Keys that lead to the mapping, joined by dots; empty for the whole file.
    """

    entries: Mapping[str, Any]
    lines: Mapping[str, int]
    file: str
    line: int
    path: str = ""

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def where(self, key: str | None = None) -> str:
        """File, line and dotted path of `key`, or of the mapping itself."""
        line = self.line if key is None else self.lines.get(key, self.line)
        path = ".".join(part for part in (self.path, key or "") if part)
        return f"{self.file}:{line}" + (f" ({path})" if path else "")

    def check_keys(
        self,
        known: Iterable[str],
        required: Iterable[str] = (),
        *,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        """Refuse keys that are not `known`, and a table that lacks a `required` one.

        Args:
            known: Keys that may stand here.
            required: Keys that must.
            elsewhere: Keys that may not stand here, and where they belong.

        Raises:
            ClusterError: With the line, and the key that was probably meant.
        """
        known = tuple(known)
        for key in self.entries:
            if key not in known:
                raise ClusterError(
                    f"unknown key {key!r}",
                    expected="one of " + ", ".join(known),
                    fix=_advice(key, known, elsewhere or {}),
                    where=self.where(key),
                )
        missing = [key for key in required if key not in self.entries]
        if missing:
            raise ClusterError(
                f"missing key {missing[0]!r}",
                expected="the keys " + ", ".join(required),
                where=self.where(),
            )

    def table(self, key: str) -> Table:
        """The mapping under `key`.

        Raises:
            ClusterError: If it is missing or no mapping.
        """
        value = self.entries.get(key)
        if not isinstance(value, Table):
            raise ClusterError(
                f"{key} is {value!r}", expected="a mapping of keys", where=self.where(key)
            )
        return value

    def text(self, key: str) -> str:
        """The text under `key`.

        Raises:
            ClusterError: If it is missing, empty or no text.
        """
        value = self.entries.get(key)
        if not isinstance(value, str) or not value.strip():
            raise ClusterError(f"{key} is {value!r}", expected="text", where=self.where(key))
        return value

    def number(self, figure: Figure, key: str | None = None) -> float:
        """The value of `figure` in SI.

        Args:
            figure: What to read.
            key: Where it stands in this table, when not under its own key.

        Raises:
            ClusterError: If it is no number, not whole where it must be, or not plausible.
        """
        key = figure.key if key is None else key
        return figure.read(self.entries.get(key), where=self.where(key))


def _advice(key: str, known: tuple[str, ...], elsewhere: Mapping[str, str]) -> str | None:
    meant = _meant(key, known)
    if meant:
        return f"write {meant!r}" + _unit_note(key, meant)
    meant = _meant(key, tuple(elsewhere))
    return f"write {meant!r} under {elsewhere[meant]!r}" if meant else None


def _meant(key: str, known: tuple[str, ...]) -> str | None:
    """The known key with the same stem, else the one that looks most alike."""
    stem = _stem(key)
    same = [candidate for candidate in known if _stem(candidate) == stem]
    close = same or difflib.get_close_matches(key, known, n=1)
    return close[0] if close else None


def _stem(key: str) -> str:
    for end in sorted((*_UNITS, *_OTHER_ENDS), key=len, reverse=True):
        if f"_{key.lower()}".endswith("_" + end):
            return key.lower()[: -len(end) - 1]
    return key.lower()


def _unit_note(key: str, meant: str) -> str:
    """Says that the value must change with the key, where the stem is the same."""
    if _stem(key) != _stem(meant) or not split_key(meant)[1]:
        return ""
    return f", and give the value in {_UNITS[split_key(meant)[1]][2]}"


def read_yaml(path: Path, *, kind: str) -> Table:
    """The mapping that a YAML or JSON file holds.

    Args:
        path: The file.
        kind: What it is, for messages: ``"cluster file"``.

    Raises:
        ClusterError: If the file cannot be read, is no YAML, repeats a key or holds no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(
            f"cannot read {kind} {str(path)!r}: {error.strerror}", expected="a YAML file"
        ) from None
    except UnicodeDecodeError as error:
        raise ClusterError(f"{kind} {str(path)!r} is no text: {error}", where=str(path)) from None
    return parse_yaml(text, file=str(path), kind=kind)


def parse_yaml(text: str, *, file: str, kind: str) -> Table:
    """The mapping written as `text`; arguments and errors as of `read_yaml`."""
    import yaml  # here: it costs 20 ms of import time that most callers need not pay

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        node = loader.get_single_node()
        data = None if node is None else _convert(node, loader, file, "")
    except yaml.YAMLError as error:
        raise ClusterError(f"{kind} {file!r} is no YAML: {error}", where=file) from None
    finally:
        loader.dispose()
    if not isinstance(data, Table):
        raise ClusterError(
            f"{kind} {file!r} holds {type(data).__name__}",
            expected="a mapping of keys",
            where=file,
        )
    return data


def _convert(node: Any, loader: Any, file: str, path: str) -> Any:
    if node.id == "sequence":
        return [
            _convert(item, loader, file, f"{path}[{index}]")
            for index, item in enumerate(node.value)
        ]
    if node.id != "mapping":
        value = loader.construct_object(node)
        # YAML 1.1 reads 1e3 and 2.5e10 as text.
        plain = isinstance(value, str) and not node.style
        return float(value) if plain and _EXPONENT.fullmatch(value) else value
    entries: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        line = key_node.start_mark.line + 1
        if key in entries:
            raise ClusterError(
                f"key {key!r} is given twice",
                expected=f"it once; line {lines[key]} has it too",
                where=f"{file}:{line}",
            )
        entries[key] = _convert(value_node, loader, file, f"{path}.{key}" if path else key)
        lines[key] = line
    line = node.start_mark.line + 1
    return Table(entries=entries, lines=lines, file=file, line=line, path=path)
