"""Samples of the ops models are made of: contractions, attention, norms, convolutions, losses."""

from __future__ import annotations

import torch
import transformers.integrations.moe  # noqa: F401  (registers grouped_mm_fallback)
from torch import Tensor

from autopar.graph.routing import GROUPED
from tests.unit.sharding.samples import Draw, Sample, sample
from tests.unit.sharding.samples_pointwise import keyed


def contractions() -> list[Sample]:
    d = Draw("contractions")
    x, w, b = d.normal(2, 4, 6), d.normal(8, 6), d.normal(8)
    found = [sample("linear", x, w, b), sample("linear", d.normal(6), w, b), sample("linear", x, w)]
    found += [sample("linear", x, w, bias=b), sample("linear", d.normal(4, 6), w, b)]
    a, c = d.normal(4, 6), d.normal(6, 8)
    found += [sample("addmm", b, a, c), sample("addmm", d.normal(4, 8), a, c, beta=0.5, alpha=2)]
    found += [
        sample("addmm", d.normal(4, 1), a, c),
        sample("mm", a, c),
        sample("addmv", d.normal(4), a, d.normal(6)),
    ]
    p, q = d.normal(3, 4, 6), d.normal(3, 6, 2)
    found += [sample("bmm", p, q), sample("baddbmm", d.normal(3, 4, 2), p, q)]
    found += [sample("baddbmm", d.normal(4, 1), p, q), sample("addbmm", d.normal(4, 2), p, q)]
    found += [
        sample("addr", d.normal(4, 3), d.normal(4), d.normal(3)),
        sample("mv", a, d.normal(6)),
    ]
    found += [sample("outer", d.normal(4), d.normal(3)), sample("ger", d.normal(4), d.normal(3))]
    found += [
        sample("dot", d.normal(6), d.normal(6)),
        sample("vdot", d.normal(6), d.normal(6)),
        sample("inner", d.normal(2, 6), d.normal(4, 6)),
    ]
    shapes = [((6,), (6,)), ((4, 6), (6,)), ((6,), (6, 4)), ((4, 6), (6, 2)), ((2, 3, 4), (4,))]
    shapes += [
        ((4,), (2, 4, 3)),
        ((2, 3, 4), (4, 5)),
        ((3, 4), (2, 4, 5)),
        ((2, 1, 3, 4), (3, 4, 2)),
    ]
    found += [sample("matmul", d.normal(*s), d.normal(*t)) for s, t in shapes]
    found += [sample("bilinear", d.normal(4, 3), d.normal(4, 2), d.normal(5, 3, 2), d.normal(5))]
    for equation, *dims in (
        ("bsd,nd->bsn", (2, 4, 6), (3, 6)), ("...d,nd->...n", (2, 4, 6), (3, 6)),
        ("bi,bj", (4, 3), (4, 2)),
        ("ii->i", (4, 4)), ("bhsd,bhtd->bhst", (2, 3, 4, 2), (2, 3, 5, 2)), ("ij->", (4, 3)),
        ("... k, k n -> ... n", (2, 4, 6), (6, 3)),
        ("ec,ecd,edf->ecf", (4, 3), (4, 3, 2), (4, 2, 5)),
        ("...ij,...jk", (2, 3, 4), (4, 2)),
    ):  # fmt: skip
        found.append(sample("einsum", equation, [d.normal(*shape) for shape in dims]))
    return found


def distances() -> list[Sample]:
    d = Draw("distances")
    x, a = d.normal(2, 4, 6), d.normal(4, 6)
    found = [sample("cdist", d.normal(2, 4, 3), d.normal(2, 5, 3))]
    found += [
        sample("linalg_vecdot", x, d.normal(2, 4, 6)),
        sample("linalg_vecdot", x, x + 1, dim=1),
    ]
    found += [
        sample("cosine_similarity", x, x.sin(), 1),
        sample("cosine_similarity", a, d.normal(1, 6), -1),
    ]
    found += [sample("linalg_cross", d.normal(4, 3), d.normal(4, 3))]
    found += [
        sample("pairwise_distance", a, a.sin()),
        sample("pairwise_distance", a, a.sin(), keepdim=True),
    ]
    ends, w3 = torch.tensor([2, 2, 5, 7]), d.normal(4, 6, 4)
    found += [sample("transformers.grouped_mm_fallback.default", d.normal(7, 6), w3, ends)]
    single = torch.float32
    product = "transformers.grouped_mm_fallback.default"
    for repeat, ids in ((1, [3, 0, 0, 3, 1, 3]), (2, [1, 1, 3, 0, 1, 2, 1, 3])):
        rows = d.normal(len(ids) // repeat, 6)
        found += [sample(GROUPED, rows, w3, torch.tensor(ids), repeat, product)]
    found += [
        sample(
            "_grouped_mm",
            d.normal(8, 24).to(single),
            d.normal(2, 24, 24).to(single),
            torch.tensor([3, 8]).int(),
        )
    ]
    return found


def attention() -> list[Sample]:
    d = Draw("attention")
    op = "scaled_dot_product_attention"
    q, k, v = d.normal(2, 4, 6, 4), d.normal(2, 4, 5, 4), d.normal(2, 4, 5, 4)
    found = [sample(op, q, k, v), sample(op, q, q.sin(), q.cos(), None, 0.0, True, scale=0.3)]
    found += [sample(op, q, k, v, d.normal(2, 1, 6, 5)), sample(op, q, k, v, d.normal(6, 5))]
    found += [sample(op, q, k, v, d.boolean(2, 1, 1, 5) | (torch.arange(5) == 0))]
    found += [sample(op, q, k, v, attn_mask=d.normal(4, 1, 5))]
    found += [sample(op, q, d.normal(2, 2, 5, 4), d.normal(2, 2, 5, 4), enable_gqa=True)]
    found += [
        sample(op, q, d.normal(2, 2, 6, 4), d.normal(2, 2, 6, 6), None, 0.0, True, enable_gqa=True)
    ]
    found += [sample(op, q[0], k[0], v[0]), sample(op, q[0, 0], k[0, 0], v[0, 0])]
    found += [
        sample(
            op, d.normal(2, 3, 2, 4, 4), *(d.normal(2, 3, 2, 4, 4) for _ in "kv"), None, 0.0, True
        )
    ]
    found += [
        keyed(sample(op, q, k, v, None, 0.3)),
        keyed(sample(op, q, q.sin(), q.cos(), None, 0.3, True)),
    ]
    found += [keyed(sample(op, q, k, v, d.normal(6, 5), 0.3))]
    kv = (d.normal(2, 2, 5, 4), d.normal(2, 2, 5, 4))
    found += [keyed(sample(op, q, *kv, None, 0.3, enable_gqa=True))]
    return found


def _batch_norm(shape: tuple[int, ...], affine: bool = True) -> Sample:
    d = Draw("batch_norm")
    c = shape[1]
    weight, bias = (d.normal(c), d.normal(c)) if affine else (None, None)
    args = (d.normal(*shape), weight, bias, d.normal(c), d.uniform(c), True, 0.2, 1e-5)
    return sample("_native_batch_norm_legit_functional", *args)


def norms() -> list[Sample]:
    d = Draw("norms")
    x, w, b = d.normal(2, 3, 4), d.normal(4), d.normal(4)
    found = [
        sample("layer_norm", x, [4], w, b),
        sample("layer_norm", x, [4]),
        sample("layer_norm", x, [4], w),
    ]
    found += [sample("layer_norm", x, [3, 4], d.normal(3, 4), d.normal(3, 4), 1e-3)]
    found += [
        sample("layer_norm", x, [4], None, b),
        sample("native_layer_norm", x, [4], w, b, 1e-5),
    ]
    found += [
        sample("rms_norm", x, [4], w),
        sample("rms_norm", x, [4]),
        sample("rms_norm", x, [3, 4], None, 1e-3),
    ]
    found += [sample("_fused_rms_norm", x, [4], w, 1e-5)]
    y = d.normal(4, 6, 2, 3)
    found += [sample("group_norm", y, 2, d.normal(6), d.normal(6)), sample("group_norm", y, 6)]
    found += [sample("group_norm", y, 3, d.normal(6)), sample("group_norm", y, 1)]
    found += [sample("group_norm", d.normal(4, 6), 3, d.normal(6), d.normal(6))]
    found += [_batch_norm((4, 3, 2, 3)), _batch_norm((5, 3))]
    found += [_batch_norm((4, 3, 5), affine=False)]
    stats = (d.normal(6), d.uniform(6))
    found += [sample("batch_norm", y, d.normal(6), d.normal(6), *stats, False, 0.1, 1e-5, False)]
    found += [sample("batch_norm", y, None, None, None, None, True, 0.1, 1e-5, False)]
    found += [
        sample("instance_norm", y, d.normal(6), d.normal(6), None, None, True, 0.1, 1e-5, False)
    ]
    found += [sample("_weight_norm", d.normal(4, 3, 2), d.normal(4, 1, 1), 0)]
    found += [sample("_weight_norm", d.normal(4, 3), d.normal(1, 3), 1)]
    return found


def convolutions() -> list[Sample]:
    d = Draw("convolutions")
    found = []
    for n in (1, 2, 3):
        s = (5, 4, 3)[:n]
        k = (3, 2, 2)[:n]
        x, w = d.normal(2, 4, *s), d.normal(6, 4, *k)
        found += [
            sample(f"conv{n}d", x, w, d.normal(6), [2] * n, [1] * n),
            sample(f"conv{n}d", x, w),
        ]
        found += [sample(f"conv{n}d", x, d.normal(6, 2, *k), d.normal(6), [1], [1], [1], 2)]
        found += [sample(f"conv{n}d", x, d.normal(8, 1, *k), None, [1], [0], [1], 4)]
        found += [sample(f"conv{n}d.padding", x, w[..., :1], d.normal(6), [1], "same")]
        found += [sample(f"conv{n}d.padding", x, d.normal(6, 2, *k), None, [1], "same", [1], 2)]
        name = f"conv_transpose{n}d" + ("" if n == 1 else ".input")
        found += [sample(name, x, d.normal(4, 6, *k), d.normal(6), [2])]
        found += [sample(name, x, d.normal(4, 3, *k), d.normal(6), [1], [0], [0], 2)]
    x = d.normal(2, 4, 6, 4)
    found += [
        sample("conv2d", x, d.normal(6, 4, 1, 1), d.normal(6)),
        sample("conv2d", x[0], d.normal(6, 4, 2, 2)),
    ]
    found += [sample("conv2d", x, d.normal(6, 4, 3, 2), None, [3, 2])]
    found += [sample("conv2d.padding", x, d.normal(6, 4, 2, 2), None, [2, 2], "valid")]
    found += [
        sample("convolution", x, d.normal(6, 2, 2, 2), d.normal(6), [1], [0], [1], False, [0], 2)
    ]
    found += [sample("convolution", x, d.normal(4, 3, 2, 2), None, [1], [0], [1], True, [0], 1)]
    return found


def pools() -> list[Sample]:
    d = Draw("pools")
    found = []
    for n in (1, 2, 3):
        s = (6, 4, 4)[:n]
        x = d.order(2, 3, *s)
        found += [sample(f"max_pool{n}d", x, [2]), sample(f"max_pool{n}d", x, [3], [2], [1])]
        found += [sample(f"max_pool{n}d_with_indices", x, [2]), sample(f"avg_pool{n}d", x, [2])]
        found += [sample(f"avg_pool{n}d", x, [3], [1], [1]), sample(f"avg_pool{n}d", x[0], [2])]
        found += [
            sample(f"adaptive_avg_pool{n}d", x, [2] * n),
            sample(f"adaptive_max_pool{n}d", x, [2] * n),
        ]
        found += [
            sample(f"{kind}_pad{n}d", x, [1] * 2 * n) for kind in ("reflection", "replication")
        ]
        out = [5, 7, 3][:n]
        found += [
            sample(f"{kind}{n}d", x, out)
            for kind in ("upsample_nearest", "_upsample_nearest_exact")
        ]
        for kind in ("upsample_nearest", "_upsample_nearest_exact"):
            found += [sample(f"{kind}{n}d.vec", x, None, [2.0] * n)]
        smooth = ("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")[n - 1]
        found += [sample(smooth, x, out, False), sample(f"{smooth}.vec", x, out, True, None)]
    x = d.normal(2, 3, 6, 4)
    for op in ("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
        found += [sample(op, x, [3, 5], False), sample(f"{op}.vec", x, [3, 5], False, None)]
    found += [
        sample("_adaptive_avg_pool2d", x, [2, 2]),
        sample("_adaptive_avg_pool3d", d.normal(2, 3, 4, 4, 4), [2] * 3),
    ]
    grid = d.uniform(2, 5, 3, 2, low=-1, high=1)
    found += [
        sample("grid_sampler", x, grid, 0, 0, False),
        sample("grid_sampler_2d", x, grid, 0, 1, True),
    ]
    found += [sample("affine_grid_generator", d.normal(2, 2, 3), [2, 3, 4, 5], False)]
    found += [
        sample("pixel_shuffle", d.normal(2, 12, 3, 4), 2),
        sample("pixel_unshuffle", d.normal(2, 3, 4, 6), 2),
    ]
    found += [sample("channel_shuffle", d.normal(2, 6, 4), 2)]
    found += [
        sample("im2col", x, [2, 2], [1, 1], [0, 0], [2, 2]),
        sample("im2col", x[0], [3, 2], [1, 1], [1, 0], [1, 1]),
    ]
    found += [sample("col2im", d.normal(2, 12, 6), [6, 4], [2, 2], [1, 1], [0, 0], [2, 2])]
    return found


def losses() -> list[Sample]:
    d = Draw("losses")
    x, y, w = d.normal(6, 8), d.integers(8, 6), d.uniform(8)
    ignored = torch.tensor([-100, 3, -100, -100, 7, 0])
    some = torch.tensor([-100, -100, -100, 2, 7, 0])
    t = d.uniform(6, 8).softmax(1)
    ce = "cross_entropy_loss"
    found = []
    for reduction in (0, 1, 2):
        found += [
            sample(ce, x, y, None, reduction),
            sample(ce, x, ignored, w, reduction, -100, 0.1),
        ]
        found += [
            sample(ce, x, some, None, reduction, -100, 0.2),
            sample(ce, x, some, w, reduction),
        ]
        found += [sample(ce, x, t, None, reduction), sample(ce, x, t, w, reduction, -100, 0.1)]
        found += [sample("nll_loss_nd", x.log_softmax(1), some, w, reduction)]
    found += [
        sample(ce, d.normal(4, 6, 3), d.integers(6, 4, 3)),
        sample(ce, d.normal(6), d.integers(6), w[:6]),
    ]
    found += [
        sample(ce, d.normal(2, 4, 3), d.uniform(2, 4, 3).softmax(1)),
        sample(ce, x, y, None, 1, 3),
    ]
    found += [sample("nll_loss", x, y, None, 1, 3), sample("nll_loss", d.normal(6), d.integers(6))]
    found += [
        sample("nll_loss2d", d.normal(2, 4, 3, 2), d.integers(4, 2, 3, 2), d.uniform(4), 1, 3)
    ]
    a, b = d.normal(4, 3), d.normal(4, 3)
    sign = d.boolean(4, 3).double() * 2 - 1
    for reduction in (0, 1, 2):
        for op in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
            found.append(sample(op, a, b, reduction))
        found += [
            sample("soft_margin_loss", a, sign, reduction),
            sample("kl_div", a, b.softmax(1), reduction),
        ]
        found += [sample("binary_cross_entropy", a.sigmoid(), b.sigmoid(), d.uniform(3), reduction)]
        logits = "binary_cross_entropy_with_logits"
        found += [sample(logits, a, b.sigmoid(), None, d.uniform(3), reduction)]
        found += [sample("poisson_nll_loss", a, b.exp(), True, False, 1e-8, reduction)]
        found += [sample("hinge_embedding_loss", a, sign, 1.0, reduction)]
        found += [sample("margin_ranking_loss", a, b, sign, 0.1, reduction)]
        found += [sample("cosine_embedding_loss", a, b, sign[:, 0], 0.1, reduction)]
        found += [sample("triplet_margin_loss", a, b, d.normal(4, 3), reduction=reduction)]
        found += [sample("multi_margin_loss", x, y, 1, 1.0, w, reduction)]
        found += [sample("multilabel_margin_loss", x, d.integers(8, 6, 8), reduction)]
        lengths = (torch.tensor([5, 4, 5, 5]), torch.tensor([2, 1, 2, 2]))
        scores = d.normal(5, 4, 6).log_softmax(-1)
        found += [
            sample("ctc_loss.Tensor", scores, d.integers(5, 4, 2) + 1, *lengths, 0, reduction)
        ]
    found += [sample("l1_loss", a, d.normal(3), 1), sample("l1_loss", a, b, reduction=2)]
    return found


def recurrent() -> list[Sample]:
    d = Draw("recurrent")

    def weights(gates: int, inputs: int, hidden: int, both: bool) -> list[Tensor]:
        one = [
            (gates * hidden, inputs),
            (gates * hidden, hidden),
            (gates * hidden,),
            (gates * hidden,),
        ]
        return [d.normal(*shape) * 0.3 for shape in one * (2 if both else 1)]

    state = lambda n: d.normal(n, 4, 2)  # noqa: E731
    found = []
    for first in (True, False):
        x = d.normal(4, 5, 3) if first else d.normal(5, 4, 3)
        tail = (True, 1, 0.0, True, True, first)
        found += [sample("lstm.input", x, [state(2), state(2)], weights(4, 3, 2, True), *tail)]
        found += [sample("gru.input", x, state(2), weights(3, 3, 2, True), *tail)]
    tail = (True, 1, 0.0, False, False, True)
    for op in ("rnn_tanh.input", "rnn_relu.input"):
        found += [sample(op, d.normal(4, 5, 3), state(1), weights(1, 3, 2, False), *tail)]
    x, h = d.normal(4, 3), d.normal(4, 2)
    found += [sample("lstm_cell", x, [h, h.sin()], *weights(4, 3, 2, False))]
    found += [sample("gru_cell", x, h, *weights(3, 3, 2, False))]
    found += [
        sample(f"rnn_{kind}_cell", x, h, *weights(1, 3, 2, False)) for kind in ("tanh", "relu")
    ]
    return found
