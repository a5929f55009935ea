"""Time two ways to do a training step against each other, in one run.

Machines drift: clocks, neighbours, caches. Rounds therefore interleave, the order alternates, and
the figure is the median over rounds of the ratio within a round. Where other work shares the
cores, the ratio of CPU times is steadier than that of wall times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.runtime.comm import Communicator

Step = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one rank measured.

    Attributes:
        ours_s: Seconds per step of autopar, one per round.
        peer_s: Seconds per step of the peer, one per round.
        ours_cpu_s: CPU seconds per step of this rank's process in autopar, one per round.
        peer_cpu_s: The same of the peer.
        losses: Last loss of autopar and of the peer.
        worst_loss: Largest relative difference of the two losses of any step; NaN where a side
            knows no loss on this rank.
        traffic: Bytes this rank sends in one step of autopar, by kind of collective.
    """

    ours_s: tuple[float, ...]
    peer_s: tuple[float, ...]
    ours_cpu_s: tuple[float, ...]
    peer_cpu_s: tuple[float, ...]
    losses: tuple[float, float]
    worst_loss: float
    traffic: dict[str, int]

    @property
    def ratio(self) -> float:
        """Median over rounds of autopar's time over the peer's."""
        return statistics.median(_ratios(self.ours_s, self.peer_s))

    @property
    def min_ratio(self) -> float:
        """Autopar's fastest round over the peer's fastest."""
        return min(self.ours_s) / min(self.peer_s)

    @property
    def cpu_ratio(self) -> float:
        """Median over rounds of autopar's CPU time over the peer's."""
        return statistics.median(_ratios(self.ours_cpu_s, self.peer_cpu_s))


def _ratios(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, peer, strict=True)]


def measure(comm: Communicator, ours: Step, peer: Step, *, rounds: int, steps: int) -> Timing:
    """Time `ours` against `peer` on every rank at once.

    Args:
        comm: All ranks.
        ours: One training step of autopar; returns the loss.
        peer: One training step of the peer; returns the loss.
        rounds: Number of interleaved rounds.
        steps: Steps of each per round.
    """
    losses: dict[Step, list[float]] = {ours: [ours()], peer: [peer()]}  # traces, plans, allocates
    comm.take_traffic()
    losses[ours].append(ours())
    traffic = comm.take_traffic()
    losses[peer].append(peer())
    times: dict[Step, list[float]] = {ours: [], peer: []}
    cpu: dict[Step, list[float]] = {ours: [], peer: []}
    for round_number in range(rounds):
        order = (ours, peer) if round_number % 2 == 0 else (peer, ours)
        for step in order:
            comm.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                losses[step].append(step())
            times[step].append((time.perf_counter() - start) / steps)
            cpu[step].append((time.process_time() - start_cpu) / steps)
    pairs = list(zip(losses[ours], losses[peer], strict=True))
    return Timing(
        ours_s=tuple(times[ours]),
        peer_s=tuple(times[peer]),
        ours_cpu_s=tuple(cpu[ours]),
        peer_cpu_s=tuple(cpu[peer]),
        losses=pairs[-1],
        worst_loss=max(abs(a - b) / abs(b) for a, b in pairs),
        traffic=traffic,
    )


def over_ranks(timings: Sequence[Timing]) -> Timing:
    """One timing of all ranks.

    Times are those of the slowest rank, CPU times and traffic are sums, losses are those of the
    last rank.
    """
    kinds = sorted({kind for timing in timings for kind in timing.traffic})
    return Timing(
        ours_s=tuple(map(max, zip(*(t.ours_s for t in timings), strict=True))),
        peer_s=tuple(map(max, zip(*(t.peer_s for t in timings), strict=True))),
        ours_cpu_s=tuple(map(sum, zip(*(t.ours_cpu_s for t in timings), strict=True))),
        peer_cpu_s=tuple(map(sum, zip(*(t.peer_cpu_s for t in timings), strict=True))),
        losses=timings[-1].losses,
        worst_loss=timings[-1].worst_loss,
        traffic={kind: sum(t.traffic.get(kind, 0) for t in timings) for kind in kinds},
    )


def print_report(timing: Timing, peer: str, theory_bytes: dict[str, int]) -> None:
    """Print medians, the ratio, the losses, and bytes sent beside theory."""
    ours, theirs = statistics.median(timing.ours_s), statistics.median(timing.peer_s)
    print(f"autopar {1e3 * ours:8.1f} ms per step (median of {len(timing.ours_s)} rounds)")
    print(f"{peer:<7} {1e3 * theirs:8.1f} ms per step")
    print(f"ratio   {timing.ratio:8.3f}    autopar / {peer}, median of the rounds' ratios")
    print(f"losses  {timing.losses[0]:.6f} and {timing.losses[1]:.6f} after the same steps")
    for kind in sorted({*timing.traffic, *theory_bytes}):
        moved, theory = timing.traffic.get(kind, 0), theory_bytes.get(kind, 0)
        print(f"bytes   {kind:<14} {moved:>12,} sent per rank and step; theory {theory:,}")
