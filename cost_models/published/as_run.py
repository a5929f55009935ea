"""Kernels as a job's software runs them, where those of the graph are others.

The graph of a preset has one op for what some software does in several, several for what other
software has one for, and nothing for what a model does not need. What a stack does is stated in
`autopar.cost_models.software`, and what that means for kernels and their bytes is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopar.cost_models.published import tables
from autopar.cost_models.published.jobs import Job
from autopar.cost_models.published.tables import Piece, Shift
from autopar.cost_models.work import Kernel, Phase

_BLOCKS = (tables.BLOCK, tables.SPARSE)
_BOTH_WAYS: tuple[Phase, ...] = ("forward", "input_gradient")
SOFTMAX_LEAST, SOFTMAX_MULTIPLE = 16, 4
"""Megatron's fused softmax takes more keys, and multiples of queries and of sequences times local
heads (``FusedScaleMaskSoftmax``)."""


def as_run(pieces: Iterable[Piece], shifts: Iterable[Shift], job: Job) -> Iterator[Piece]:
    """The kernels of one rank of `job`.

    Args:
        pieces: Its kernels as the graph implies them, for local tokens.
        shifts: Its collectives over the tensor ranks.
        job: The job.
    """
    for piece in pieces:
        if not (job.stack.fused_rotary and piece.rotary):
            yield _spread(piece, job)
            yield from _beside(piece, job)
    if job.stack.fused_rotary and job.config.positions == "rope":
        yield from _rotations(job)
    if job.stack.tensor_copies:
        yield from _copies(shifts)


def _spread(piece: Piece, job: Job) -> Piece:
    """A piece of a graph of local tokens as context, tensor and expert ranks make it.

    A query meets the keys of all context ranks. Frameworks split every expert over the tensor
    ranks, where the graph gives each rank experts of its own: the same work in other shapes. An
    expert meets the tokens of all expert ranks: its products are longer, and a rank has fewer.
    """
    kernel = piece.kernel
    attention, product = kernel.attention, kernel.matmul
    dropped = kernel.op == "native_dropout" and piece.part in _BLOCKS
    if job.stack.fused_dropout_add and dropped:  # the sum after it reads its operand instead
        return replace(piece, kernel=replace(kernel, read_bytes=0, write_bytes=0, launches=0))
    if piece.core and kernel.kind == "softmax" and job.stack.softmax_keys:
        return replace(piece, kernel=_softmax(kernel, job))
    if job.cp > 1 and attention is not None:
        attention = replace(attention, seq_k=attention.seq_k * job.cp)
        return replace(
            piece, kernel=replace(kernel, flops=kernel.flops * job.cp, attention=attention)
        )
    if kernel.kind != "grouped_matmul" or product is None:
        return piece
    config = job.config
    rows = job.micro_batch * (job.seq // job.cp) * config.top_k / config.experts
    inner = (config.expert_ffn, 2 * config.expert_ffn)
    sides = {}
    for name in ("m", "n", "k"):
        value = getattr(product, name)
        if value in inner:
            sides[name] = max(1, value // job.tp)
        elif any(abs(value - found) <= max(1.0, 0.01 * found) for found in (rows, rows / job.tp)):
            sides[name] = max(1, round(rows * job.ep))
    return replace(piece, kernel=replace(kernel, matmul=replace(product, **sides)))


def _softmax(kernel: Kernel, job: Job) -> Kernel:
    """The softmax of scores as Megatron does it: in one kernel only if that takes its operands.

    Others are scaled, masked and normalised one after the other, in float32: each is read and
    written, 16-bit scores are cast before and probabilities after.
    """
    wide = job.dtype == "tf32"
    batches = job.micro_batch * job.config.heads // job.tp
    fits = SOFTMAX_LEAST < job.seq <= job.stack.softmax_keys
    if not wide and fits and job.seq % SOFTMAX_MULTIPLE == batches % SOFTMAX_MULTIPLE == 0:
        return kernel
    backward = kernel.phase == "input_gradient"
    passes = 7 if backward else 6  # of which 3 and 2 are those of the one kernel
    size = (kernel.read_bytes + kernel.write_bytes) // (3 if backward else 2)  # of all scores
    moved = passes * size if wide else 2 * passes * size + 6 * size
    return replace(
        kernel, read_bytes=moved // 2, write_bytes=moved - moved // 2,
        launches=kernel.launches + (2 if wide else 4),
    )  # fmt: skip


def _beside(piece: Piece, job: Job) -> Iterator[Piece]:
    """Kernels of the stack that an op of the graph implies beside its own."""
    kernel, product = piece.kernel, piece.kernel.matmul
    if job.stack.separate_bias and kernel.op == "addmm" and product is not None:
        width = 4 if kernel.dtype == "float32" else 2
        size = product.batch * product.m * product.n * width
        added = replace(
            kernel, op="add", kind="elementwise", flops=size // width, read_bytes=size,
            write_bytes=size, matmul=None, launches=1,
        )  # fmt: skip
        yield replace(piece, kernel=added)
    if job.stack.wide_norms and kernel.kind == "norm" and job.dtype != "tf32":
        yield _wide_norm(piece, job)


def _wide_norm(piece: Piece, job: Job) -> Piece:
    """What a norm moves besides where 16-bit numbers are cast to float32 for it.

    The kernels of the graph move 2 bytes an element for each of two tensors, in backward three.
    """
    kernel = piece.kernel
    backward = kernel.phase != "forward"
    elements = (kernel.read_bytes + kernel.write_bytes) // (6 if backward else 4)
    # Cast: 6 bytes. The norm: input in 4 bytes instead of 2, in backward its gradient, too.
    extra, launches = (10 if backward else 8) * elements, 1
    if backward and job.stack.norms_again and piece.part in _BLOCKS:
        # The cast and the norm once more, and the sum before every second one, in blocks that are
        # not run again as a whole.
        again = 1.0 - (job.recompute_share if job.recompute == "full" else 0.0)
        extra, launches = extra + round(15 * again * elements), launches + round(2 * again)
    added = replace(
        kernel, op="cast", kind="elementwise", flops=0, read_bytes=extra // 2,
        write_bytes=extra - extra // 2, launches=launches,
    )  # fmt: skip
    return replace(piece, kernel=added)


def _rotations(job: Job) -> Iterator[Piece]:
    """The kernels that rotate queries and keys in place, one each way for each of them."""
    config, width = job.config, 4 if job.dtype == "tf32" else 2
    tokens = job.micro_batch * (job.seq // job.cp)
    parts = [tables.BLOCK] if not config.experts or config.dense_layers else []
    parts += [tables.SPARSE] if config.experts else []
    for part in parts:
        for heads in (config.heads, config.kv_heads):
            size = tokens * heads * config.head_dim * width // job.tp
            for phase in _BOTH_WAYS:
                kernel = Kernel(
                    node="rotary", op="rotary", kind="elementwise", phase=phase,
                    flops=3 * size // width, read_bytes=size, write_bytes=size, dtype="bfloat16",
                )  # fmt: skip
                yield Piece(kernel=kernel, part=part, core=False)


def _copies(shifts: Iterable[Shift]) -> Iterator[Piece]:
    """Copies where a sum over tensor ranks has nothing to do the other way.

    Of Megatron's pair of functions around the products of a block each communicates one way.
    """
    for shift in shifts:
        move = shift.move
        if move.kind != "all_reduce" or shift.part not in _BLOCKS:
            continue
        copied = Kernel(
            node=move.node, op="clone", kind="copy",
            phase="input_gradient" if move.phase == "forward" else "forward", flops=0,
            read_bytes=move.size_bytes, write_bytes=move.size_bytes, dtype=move.dtype,
            count=move.count, module=move.module,
        )  # fmt: skip
        yield Piece(kernel=copied, part=shift.part, core=False)
