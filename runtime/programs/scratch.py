"""Memory that communicators need beside operands and results, made visible in programs."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, fx

from autopar.runtime.programs import ops
from autopar.runtime.programs.edit import Editor
from autopar.runtime.programs.program import Program

_SCATTERS = frozenset({ops.REDUCE_SCATTER, ops.start_reduce_scatter})


def with_gloo_scratch(program: Program) -> Program:
    """The program as it uses memory on CPU ranks, for walks only.

    There a reduce-scatter exchanges rows and adds them up when it is waited for, see
    `autopar.runtime.comm_torch`: the handle holds as much as the operand, and the result is new.

    Args:
        program: Not changed.
    """
    if not any(node.target in _SCATTERS for node in program.calls()):
        return program
    editor = Editor(program)
    for node in list(editor.graph.nodes):
        if node.target is ops.start_reduce_scatter:
            node.meta["val"] = _rows(editor, node)
            for user in list(node.users):
                if user.target is ops.wait:
                    _sum_after(editor, user, node)
        elif node.target is ops.REDUCE_SCATTER:
            _split(editor, node)
    editor.sync()
    return replace(
        program, graph=editor.graph, inputs=tuple(editor.inputs), outputs=tuple(editor.outputs)
    )


def add_rows(rows: Tensor, *held: Tensor) -> Tensor:
    """The sum of what has been exchanged; `held` is in use meanwhile."""
    return rows.sum(0)


def _rows(editor: Editor, node: fx.Node) -> Tensor:
    operand = node.all_input_nodes[0].meta["val"]
    return editor.empty(tuple(operand.shape), operand.dtype, operand.device)


def _sum_after(editor: Editor, wait: fx.Node, start: fx.Node, *held: fx.Node) -> None:
    """Let a wait give the rows, which are added up after it, when the operand is gone."""
    with editor.graph.inserting_after(wait):
        total = editor.graph.call_function(add_rows, (wait, *held))
    total.meta = dict(wait.meta)
    _take_place(editor, wait, total)
    total.args = (wait, *held)
    wait.meta["val"] = start.meta["val"]


def _split(editor: Editor, node: fx.Node) -> None:
    """Turn a blocking reduce-scatter into a start, a wait and the sum."""
    with editor.graph.inserting_before(node):
        start = editor.graph.call_function(ops.start_reduce_scatter, node.args, node.kwargs)
        done = editor.graph.call_function(ops.wait, (start,))
    start.meta, done.meta = dict(node.meta), dict(node.meta)
    start.meta["val"] = _rows(editor, node)
    _take_place(editor, node, done)
    operand = node.all_input_nodes[0]
    editor.graph.erase_node(node)
    _sum_after(editor, done, start, operand)


def _take_place(editor: Editor, old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    for slot, result in editor.outputs.items():
        if result is old:
            editor.outputs[slot] = new
