"""How long tracing, finding blocks and inferring factors take, and how that grows with depth.

GPT-3 (96 layers of width 12288) and Llama-70B (80 layers) on the meta device, each beside the
same model with 8 layers. Cold figures are of the first trace in a fresh process, after imports
and construction of the model; warm ones of later traces in one process, shallow and deep in
turn. Run as ``python -m tests.bench.bench_trace [rounds]``.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

STAGES = ("trace", "blocks", "factors", "total")
MODELS = {"gpt3": (8, 96), "llama70b": (8, 80)}
Times = dict[str, tuple[float, float]]


def _build(name: str, layers: int) -> tuple[object, ...]:
    from tests.models import zoo

    return zoo.meta_gpt(layers) if name == "gpt3" else zoo.meta_llama(layers)


def measure(example: tuple[object, ...]) -> Times:
    """Wall and CPU seconds of each stage on one example."""
    from autopar.graph.blocks import find_blocks
    from autopar.sharding.factors import infer_factors
    from autopar.trace import trace

    marks = [(time.perf_counter(), time.process_time())]

    def mark() -> None:
        marks.append((time.perf_counter(), time.process_time()))

    graph = trace(*example).graph  # type: ignore[arg-type]
    mark()
    blocks = find_blocks(graph)
    mark()
    infer_factors(graph, blocks)
    mark()
    spans = [*itertools.pairwise(marks), (marks[0], marks[-1])]
    pairs = ((stop[0] - start[0], stop[1] - start[1]) for start, stop in spans)
    return dict(zip(STAGES, pairs, strict=True))


def _middle(runs: list[Times], choose: Callable[[list[float]], float]) -> Times:
    return {
        stage: (choose([run[stage][0] for run in runs]), choose([run[stage][1] for run in runs]))
        for stage in STAGES
    }


def cold(name: str, depths: tuple[int, int], rounds: int) -> list[Times]:
    """Medians over fresh processes, both depths in turn."""
    runs: list[list[Times]] = [[], []]
    for _ in range(rounds):
        for depth, found in zip(depths, runs, strict=True):
            command = [sys.executable, "-m", "tests.bench.bench_trace", name, str(depth)]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            numbers = [float(word) for word in text.splitlines()[-1].split()]
            pairs = zip(numbers[::2], numbers[1::2], strict=True)
            found.append(dict(zip(STAGES, pairs, strict=True)))
    return [_middle(found, statistics.median) for found in runs]


def warm(name: str, depths: tuple[int, int], rounds: int) -> list[Times]:
    """Least times over rounds in this process, both depths in turn."""
    examples = [_build(name, depth) for depth in depths]
    for example in examples:
        measure(example)
    runs = [[measure(example) for example in examples] for _ in range(rounds)]
    return [_middle([run[place] for run in runs], min) for place in range(2)]


def _report(title: str, depths: tuple[int, int], figures: list[Times]) -> None:
    print(f"{title}: seconds of wall (CPU)")
    for depth, times in zip(depths, figures, strict=True):
        cells = (f"{stage} {times[stage][0]:6.3f} ({times[stage][1]:6.3f})" for stage in STAGES)
        print(f"  {depth:3} layers  {'  '.join(cells)}")
    wall, cpu = (figures[1]["total"][i] / figures[0]["total"][i] for i in (0, 1))
    print(f"  ratio       {wall:.2f} ({cpu:.2f})")


def _child(name: str, layers: int) -> None:
    import transformers  # noqa: F401

    from autopar.trace import trace  # noqa: F401

    times = measure(_build(name, layers))
    print(" ".join(f"{value:.6f}" for stage in STAGES for value in times[stage]))


def main(arguments: list[str]) -> None:
    """Print all figures, or, given a model and a depth, measure one cold run."""
    if len(arguments) == 2:
        _child(arguments[0], int(arguments[1]))
        return
    rounds = int(arguments[0]) if arguments else 3
    for name, depths in MODELS.items():
        _report(f"{name}, cold", depths, cold(name, depths, rounds))
        _report(f"{name}, warm", depths, warm(name, depths, 2 * rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
