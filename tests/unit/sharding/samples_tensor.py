"""Samples of ops that move, index, reduce."""

from __future__ import annotations

import torch

from tests.unit.sharding.samples import Draw, Sample, sample


def views() -> list[Sample]:
    d = Draw("views")
    x, v = d.normal(2, 6, 4), d.normal(12)
    shapes = [
        (12, 4),
        (2, 24),
        (48,),
        (2, 2, 3, 4),
        (2, 6, 2, 2),
        (4, 3, 4),
        (2, 1, 6, 4),
        (3, 4, 4),
    ]
    found = [sample("reshape", x, list(shape)) for shape in shapes]
    found += [sample("reshape", d.normal(6, 4), [4, 6]), sample("reshape", v, [3, 4])]
    found += [sample("reshape", d.normal(4, 6), [3, 8]), sample("reshape", d.normal(1), [])]
    found += [
        sample("reshape", d.normal(12, 10), [8, 15]),
        sample("reshape", d.normal(0, 3), [3, 0]),
    ]
    found += [sample("view", x, [12, 4]), sample("_unsafe_view", x, [12, 4])]
    found += [sample("flatten.using_ints", x, 1, 2), sample("unsqueeze", x, 1)]
    found += [sample("ravel", x), sample("view_as", x, d.normal(12, 4))]
    found += [sample("reshape_as", x, d.normal(12, 4))]
    found += [sample("permute", x, [2, 0, 1]), sample("permute", d.normal(), [])]
    found += [
        sample("transpose.int", x, 1, -1),
        sample("t", d.normal(4, 3)),
        sample("numpy_T", d.normal(4, 3)),
    ]
    found += [sample("mT", x), sample("swapaxes", x, 0, 1), sample("swapdims", x, 0, 2)]
    found += [sample("movedim.int", x, 0, 2), sample("movedim.intlist", x, [0, 1], [2, 0])]
    found += [sample("expand", d.normal(2, 1, 3), [4, 2, 4, 3]), sample("expand", x, [2, 6, 4])]
    found += [
        sample("broadcast_to", d.normal(4, 1), [4, 6]),
        sample("expand_as", d.normal(6, 1), x),
    ]
    return found


def joins() -> list[Sample]:
    d = Draw("joins")
    x, y = d.normal(2, 6, 4), d.normal(2, 6, 4)
    found = [sample("cat", [x, y], 1), sample("cat", [x, y, x], -1), sample("concat", [x, y], 0)]
    found += [sample("cat", [x, d.normal(2, 3, 4)], 1), sample("cat", [x, y])]
    found += [sample("split_with_sizes", x, [2, 2, 2], 1), sample("split_with_sizes", x, [1, 5], 1)]
    found += [sample("split_with_sizes", x, [2, 2], 2), sample("split_with_sizes", x, [1, 1])]
    found += [sample("split_with_sizes_copy", x, [3, 3], 1), sample("split.sizes", x, [2, 4], 1)]
    found += [sample("unbind.int", x, 1), sample("chunk", x, 2, 1), sample("split.Tensor", x, 4, 1)]
    found += [sample("tensor_split.sections", x, 4, 1), sample("stack", [x, y], 1)]
    found += [sample("meshgrid", [d.normal(4), d.normal(3)])]
    found += [sample("meshgrid.indexing", [d.normal(4), d.normal(3), d.normal(2)], indexing="xy")]
    found += [sample("meshgrid.indexing", [d.normal(4), d.normal(3)], indexing="ij")]
    z = d.normal(3, 12)
    found += [
        sample("slice.Tensor", z, 1, start, end) for start, end in ((0, 6), (6, 12), (4, 8), (1, 5))
    ]
    found += [sample("slice.Tensor", z, 1, start, 12, 2) for start in (0, 1)]
    found += [sample("slice.Tensor", z, -1, 0, 12, 5), sample("slice.Tensor", z, 0, 1, 2)]
    found += [sample("slice.Tensor", z, 1, -4), sample("slice.Tensor", z, 0, 0, 2)]
    return found


def layout() -> list[Sample]:
    d = Draw("layout")
    x = d.normal(2, 6, 4)
    found = [
        sample("repeat", x, [2, 1, 3]),
        sample("repeat", d.normal(4), [2, 3]),
        sample("tile", x, [2]),
    ]
    found += [sample("repeat_interleave.self_int", x, 3, 1)]
    found += [sample("repeat_interleave.self_int", d.normal(4), 2)]
    found += [sample("repeat_interleave.self_int", x, 2, 1, output_size=12)]
    found += [sample("pad", x, [1, 2]), sample("pad", x, [0, 0, 1, 0], "constant", 3.0)]
    found += [sample("pad", x, [1, 1], "reflect"), sample("constant_pad_nd", x, [1, 1, 0, 2], 0)]
    found += [sample("pad", d.normal(2, 3, 4, 4), [1, 1, 1, 1], "replicate")]
    found += [sample("unfold", x, 1, 3, 3), sample("unfold", x, 1, 4, 2)]
    found += [sample("slice_scatter", x, d.normal(2, 3, 4), 1, 1, 4)]
    found += [sample("select_scatter", x, d.normal(2, 4), 1, 2)]
    found += [
        sample("diagonal", x),
        sample("diagonal", x, 0, 1, 2),
        sample("diag_embed", d.normal(4, 3)),
    ]
    found += [sample("linalg_diagonal", x), sample("select.int", x, 1, 2)]
    found += [sample("tril", x), sample("triu", x, 1), sample("triu", d.normal(5, 5), -1)]
    found += [sample("flip", x, [1]), sample("roll", x, [1], [1]), sample("roll", d.normal(4), [1])]
    found += [
        sample("diff", x, 1, 1),
        sample("diff", x, 1, -1, d.normal(2, 6, 1), d.normal(2, 6, 1)),
    ]
    return found


def reductions() -> list[Sample]:
    d = Draw("reductions")
    x, m, n = d.order(4, 3, 5), d.boolean(4, 3), d.integers(5, 4, 3)
    found = [sample("sum", x), sample("sum", m), sample("sum", n), sample("mean", x)]
    found += [
        sample("sum.dim_IntList", x, dims, keep) for dims in ([1], [0, -1], None) for keep in (0, 1)
    ]
    found += [sample("sum.dim_IntList", m, [1]), sample("mean.dim", x, [1], True)]
    found += [sample("mean.dim", x, [-1, 0]), sample("mean.dim", n, [1], dtype=torch.float64)]
    found += [sample("nansum", x, [1]), sample("nanmean", x, [1]), sample("trace", d.normal(4, 4))]
    found += [sample("count_nonzero", n), sample("count_nonzero.dim_IntList", n, [1])]
    for op in ("amax", "amin", "logsumexp", "var.dim", "std.dim", "var_mean.dim", "std_mean.dim"):
        found.append(sample(op, x, [1]))
    for op in ("var.correction", "std.correction", "var_mean.correction", "std_mean.correction"):
        found.append(sample(op, x, [1], correction=0))
    for op in (
        "max.dim",
        "min.dim",
        "prod.dim_int",
        "median.dim",
        "nanmedian.dim",
        "argmax",
        "argmin",
    ):
        found.append(sample(op, x, -1))
    for op in ("max", "min", "prod", "var", "std", "var_mean", "std_mean", "median", "nanmedian"):
        found.append(sample(op, x + 0.5))
    found += [sample("argmax", x), sample("argmin", x, 1, True), sample("amax", x, [-1], True)]
    found += [sample("mode", d.integers(2, 4, 5).double()), sample("mode", n.double(), 0)]
    found += [sample(op, m) for op in ("any", "all")] + [
        sample(f"{op}.dim", m, 1) for op in ("any", "all")
    ]
    found += [sample(f"{op}.dims", m, [1]) for op in ("any", "all")]
    found += [sample("aminmax", x), sample("aminmax", x, dim=1), sample("norm.Scalar", x)]
    found += [sample("norm.ScalarOpt_dim", x, 2, [1]), sample("linalg_vector_norm", x, 2, [1])]
    found += [sample("linalg_norm", x, 2, [1, 2]), sample("frobenius_norm.dim", x, [1, 2])]
    for op in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        found.append(sample(op, x, 1))
    found += [
        sample("sort", x),
        sample("sort", x, 1, True),
        sample("argsort", x, 1),
        sample("topk", x, 2),
    ]
    found += [sample("sort.stable", x, stable=True, dim=1), sample("topk", x, 3, 0)]
    found += [sample("argsort.stable", x, stable=True, dim=1), sample("kthvalue", x, 2, 1)]
    found += [sample("glu", d.normal(4, 6)), sample("glu", d.normal(4, 6), 0)]
    for op in ("softmax.int", "log_softmax.int"):
        found += [sample(op, x, -1), sample(op, x, 0), sample(op, x.float(), 1, torch.float64)]
    found += [sample("_softmax", x, 1, False), sample("_log_softmax", x, 1, False)]
    return found


def indexing() -> list[Sample]:
    d = Draw("indexing")
    x, i = d.normal(6, 4), d.integers(4, 6, 3)
    found = [sample("gather", x, 1, i), sample("gather", x, 0, d.integers(6, 3, 4))]
    found += [sample("gather", x, 0, d.integers(6, 3, 2)), sample("take_along_dim", x, i, 1)]
    found += [sample("take_along_dim", x, d.integers(4, 1, 3), 1)]
    order = torch.stack([torch.randperm(4, generator=d.generator)[:3] for _ in range(6)])
    found += [sample("scatter.value", x, 1, order, v) for v in (0, 2.0)]
    found += [sample("scatter.src", x, 1, order, d.normal(6, 3))]
    found += [sample("scatter.reduce", x, 1, order, d.normal(6, 3), reduce="multiply")]
    found += [sample("scatter.value_reduce", x, 1, order, 2.0, reduce="add")]
    found += [sample("scatter_reduce.two", x, 1, order, d.normal(6, 3), "amax")]
    found += [
        sample("scatter_add", x, 1, i, d.normal(6, 3)),
        sample("scatter_add", x, 0, i, d.normal(6, 3)),
    ]
    found += [sample("scatter_add", x, 0, d.integers(6, 5, 4), d.normal(5, 4))]
    pick = d.integers(6, 5)
    found += [sample("index_select", x, 0, pick), sample("index_add", x, 0, pick, d.normal(5, 4))]
    found += [sample("index_add", x, 1, d.integers(4, 3), d.normal(6, 3), alpha=2)]
    distinct = torch.randperm(6, generator=d.generator)[:3]
    found += [sample("index_copy", x, 0, distinct, d.normal(3, 4))]
    found += [sample("index_fill.int_Scalar", x, 0, distinct, v) for v in (0, 2.0)]
    found += [sample("index_reduce", x, 0, distinct, d.normal(3, 4), "amax")]
    y = d.normal(4, 5, 6)
    a, b = d.integers(4, 3), d.integers(5, 3)
    found += [sample("index.Tensor", y, [a]), sample("index.Tensor", y, [a, b])]
    found += [sample("index.Tensor", y, [None, b]), sample("index.Tensor", y, [a, None, a])]
    found += [sample("index.Tensor", y, [a[:, None], d.integers(5, 1, 2)])]
    found += [sample("index.Tensor", y, [a[:, None, None], b[None, :, None], d.integers(6, 4)])]
    found += [
        sample("index.Tensor", d.boolean(4, 5), [torch.arange(4)[:, None], d.integers(5, 1, 6)])
    ]
    put = (torch.tensor([0, 2, 3]), torch.tensor([1, 1, 4]))
    found += [sample("index_put", y, [put[0]], d.normal(3, 5, 6))]
    found += [sample("index_put", y, [put[0], put[1]], d.normal(3, 6))]
    found += [
        sample("index_put", y, [a, b], d.normal(3, 6), True),
        sample("index_put", y, [a], d.normal(6), True),
    ]
    found += [sample("_unsafe_index_put", y, [None, put[0]], d.normal(4, 3, 6))]
    found += [sample("take", x, d.integers(24, 4, 3)), sample("one_hot", d.integers(5, 4, 3), 5)]
    found += [sample("histc", d.uniform(9), 4, 0, 1), sample("histc", d.uniform(4, 3), 4)]
    found += [sample("bincount", d.integers(5, 9))]
    edges = torch.tensor([0.2, 0.4, 0.6, 0.8]).double()
    found += [sample("bucketize.Tensor", d.uniform(4, 3), edges)]
    found += [sample("searchsorted.Tensor", edges, d.uniform(4, 3))]
    found += [sample("searchsorted.Tensor", d.uniform(4, 6).sort().values, d.uniform(4, 3))]
    return found


def tables() -> list[Sample]:
    d = Draw("tables")
    w = d.normal(9, 4)
    found = [
        sample("embedding", w, d.integers(9, 4, 3)),
        sample("embedding", w, d.integers(9, 7), 2),
    ]
    found += [sample("embedding", w, d.integers(9, 8), -1, True)]
    found += [sample("embedding", w, torch.tensor([1, 3, 3, 8]), 3)]
    flat, offsets = d.integers(9, 8), torch.tensor([0, 3, 3, 7])
    for mode in (0, 1, 2):
        found.append(sample("embedding_bag", w, flat, offsets, False, mode))
    found += [sample("embedding_bag", w, flat, offsets, False, 0, False, d.normal(8))]
    found += [
        sample("embedding_bag.padding_idx", w, flat, offsets, False, 0, False, None, False, 3)
    ]
    found += [sample("_embedding_bag", w, flat, offsets)]
    return found
