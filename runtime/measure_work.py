"""The kernels and collectives that `autopar.runtime.measure` times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.comm import Communicator, Ranks, SoloCommunicator
from autopar.runtime.compiled import CompiledModel, CompileOptions
from autopar.sharding.mesh import Mesh

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
# Rows, columns and what is summed over. A rank of a training job has fewer rows than features.
_PRODUCTS = (
    (512, 512, 512), (128, 2048, 512), (512, 2048, 128), (256, 1024, 512), (128, 512, 2048),
    (512, 512, 2048), (128, 384, 384), (512, 2048, 512), (64, 1024, 1024), (1024, 1024, 1024),
    (256, 512, 512), (128, 128, 128), (1024, 256, 512), (512, 256, 64),
)  # fmt: skip
_LARGE_PRODUCTS = (
    (4096, 4096, 4096), (2048, 8192, 2048), (8192, 2048, 8192), (1024, 1024, 1024),
    (512, 4096, 4096), (4096, 1024, 1024), (256, 1024, 8192), (8192, 8192, 8192),
)  # fmt: skip
# Samples, channels in and out, pixels a side, kernel, stride.
_CONVOLUTIONS = (
    (4, 64, 64, 16, 3, 1), (4, 512, 512, 4, 3, 1), (4, 64, 256, 16, 1, 1), (4, 256, 512, 8, 1, 2),
    (4, 256, 256, 8, 3, 2), (4, 1024, 512, 4, 1, 1), (4, 3, 64, 64, 7, 2), (4, 1024, 2048, 8, 1, 2),
)  # fmt: skip
_LARGE_CONVOLUTIONS = (
    (32, 64, 64, 56, 3, 1), (32, 256, 512, 28, 1, 1), (32, 512, 512, 14, 3, 1),
    (32, 3, 64, 224, 7, 2),
)  # fmt: skip
# Sequences, heads, positions, features of a head.
_ATTENTION = ((4, 8, 128, 64), (2, 4, 256, 64), (4, 8, 128, 32))
_LARGE_ATTENTION = ((4, 16, 2048, 128), (8, 16, 1024, 64), (1, 16, 8192, 128))
_STREAMS = (2**20, 4 * 2**20)
_LARGE_STREAMS = (64 * 2**20, 512 * 2**20)
_COLD_BYTES = 48 * 2**20
_MOST_COPIES = 64
# Rows, columns and what is summed over, of the product between two collectives.
_BETWEEN = (512, 512, 512)
_LAYERS = (2, 12)
LAUNCHES_PER_LAYER = 9
"""Kernels of a layer of `_Chain` and its backward: of the product, its bias and the GELU four, of
the gradients' three accumulations and the norm five; views come besides, as they do in models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A kernel to time; see `autopar.runtime.measure.Sample`.

    Attributes:
        prepare: Makes operands; returns what is to be timed.
    """

    work: str
    name: str
    sizes: tuple[int, ...]
    dtype: str = "float32"
    backward: bool = False
    prepare: Callable[[], Callable[[], object]]


def warm_up(device: torch.device) -> None:
    """Load libraries and leave sleeping clocks."""
    matrix = torch.ones(512, 512, device=device)
    for _ in range(20):
        matrix = torch.mm(matrix, matrix).clamp_(0, 1)


def jobs(device: torch.device, *, quick: bool) -> Iterator[Job]:
    """Everything to compute, on a device."""
    cuda = device.type == "cuda"
    step = 2 if quick else 1
    for m, n, k in (_LARGE_PRODUCTS if cuda else _PRODUCTS)[:: 1 if cuda else step]:
        yield _matmul(device, "float32", m, n, k)
    for dtype in ("bfloat16", "float16") if cuda else ("float64", "bfloat16"):
        for m, n, k in (_LARGE_PRODUCTS if cuda else _PRODUCTS)[: 8 if cuda else 2]:
            yield _matmul(device, dtype, m, n, k)
    for sizes in _LARGE_CONVOLUTIONS if cuda else _CONVOLUTIONS:
        yield from _convolutions(device, "bfloat16" if cuda else "float32", sizes)
    for heads in _LARGE_ATTENTION if cuda else _ATTENTION:
        yield from _attentions(device, "bfloat16" if cuda else "float32", *heads)
    for size in (_LARGE_STREAMS if cuda else _STREAMS)[::-step]:
        yield from _streams(device, size // 4)
    yield _update(device)
    yield from _launches(device)


def _tensor(device: torch.device, dtype: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).to(getattr(torch, dtype))


def _in_turn(device: torch.device, dtype: str, *shapes: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """Tensors of these shapes again and again, each time others.

    In a step, other tensors come between two uses of one, which is then no longer in cache.
    """
    size_bytes = sum(math.prod(shape) for shape in shapes) * getattr(torch, dtype).itemsize
    copies = max(2, min(_COLD_BYTES // size_bytes, _MOST_COPIES))
    return itertools.cycle(
        [[_tensor(device, dtype, *shape) for shape in shapes] for _ in range(copies)]
    )


def _matmul(device: torch.device, dtype: str, m: int, n: int, k: int) -> Job:
    def prepare() -> Callable[[], object]:
        turn = _in_turn(device, dtype, (m, k), (k, n))
        return lambda: torch.mm(*next(turn))

    return Job(
        work="matmul", name=f"{m} x {n} x {k}", sizes=(m, n, k), dtype=dtype, prepare=prepare
    )


def _convolutions(
    device: torch.device, dtype: str, sizes: tuple[int, int, int, int, int, int]
) -> Iterator[Job]:
    batch, inputs, outputs, side, kernel, stride = sizes
    shape, filters = (batch, inputs, side, side), (outputs, inputs, kernel, kernel)
    made = (batch, outputs, side // stride, side // stride)
    product = (made[0] * made[2] * made[3], outputs, inputs * kernel * kernel)
    trains = inputs > 3  # nobody asks for the gradient of an image
    name = f"{batch} x {inputs} -> {outputs}, {side} x {side}, kernel {kernel}, stride {stride}"
    rest = ((stride, stride), (kernel // 2, kernel // 2), (1, 1), False, (0, 0), 1)
    width = getattr(torch, dtype).itemsize
    read_bytes, weight_bytes, out_bytes = (width * math.prod(x) for x in (shape, filters, made))
    moved_bytes = read_bytes + weight_bytes + out_bytes

    def forward() -> Callable[[], object]:
        turn, run = _in_turn(device, dtype, shape, filters), torch.ops.aten.convolution.default
        return lambda: run(*next(turn), None, *rest)

    def backward() -> Callable[[], object]:
        turn = _in_turn(device, dtype, made, shape, filters)
        run = torch.ops.aten.convolution_backward.default
        return lambda: run(*next(turn), None, *rest, (trains, True, False))

    yield Job(
        work="convolution", name=name, sizes=(*product, 1, moved_bytes), dtype=dtype,
        prepare=forward,
    )  # fmt: skip
    made_bytes = weight_bytes + (read_bytes if trains else 0)
    yield Job(
        work="convolution", name=name, sizes=(*product, 1 + trains, moved_bytes + made_bytes),
        dtype=dtype, backward=True, prepare=backward,
    )  # fmt: skip


def _attentions(
    device: torch.device, dtype: str, batch: int, heads: int, seq: int, dim: int
) -> Iterator[Job]:
    name = f"{batch} x {heads} heads of {dim}, {seq} positions"

    def operands(*, trains: bool) -> list[Tensor]:
        made = [_tensor(device, dtype, batch, heads, seq, dim) for _ in range(3)]
        return [item.requires_grad_(trains) for item in made]

    def forward() -> Callable[[], object]:
        q, k, v = operands(trains=False)
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward() -> Callable[[], object]:
        inputs = operands(trains=True)
        with torch.enable_grad():
            q, k, v = inputs
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)

    for run in (forward, backward):
        yield Job(
            work="attention", name=name, sizes=(batch, heads, seq, dim), dtype=dtype,
            backward=run is backward, prepare=run,
        )  # fmt: skip


def _streams(device: torch.device, numel: int) -> Iterator[Job]:
    """Ops that move bytes: in a model about as many add and copy as norm, activate and sum."""
    rows = numel // 512

    def stream(name: str, passes: int, run: Callable[..., object], count: int) -> Job:
        def prepare() -> Callable[[], object]:
            turn = _in_turn(device, "float32", *[(rows, 512)] * count)
            return lambda: run(*next(turn))

        sizes = (passes * 4 * numel,)
        return Job(work="stream", name=f"{name} of {numel}", sizes=sizes, prepare=prepare)

    yield stream("add", 3, torch.add, 2)
    yield stream("copy", 2, lambda x: x.t().contiguous() if x.is_cuda else x.clone(), 1)
    yield stream("gelu", 2, F.gelu, 1)
    yield stream("gelu backward", 3, torch.ops.aten.gelu_backward.default, 2)
    yield stream("layer norm", 2, lambda x: F.layer_norm(x, (512,)), 1)
    yield stream("sum", 1, lambda x: x.sum(0), 1)
    yield stream("softmax", 2, lambda x: x.softmax(-1), 1)


def _update(device: torch.device) -> Job:
    """AdamW of four parameters of 512 x 512, by torch's own loop on CPUs."""
    numel, count = 512 * 512, 4

    def prepare() -> Callable[[], object]:
        parameters = [nn.Parameter(_tensor(device, "float32", 512, 512)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return torch.optim.AdamW(parameters).step

    return Job(work="update", name="AdamW", sizes=(count * numel * 4,), prepare=prepare)


class _Chain(nn.Module):
    """Layers so small that launches are all they take."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what the layers make of ``x`` of shape (rows, 8)."""
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def _launches(device: torch.device) -> Iterator[Job]:
    """Steps of compiled programs of few and of many layers."""
    for layers in _LAYERS:
        yield Job(
            work="launch",
            name=f"{layers} layers",
            sizes=(LAUNCHES_PER_LAYER * layers,),
            prepare=_chain_step(device, layers),
        )


def _chain_step(device: torch.device, layers: int) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        model, x = _Chain(layers).to(device), torch.ones(4, 8, device=device)
        options = CompileOptions(mesh=Mesh.parse("dp=1"), optimizer=None)
        compiled = CompiledModel(model, SoloCommunicator(device), options)
        engine = compiled.build((x,), {})
        inputs = compiled.inputs((x,), {})
        return lambda: engine.backward(inputs)

    return prepare


def between(device: torch.device) -> Callable[[], object]:
    """What a rank computes between two collectives."""
    m, n, k = _BETWEEN
    turn = _in_turn(device, "float32", (m, k), (k, n))
    return lambda: torch.mm(*next(turn))


def collective(
    comm: Communicator, kind: str, group: Ranks, size_bytes: int
) -> Callable[[], object]:
    """What a rank of `group` does for one collective of `size_bytes`, as torch counts them."""
    count = len(group)
    numel = max(1, size_bytes // 4 // count) * count
    whole = torch.ones(numel, device=comm.device)
    part = whole[: numel // count]
    if kind == "all_reduce":
        return lambda: comm.all_reduce(whole, group)
    if kind == "all_gather":
        return lambda: comm.all_gather(part, group)
    if kind == "reduce_scatter":
        rows = whole.view(count, -1)
        return lambda: comm.reduce_scatter(rows, group)
    if kind == "all_to_all":
        parts, shapes = list(whole.view(count, -1)), [part.shape] * count
        return lambda: comm.all_to_all(parts, group, shapes)
    assert kind == "send", kind
    return _message(comm, group, whole)


def _message(comm: Communicator, group: Ranks, tensor: Tensor) -> Callable[[], object]:
    """One message from every even place of a group to the next."""
    place = group.index(comm.rank)
    shape, dtype = tensor.shape, tensor.dtype

    def run() -> None:
        if place % 2 == 0 and place + 1 < len(group):
            comm.send_start(tensor, group[place + 1]).wait()
        elif place % 2:
            comm.receive_start(shape, dtype, group[place - 1]).wait()

    return run
