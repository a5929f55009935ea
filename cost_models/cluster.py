"""What a plan runs on: machines, devices per machine, and the device's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import ClusterError

_TEXT = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<devices>\d+)x(?P<device>[A-Za-z][\w.\-]*)")
_FORM = '"nodes x devices x device" such as "8x8xH100-SXM", or "4xcpu" for one machine'
_FIELDS = ("device", "devices_per_node", "nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Equal machines with equal devices.

    Attributes:
        device: Name of the device, e.g. ``"H100-SXM"`` or ``"cpu"``.
        devices_per_node: Devices, and ranks, per machine.
        nodes: Number of machines.

    Raises:
        ClusterError: If a number is below 1 or the name is empty.

    Example:
        >>> ClusterSpec.parse("8x8xH100-SXM").num_devices
        64
    """

    device: str
    devices_per_node: int
    nodes: int = 1

    def __post_init__(self) -> None:
        for name in ("devices_per_node", "nodes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ClusterError(f"{name} is {value!r}", expected="a whole number from 1")
        device: object = self.device
        if not isinstance(device, str) or not re.fullmatch(r"[A-Za-z][\w.\-]*", device):
            raise ClusterError(
                f"device is {self.device!r}", expected='the name of a device, e.g. "H100-SXM"'
            )

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """The cluster written as ``"8x8xH100-SXM"`` or ``"4xcpu"``.

        Raises:
            ClusterError: If the text is no cluster.
        """
        match = _TEXT.fullmatch(text.strip().replace(" ", ""))
        if match is None:
            raise ClusterError(f"cannot read cluster {text!r}", expected=_FORM)
        return cls(
            device=match["device"],
            devices_per_node=int(match["devices"]),
            nodes=int(match["nodes"] or 1),
        )

    @classmethod
    def local(cls, count: int, *, device: str = "cpu") -> ClusterSpec:
        """`count` ranks on this machine.

        Raises:
            ClusterError: If `count` is below 1.
        """
        return cls(device=device, devices_per_node=count)

    @classmethod
    def load(cls, path: str | Path) -> ClusterSpec:
        """The cluster described by a YAML (or JSON) file.

        Args:
            path: A file with the keys ``device``, ``devices_per_node`` and optionally ``nodes``.

        Raises:
            ClusterError: If the file is missing, is no YAML, or has wrong keys or values.
        """
        import yaml  # here: it costs import time that parse() need not pay

        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ClusterError(
                f"cannot read cluster file {str(path)!r}: {error.strerror}", expected="a YAML file"
            ) from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ClusterError(
                f"cluster file {str(path)!r} is no YAML: {error}", where=str(path)
            ) from None
        return cls._from_mapping(data, str(path))

    @classmethod
    def _from_mapping(cls, data: Any, where: str) -> ClusterSpec:
        expected = "the keys device, devices_per_node and optionally nodes"
        if not isinstance(data, Mapping):
            raise ClusterError(
                f"a cluster file holds {type(data).__name__}", expected=expected, where=where
            )
        unknown = sorted(map(str, set(data) - set(_FIELDS)))
        missing = [name for name in _FIELDS[:2] if name not in data]
        if unknown or missing:
            what = f"unknown keys {unknown}" if unknown else f"missing keys {missing}"
            raise ClusterError(f"cluster file with {what}", expected=expected, where=where)
        return cls(**data)

    @property
    def num_devices(self) -> int:
        """Devices, and ranks, in all."""
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.devices_per_node}x{self.device}"
