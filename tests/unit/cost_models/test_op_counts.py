"""Every op with a sharding rule is described, and keeps for backward what torch keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autopar.cost_models.flops import count_call, is_described, tape_call
from autopar.cost_models.tape.program import Programs
from autopar.graph.ir import Node, TensorSpec, Value
from autopar.graph.views import VIEWS
from autopar.sharding.rule import registered_ops
from tests.unit.sharding.sample_groups import GROUPS, group
from tests.unit.sharding.samples import Sample, as_tuple, run_node, spec_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of deprecated ops, which have rules too

# What torch keeps of these differs, by little, or the op is composite and written here as one.
APART = {
    # Nothing is read: a shape, or a value that no gradient needs.
    "aten.gather.default", "aten.take.default", "aten.take_along_dim.default",
    "aten.argsort.default", "aten.argsort.stable", "aten.isfinite.default",
    "aten.isclose.default", "aten.index_add.default", "aten.index_copy.default",
    "aten.div.Tensor_mode", "aten.sgn.default",
    "transformers.grouped_mm_fallback.default", "autopar_routing.grouped_mm.default",
    "aten.embedding_bag.default",
    # Several ops, of which this package sees one.
    "aten.special_ndtr.default", "aten.special_ndtri.default", "aten.ldexp.Tensor",
    "aten.nanmean.default", "aten.linalg_norm.default", "aten.scatter_reduce.two",
    "aten.index_reduce.default", "aten.bilinear.default", "aten.cosine_similarity.default",
    "aten.pairwise_distance.default", "aten.instance_norm.default", "aten.l1_loss.default",
    "aten.poisson_nll_loss.default", "aten.hinge_embedding_loss.default",
    "aten.margin_ranking_loss.default", "aten.cosine_embedding_loss.default",
    "aten.triplet_margin_loss.default", "aten.multilabel_margin_loss.default",
    "aten.ctc_loss.Tensor", "aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input",
    "aten.rnn_relu.input", "aten.lstm_cell.default", "aten.gru_cell.default",
    "aten.rnn_tanh_cell.default", "aten.rnn_relu_cell.default",
    # Padding of one side more than of the other copies the input.
    "aten.conv2d.padding", "aten.conv3d.padding",
}  # fmt: skip


FREE = VIEWS | {
    "aten.lift_fresh.default", "aten.meshgrid.default", "aten.meshgrid.indexing",
    "aten.empty.memory_format", "aten.linalg_diagonal.default", "aten.to.prim_Device",
    "prims.convert_element_type.default", "aten._to_copy.default", "aten.clone.default",
}  # fmt: skip
"""Ops that may cost nothing."""


def smallest(case: Sample) -> int:
    """Bytes of the smallest result that is not empty."""
    return min((x.numel() * x.element_size() for x in case.outputs if x.numel()), default=0)


def taped(case: Sample) -> tuple[Node, dict[str, TensorSpec], Programs]:
    names = case.node.operands
    specs = {
        name: TensorSpec(spec_of(x).shape, spec_of(x).dtype, case.trains(slot))
        for slot, (name, x) in enumerate(zip(names, case.operands, strict=True))
    }
    trains = any(spec.requires_grad for spec in specs.values())
    outputs = tuple(
        Value(v.name, TensorSpec(v.spec.shape, v.spec.dtype, trains and v.spec.is_floating))
        for v in case.node.outputs
    )
    specs |= {value.name: value.spec for value in outputs}
    node = replace(case.node, outputs=outputs)
    return node, specs, tape_call(node, specs.__getitem__)


def kept_by_torch(case: Sample) -> tuple[set[str], int]:
    """Operands and results that autograd holds, and bytes of all else that it holds."""
    operands = [
        x.detach().clone().requires_grad_(case.trains(i)) for i, x in enumerate(case.operands)
    ]
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = as_tuple(run_node(case.node, operands))
    known = {x.untyped_storage().data_ptr(): f"result {i}" for i, x in enumerate(results)}
    known |= {x.untyped_storage().data_ptr(): f"operand {i}" for i, x in enumerate(operands)}
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in packed}
    rest = sum(size for place, size in storages.items() if place not in known)
    return {known[place] for place, size in storages.items() if place in known and size}, rest


def kept_by_tape(case: Sample, node: Node, programs: Programs) -> tuple[set[str], int]:
    names = list(node.operands)
    results = {programs.taped.results[v.name].memory: i for i, v in enumerate(node.outputs)}
    found, rest = set(), 0
    for memory in programs.saved:
        if memory.step is None:
            found.add(f"operand {names.index(memory.name)}")
        elif memory in results:
            found.add(f"result {results[memory]}")
        else:
            rest += memory.size_bytes
    return found, rest


def without_label_smoothing(case: Sample) -> bool:
    """Smoothing keeps masks of samples, a byte each, that are left out."""
    smoothed = case.node.op == "aten.cross_entropy_loss.default" and len(case.node.args) > 5
    return not smoothed or case.node.args[5] == 0


def test_every_rule_has_a_count() -> None:
    assert [op for op in registered_ops() if not is_described(op)] == []
    assert not is_described("aten.no_such_op.default")


@pytest.mark.parametrize("name", GROUPS)
def test_every_op_makes_what_torch_makes_and_keeps_what_torch_keeps(name: str) -> None:
    for case in group(name):
        node, specs, programs = taped(case)
        for value, want in zip(node.outputs, case.outputs, strict=True):
            made = programs.taped.results[value.name]
            assert (made.shape, made.dtype) == (tuple(want.shape), value.spec.dtype), str(case)
        kernels = count_call(node, specs.__getitem__)
        aliases = VIEWS | {
            "aten.detach.default",
            "aten.lift_fresh.default",
            "aten.meshgrid.default",
        }
        forward = [kernel for kernel in kernels if kernel.phase == "forward"]
        if node.op not in aliases and "meshgrid" not in node.op and forward:
            assert sum(kernel.write_bytes for kernel in forward) > 0, str(case)
        if name == "random" or case.reference is not None or node.op in APART:
            continue
        if without_label_smoothing(case):
            assert kept_by_tape(case, node, programs) == kept_by_torch(case), str(case)


def test_an_op_that_nobody_described_is_one_pass_over_its_operands() -> None:
    spec = TensorSpec((4, 8), "float32", True)
    node = Node(
        name="y", op="mine.strange.default", args=(), kwargs=(), outputs=(Value("y", spec),)
    )
    assert [kernel.write_bytes for kernel in count_call(node, lambda _: spec)] == [128]
