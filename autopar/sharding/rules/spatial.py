"""Convolutions, pooling, interpolation: dims ``n c s...`` with windows over the s."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.graph.ir import Arg
from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family, rule
from autopar.sharding.rules.pointwise import aten

HINTS = {"n": ("batch", 3), "i": ("channels", 2), "o": ("channels", 2), "c": ("channels", 2)}


def per_dim(value: Arg, count: int, default: int) -> list[int]:
    """An int, or a list of one or `count` ints, as `count` ints."""
    if value is None or value == ():
        return [default] * count
    values = list(value) if isinstance(value, tuple) else [value]
    numbers = [int(v) for v in values if isinstance(v, (int, float))]
    return numbers * count if len(numbers) == 1 else numbers


@dataclass(frozen=True, slots=True)
class _Spatial:
    """Entries of the spatial dims of an input and an output, and sizes of their letters."""

    source: list[Entry]
    target: list[Entry]
    sizes: dict[str, int]


def _windows(
    shape: tuple[int, ...], kernel: list[int], stride: list[int], exact: list[bool]
) -> _Spatial:
    """Letters of spatial dims whose windows do not overlap (patches, 1x1); others have none.

    Args:
        shape: Spatial sizes of the input.
        kernel: Window sizes.
        stride: Steps.
        exact: Per dim, whether there is no padding and no dilation.
    """
    found = _Spatial([], [], {})
    for d, size in enumerate(shape):
        plain = exact[d] and kernel[d] == stride[d] and size % kernel[d] == 0
        found.sizes.update({f"k{d}": kernel[d]} if plain else {})
        found.source.append((f"s{d}", f"k{d}!") if plain else None)
        found.target.append(f"s{d}" if plain else None)
    return found


def _enlarged(shape: tuple[int, ...], factors: list[int]) -> _Spatial:
    """Every position becomes `factor` positions of its own; a factor of 0 gives no letter."""
    found = _Spatial([], [], {})
    for d, factor in enumerate(factors):
        found.sizes.update({f"k{d}": factor, f"s{d}": shape[d]} if factor else {})
        found.source.append(f"s{d}" if factor else None)
        found.target.append((f"s{d}", f"k{d}!") if factor else None)
    return found


_CONVOLUTIONS = [f"conv{n}d{kind}" for n in (1, 2, 3) for kind in ("", ".padding")]


@family(aten(_CONVOLUTIONS))
def _convolution(call: Call) -> OpRule:
    """Channels are ``(g i)`` and ``(g o)`` with g groups; i is contracted."""
    shape, kernel = call.operands[0].shape, list(call.operands[1].shape[2:])
    count = len(kernel)
    padding, dilation = call.arg(4, "padding", 0), per_dim(call.arg(5, "dilation"), count, 1)
    if padding == "same":
        padded = [k > 1 for k in kernel]
    elif isinstance(padding, str):
        padded = [False] * count
    else:
        padded = [p != 0 for p in per_dim(padding, count, 0)]
    exact = [not pad and d == 1 for pad, d in zip(padded, dilation, strict=True)]
    stride = per_dim(call.arg(3, "stride"), count, 1)
    spatial = _windows(shape[-count:], kernel, stride, exact)
    return _grouped(call, call.int_arg(6, "groups", 1), spatial, transposed=False)


@family(aten("conv_transpose1d conv_transpose2d.input conv_transpose3d.input"))
def _transposed_convolution(call: Call) -> OpRule:
    """The weight is ``(g i) o``; windows as long as their step do not overlap."""
    kernel = list(call.operands[1].shape[2:])
    count = len(kernel)
    columns = zip(
        kernel,
        per_dim(call.arg(3, "stride"), count, 1),
        per_dim(call.arg(4, "padding"), count, 0),
        per_dim(call.arg(5, "output_padding"), count, 0),
        per_dim(call.arg(7, "dilation"), count, 1),
        strict=True,
    )
    factors = [k if (k, p, o, d) == (step, 0, 0, 1) else 0 for k, step, p, o, d in columns]
    spatial = _enlarged(call.operands[0].shape[-count:], factors)
    return _grouped(call, call.int_arg(6, "groups", 1), spatial, transposed=True)


@family(aten("convolution"))
def _any_convolution(call: Call) -> OpRule:
    count = call.operands[1].ndim - 2
    nothing = _Spatial([None] * count, [None] * count, {})
    transposed = bool(call.arg(6, "transposed", False))
    return _grouped(call, call.int_arg(8, "groups", 1), nothing, transposed)


def _grouped(
    call: Call,
    groups: int,
    spatial: _Spatial,
    transposed: bool,
) -> OpRule:
    source, target = spatial.source, spatial.target
    into: Entry = ("g~", "i") if groups > 1 else "i"
    out: Entry = ("g~", "o") if groups > 1 else "o"
    kernel: list[Entry] = [None] * len(source)
    batch: list[Entry] = ["n"] if call.operands[0].ndim == len(source) + 2 else []
    operands: dict[int, list[Entry]] = {
        0: [*batch, into, *source],
        1: [into, "o", *kernel] if transposed else [out, "i", *kernel],
    }
    sizes = dict(spatial.sizes)
    if groups > 1:
        into_size = call.operands[0].shape[len(batch)]
        out_size = call.outputs[0].shape[len(batch)]
        sizes |= {"g": groups, "i": into_size // groups, "o": out_size // groups}
    bias = call.slot(2, "bias")
    if bias is not None:
        operands[bias] = [out]
    extra = {bias} if bias is not None else set()
    return call.build(
        operands,
        [[*batch, out, *target]],
        sizes=sizes,
        additive=extra,
        linear=[{0} | extra, {1} | extra],
        hints=HINTS,
    )


def _pool(call: Call, count: int, stride_at: int, linear: bool, indices: bool) -> OpRule:
    """Windows per channel; spatial dims keep letters when windows do not overlap."""
    shape = call.operands[0].shape
    kernel = per_dim(call.arg(1, "kernel_size"), count, 1)
    stride = per_dim(call.arg(stride_at, "stride"), count, 0)
    stride = [step or k for step, k in zip(stride, kernel, strict=True)]
    padding = per_dim(call.arg(3, "padding"), count, 0)
    dilation = [1] * count if linear else per_dim(call.arg(4, "dilation"), count, 1)
    exact = [
        (pad, step) == (0, 1) and not indices for pad, step in zip(padding, dilation, strict=True)
    ]
    spatial = _windows(shape[-count:], kernel, stride, exact)
    lead: list[Entry] = ["n", "c"] if len(shape) == count + 2 else ["c"]
    outputs = [[*lead, *spatial.target] for _ in call.outputs]
    return call.build(
        [[*lead, *spatial.source]],
        outputs,
        sizes=spatial.sizes,
        linear=[{0}] if linear else [],
        hints=HINTS,
    )


def _make_pools() -> None:
    for count in (1, 2, 3):

        def of_max(call: Call, count: int = count) -> OpRule:
            return _pool(call, count, 2, linear=False, indices=len(call.outputs) > 1)

        def of_average(call: Call, count: int = count) -> OpRule:
            return _pool(call, count, 2, linear=True, indices=False)

        family(aten(f"max_pool{count}d max_pool{count}d_with_indices"))(of_max)
        family(aten(f"avg_pool{count}d"))(of_average)


_make_pools()


def _per_channel(call: Call, count: int, linear: bool) -> OpRule:
    """The last `count` dims are whole, the leading ones pass."""
    lead = call.operands[0].ndim - count
    names: list[Entry] = [*(["n", "c"] if lead == 2 else call.names("b", lead))]
    operands = {slot: [*names, *[None] * count] for slot in range(len(call.operands))}
    outputs = [[*names, *[None] * count] for _ in call.outputs]
    return call.build(operands, outputs, linear=[{0}] if linear else [], hints=HINTS)


# fmt: off
_PER_CHANNEL = {
    1: ("adaptive_avg_pool1d reflection_pad1d replication_pad1d upsample_nearest1d "
        "upsample_linear1d upsample_linear1d.vec _upsample_nearest_exact1d", "adaptive_max_pool1d"),
    2: ("adaptive_avg_pool2d _adaptive_avg_pool2d reflection_pad2d replication_pad2d "
        "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_bilinear2d.vec "
        "upsample_bicubic2d.vec _upsample_nearest_exact2d _upsample_bilinear2d_aa "
        "_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec",
        "adaptive_max_pool2d"),
    3: ("adaptive_avg_pool3d _adaptive_avg_pool3d reflection_pad3d replication_pad3d "
        "upsample_nearest3d upsample_trilinear3d upsample_trilinear3d.vec "
        "_upsample_nearest_exact3d", "adaptive_max_pool3d"),
}
# fmt: on


def _make_per_channel() -> None:
    for count, (linear_ops, other_ops) in _PER_CHANNEL.items():

        def of_linear(call: Call, count: int = count) -> OpRule:
            return _per_channel(call, count, linear=True)

        def of_other(call: Call, count: int = count) -> OpRule:
            return _per_channel(call, count, linear=False)

        family(aten(linear_ops))(of_linear)
        family(aten(other_ops))(of_other)


_make_per_channel()

_NEAREST = ("upsample_nearest", "_upsample_nearest_exact")


@family(aten([f"{kind}{n}d.vec" for kind in _NEAREST for n in (1, 2, 3)]))
def _nearest(call: Call) -> OpRule:
    """Whole scale factors copy every position; other scales keep the spatial dims whole."""
    scales = call.arg(2, "scale_factors")
    count = int(call.node.op.split("d.vec")[0][-1])
    if not isinstance(scales, tuple):
        return _per_channel(call, count, linear=True)
    shape = call.operands[0].shape
    factors = [int(s) if isinstance(s, (int, float)) and s == int(s) else 0 for s in scales]
    spatial = _enlarged(shape[-count:], factors)
    lead: list[Entry] = (
        ["n", "c"] if len(shape) == count + 2 else list(call.names("b", len(shape) - count))
    )
    return call.build(
        [[*lead, *spatial.source]],
        [[*lead, *spatial.target]],
        sizes=spatial.sizes,
        linear=[{0}],
        hints=HINTS,
    )


rule(
    "aten.grid_sampler.default aten.grid_sampler_2d.default",
    "n c _ _, n y x _ -> n c y x",
    "input grid",
    linear=[{0}],
    hints=HINTS,
)


@family(aten("affine_grid_generator"))
def _affine_grid(call: Call) -> OpRule:
    """``n 2 3 -> n h w 2``; the size argument names the global batch, so nothing is split."""
    return OpRule(letters=(), linear=(frozenset({0}),))


@family(aten("pixel_shuffle pixel_unshuffle channel_shuffle"))
def _pixel_shuffle(call: Call) -> OpRule:
    factor = call.int_arg(1, "upscale_factor", 1)
    text = {
        "aten.pixel_shuffle.default": "... (c r s) h w -> ... c (h r!) (w s!)",
        "aten.pixel_unshuffle.default": "... c (h r!) (w s!) -> ... (c r s) h w",
        "aten.channel_shuffle.default": "n (r! c) ... -> n (c r!) ...",
    }[call.node.op]
    sizes = {"r": factor, "s": factor}
    if call.node.op == "aten.channel_shuffle.default":
        sizes = {"r": factor, "c": call.operands[0].shape[1] // factor}
    return call.match(text, "self", sizes=sizes, linear=[{0}], hints=HINTS)


@family(aten("im2col col2im"))
def _columns(call: Call) -> OpRule:
    """Patches as columns: ``n (c k) l``; only the batch and the channels pass."""
    fold = call.node.op == "aten.col2im.default"
    image, columns = (
        (call.outputs[0], call.operands[0]) if fold else (call.operands[0], call.outputs[0])
    )
    channels = image.shape[-3]
    sizes = {"c": channels, "k": columns.shape[-2] // channels}
    batch: list[Entry] = ["n"] if image.ndim == 4 else []
    flat: list[Entry] = [*batch, ("c", "k!"), None]
    whole: list[Entry] = [*batch, "c", None, None]
    pair = (flat, whole) if fold else (whole, flat)
    return call.build([pair[0]], [pair[1]], sizes=sizes, linear=[{0}], hints=HINTS)
