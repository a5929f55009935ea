"""Time two ways to do a training step against each other, in one run.

Machines drift: clocks, neighbours, caches. Rounds therefore interleave, the order alternates, and
the figure is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from autopar.runtime.comm import Communicator

Step = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one rank measured.

    Attributes:
        ours_s: Seconds per step of autopar, one per round.
        peer_s: Seconds per step of the peer, one per round.
        losses: Last loss of autopar and of the peer.
        traffic: Bytes this rank sends in one step of autopar, by kind of collective.
    """

    ours_s: tuple[float, ...]
    peer_s: tuple[float, ...]
    losses: tuple[float, float]
    traffic: dict[str, int]

    @property
    def ratio(self) -> float:
        """Median over rounds of autopar's time over the peer's."""
        return statistics.median(a / b for a, b in zip(self.ours_s, self.peer_s, strict=True))


def measure(comm: Communicator, ours: Step, peer: Step, *, rounds: int, steps: int) -> Timing:
    """Time `ours` against `peer` on every rank at once.

    Args:
        comm: All ranks.
        ours: One training step of autopar; returns the loss.
        peer: One training step of the peer; returns the loss.
        rounds: Number of interleaved rounds.
        steps: Steps of each per round.
    """
    ours(), peer()  # the first step traces, plans and allocates
    comm.take_traffic()
    losses = {ours: ours()}
    traffic = comm.take_traffic()
    losses[peer] = peer()
    times: dict[Step, list[float]] = {ours: [], peer: []}
    for round_number in range(rounds):
        order = (ours, peer) if round_number % 2 == 0 else (peer, ours)
        for step in order:
            comm.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                losses[step] = step()
            times[step].append((time.perf_counter() - start) / steps)
    return Timing(
        ours_s=tuple(times[ours]),
        peer_s=tuple(times[peer]),
        losses=(losses[ours], losses[peer]),
        traffic=traffic,
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
