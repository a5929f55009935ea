"""One device in SI units, and the parts it is described by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from autopar.errors import ClusterError

_DTYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "uint8": "int8",
}
# A format -> the next one that can stand in for it. Devices all have fp32; double precision
# without a figure is taken as fp32, which flatters it.
_WIDER = {
    "fp4": "fp8", "fp8": "bf16", "int8": "fp16", "bf16": "fp32", "fp16": "fp32",
    "tf32": "fp32", "fp64": "fp32", "fp32": "fp32",
}  # fmt: skip


class Rates(Mapping[str, float]):
    """A read-only, hashable mapping of names to numbers."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, float]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> float:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"Rates({self._items!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins a device to its neighbours, without leaving the domain of the link.

    Attributes:
        kind: ``"nvlink"``, ``"xgmi"``, ``"pcie"`` or ``"memory"``.
        bytes_per_s: What one device can send, all its links together, in one direction.
        peer_bytes_per_s: What one device can send to one other; less than `bytes_per_s` where
            devices are wired pair by pair instead of through a switch.
        latency_s: One hop of a collective: the step of a ring over the link.
        start_s: What a collective takes before its first byte moves: launch and set-up.
        all_to_all_start_s: The same of an all-to-all, which is made of sends.
        domain_devices: The most devices that one domain of the link joins.
        spans_nodes: Whether a domain may cover several nodes (NVL72).
    """

    kind: str
    bytes_per_s: float
    peer_bytes_per_s: float
    latency_s: float
    start_s: float
    all_to_all_start_s: float
    domain_devices: int
    spans_nodes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine that a device sits in: the usual one in the catalogue, the real one in a cluster.

    Attributes:
        devices: Devices of such a node; a node with more or fewer has the rest in proportion.
        nics: Network cards per node.
        nic_bytes_per_s: Of one card, in one direction.
        network_latency_s: One hop of a collective over the network.
        memory_bytes: Host memory of a node.
        nvme_bytes: Local storage of a node; 0 where there is none.
        nvme_read_bytes_per_s: Of all drives of a node together.
        nvme_write_bytes_per_s: Of all drives of a node together.
        cores: Cores that the ranks of a node share where these compute, 0 where devices do. The
            figures of a device then hold while all ranks of the node are busy.
    """

    devices: int
    nics: int
    nic_bytes_per_s: float
    network_latency_s: float
    memory_bytes: int
    nvme_bytes: int
    nvme_read_bytes_per_s: float
    nvme_write_bytes_per_s: float
    cores: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What real kernels reach; see the table in `autopar.cost_models.hardware`.

    Shares are of the figure they belong to, factors multiply time, and `matmul_size` is in
    elements.
    """

    matmul_share: float
    matmul_size: float
    misaligned_matmul: float
    attention_share: float
    misaligned_head: float
    low_precision_share: float
    grouped_matmul_share: float
    convolution_share: float
    memory_share: float
    launch_s: float
    link_share: float
    network_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a figure comes from.

    Attributes:
        text: Datasheet and date, or ``prior:``, ``fitted on`` or ``measured on`` something.
        low: Smallest plausible value in SI, where the figure states a range.
        high: Largest plausible value in SI, where the figure states a range.
    """

    text: str
    low: float | None = None
    high: float | None = None

    @property
    def fitted(self) -> bool:
        """Whether a fit set the value."""
        return self.text.startswith("fitted on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of the catalogue, in SI units.

    Attributes:
        name: Name in the catalogue.
        kind: ``"gpu"`` or ``"cpu"``.
        peak_flops_per_s: Number format (``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"fp8"``,
            ``"fp4"``, ``"int8"``, ``"fp64"``) to dense peak rate; formats the device lacks are
            absent.
        memory_bytes: Device memory as installed.
        driver_bytes: What of it the driver keeps, before any process starts.
        memory_bytes_per_s: Peak memory bandwidth.
        cache_bytes_per_s: Bandwidth of what is still in cache, as an optimizer finds what it made
            of one parameter; 0 where it is not known.
        link: The device-to-device link.
        host_bytes_per_s: Link to the host, in one direction.
        host_latency_s: One transfer over the link to the host.
        node: The machine that it sits in.
        efficiency: What real kernels reach.
        sources: Dotted figure, e.g. ``"memory.memory_gib"``, to its source.
    """

    name: str
    kind: str
    peak_flops_per_s: Mapping[str, float]
    memory_bytes: int
    driver_bytes: int
    memory_bytes_per_s: float
    link: Link
    host_bytes_per_s: float
    host_latency_s: float
    node: Machine
    efficiency: Efficiency
    cache_bytes_per_s: float = 0.0
    sources: Mapping[str, Source] = field(compare=False, repr=False, default_factory=dict)

    @property
    def usable_bytes(self) -> int:
        """Device memory that processes can have."""
        return self.memory_bytes - self.driver_bytes

    def peak(self, number: str) -> float:
        """Dense peak rate in flop/s for a number format or a torch dtype.

        A format that the device lacks runs in the next wider one it has.

        Args:
            number: ``"bf16"``, ``"bfloat16"``, ``"float8_e4m3fn"``, ...

        Raises:
            ClusterError: If the format is unknown.
        """
        return self.peak_flops_per_s[self.computes_in(number)[1]]

    def computes_in(self, number: str) -> tuple[str, str]:
        """A number format, by its short name, and the one in which the device computes it.

        Raises:
            ClusterError: If the format is unknown.
        """
        wanted = number.removeprefix("torch.")
        wanted = _DTYPES.get(wanted, "fp8" if wanted.startswith("float8") else wanted)
        if wanted not in _WIDER:
            raise ClusterError(
                f"unknown number format {number!r}", expected="one of " + ", ".join(_WIDER)
            )
        found = wanted
        while found not in self.peak_flops_per_s:
            found = _WIDER[found]
        return wanted, found
