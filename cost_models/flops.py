"""What one op call costs on one device: floating point operations and bytes, forward and backward.

The counts are those of `autopar.cost_models.ops`. Products of matrices, convolutions and attention
count as `torch.utils.flop_counter` counts them: a multiply and an add are two operations, a causal
mask takes nothing off, and fused attention computes its scores again in backward.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.cost_models.implementation import CPU, Implementation
from autopar.cost_models.kernels import kernels_of
from autopar.cost_models.ops.call import Rank, find
from autopar.cost_models.tape.program import Programs, split
from autopar.cost_models.tape.stage import Call, StageTask, tape_stage
from autopar.cost_models.work import Kernel
from autopar.graph.ir import Node, TensorSpec
from autopar.sharding.choices import CallPlacement
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import Pair

_NOWHERE = Pair((), ())


def is_described(op: str) -> bool:
    """Whether it is known what `op` does; others count as one pass over their operands."""
    return find(op) is not None


def tape_call(
    node: Node, spec: Callable[[str], TensorSpec], implementation: Implementation = CPU
) -> Programs:
    """One call as a stage of its own, on one device.

    Args:
        node: The call.
        spec: Spec of an operand or output by name; operands that require a gradient get one.
        implementation: How it is carried out.
    """
    names = tuple(dict.fromkeys(node.operands))
    task = StageTask(
        index=0,
        calls=(
            Call(
                node=node,
                rule=None,
                choices=(),
                placement=CallPlacement(
                    operands=(_NOWHERE,) * len(node.operands),
                    outputs=(_NOWHERE,) * len(node.outputs),
                ),
            ),
        ),
        spec=spec,
        pair=lambda _: _NOWHERE,
        kinds=dict.fromkeys(names, "boundary"),
        arriving=names,
        leaving=tuple(value.name for value in node.outputs),
    )
    return split(tape_stage(task, Rank.of(Mesh(())), implementation))


def count_call(
    node: Node, spec: Callable[[str], TensorSpec], implementation: Implementation = CPU
) -> tuple[Kernel, ...]:
    """Kernels of one call on one device; see `tape_call`.

    Example:
        >>> from autopar.graph.ir import Node, Ref, TensorSpec, Value
        >>> specs = {name: TensorSpec((8, 8), "float32", True) for name in ("a", "b", "c")}
        >>> call = Node(
        ...     name="c", op="aten.mm.default", args=(Ref("a"), Ref("b")),
        ...     outputs=(Value("c", specs["c"]),),
        ... )
        >>> [(kernel.phase, kernel.flops) for kernel in count_call(call, specs.__getitem__)]
        [('forward', 1024), ('input_gradient', 1024), ('input_gradient', 1024)]
    """
    return kernels_of(tape_call(node, spec, implementation))
