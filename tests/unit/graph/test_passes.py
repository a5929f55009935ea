"""Passes on graphs written by hand."""

from dataclasses import replace

import pytest

from autopar.errors import TraceError
from autopar.graph.blocks import find_blocks
from autopar.graph.canonical import canonicalise
from autopar.graph.dce import number, remove_dead
from autopar.graph.functional import functionalise
from autopar.graph.ir import TensorSpec
from autopar.graph.mutations import promote
from autopar.graph.text import parse, to_text
from autopar.graph.verify import GraphError, verify

X = 'input %x: float32[4, 6]* = "args[0]"\n'
W = 'parameter %w: float32[6, 6]* = "w"\n'
B = 'buffer %b: float32[6] = "b"\n'


def lines(*calls, inputs=X, outputs=("y",)):
    body = "".join(f'%{call} @ "" ""\n' for call in calls)
    return parse(inputs + body + "".join(f'return user %{name} "{name}"\n' for name in outputs))


def calls(graph):
    return [line.split(" = ", 1)[1].split(" @")[0] for line in _node_lines(graph)]


def _node_lines(graph):
    return [line for line in to_text(number(graph)).splitlines() if line.startswith("%")]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("y: float32[24] = aten.view.default(%x, (-1))", ["aten.reshape.default(%x, (24))"]),
        ("y: float32[4, 6] = aten.view.default(%x, (4, 6))", []),
        ("y: float32[6, 4] = aten.t.default(%x)", ["aten.permute.default(%x, (1, 0))"]),
        ("y: float32[6, 4] = aten.transpose.int(%x, -1, -2)", ["aten.permute.default(%x, (1, 0))"]),
        ("y: float32[6, 4] = aten.movedim.int(%x, 0, -1)", ["aten.permute.default(%x, (1, 0))"]),
        (
            "y: float32[2, 4, 6] = aten.expand.default(%x, (2, -1, -1))",
            ["aten.expand.default(%x, (2, 4, 6))"],
        ),
        (
            "y: float32[4] = aten.select.int(%x, -1, -1)",
            ["aten.slice.Tensor(%x, 1, 5, 6, 1)", "aten.reshape.default(%slice_0, (4))"],
        ),
        ("y: float32[4, 6] = aten.slice.Tensor(%x, 0, 0, 9223372036854775807, 1)", []),
        (
            "y: float32[4, 3] = aten.slice.Tensor(%x, 1, -3, None, 1)",
            ["aten.slice.Tensor(%x, 1, 3, 6, 1)"],
        ),
        (
            "y: float32[4, 2] = aten.narrow.default(%x, 1, -2, 2)",
            ["aten.slice.Tensor(%x, 1, 4, 6, 1)"],
        ),
        ("y: float32[4, 6] = aten.to.dtype(%x, dtype:float32, False, False, None)", []),
        (
            "y: float16[4, 6] = aten._to_copy.default(%x) {dtype=dtype:float16}",
            ["aten.to.dtype(%x, dtype:float16)"],
        ),
        ("y: float32[4, 6] = aten.clone.default(%x)", []),
        ("y: float32[4, 6] = aten.dropout.default(%x, 0.5, False)", []),
        (
            "y: float32[4, 6] = aten.ones_like.default(%x) {pin_memory=False}",
            ["aten.full.default((4, 6), 1.0) {dtype=dtype:float32}"],
        ),
        (
            "y: float32[2] = aten.zeros.default((2)) {device=device:cpu}",
            ["aten.full.default((2), 0.0) {dtype=dtype:float32}"],
        ),
        (
            "y: float32[4, 2, 6] = aten.stack.default((%x, %x), 1)",
            [
                "aten.reshape.default(%x, (4, 1, 6))",
                "aten.reshape.default(%x, (4, 1, 6))",
                "aten.cat.default((%reshape_0, %reshape_1), 1)",
            ],
        ),
        (
            "y: float32[4, 6] = aten.rand_like.default(%x) {pin_memory=False}",
            ["aten.rand.default((4, 6)) {dtype=dtype:float32}"],
        ),
    ],
)
def test_canonical_spelling(call, expected):
    graph = remove_dead(canonicalise(lines(call)))
    assert calls(graph) == expected
    verify(graph)


def test_splits():
    graph = canonicalise(
        lines(
            "a: float32[4, 4], %c: float32[4, 2] = aten.chunk.default(%x, 2, -1)",
            "p: float32[6], %q: float32[6], %r: float32[6], %s: float32[6]"
            " = aten.unbind.int(%x, 0)",
            outputs=("a", "c", "s"),
        )
    )
    found = calls(remove_dead(graph))
    assert found[0] == "aten.split_with_sizes.default(%x, (4, 2), 1)"
    assert found[1] == "aten.split_with_sizes.default(%x, (1, 1, 1, 1), 0)"
    assert found[2] == "aten.reshape.default(%split_with_sizes_5, (6))"


def test_gradients_are_followed():
    graph = canonicalise(
        lines(
            "a: float32[4, 6] = aten.neg.default(%x)",
            "d: float32[4, 6] = aten.detach.default(%a)",
            "e: float32[4, 6] = aten.detach.default(%d)",
            "i: int64[4] = aten.argmax.default(%a, -1, False)",
            "y: float32[4, 6] = aten.mul.Tensor(%a, %e)",
        )
    )
    text = to_text(graph)
    assert text.count("aten.detach.default") == 1
    assert "%detach_0: float32[4, 6] =" in text
    assert "%mul_0: float32[4, 6]* =" in text
    assert "%argmax_0: int64[4] =" in text


def test_write_through_a_view_reaches_the_base_and_other_views():
    graph = functionalise(
        lines(
            "h: float32[4, 6] = aten.neg.default(%x)",
            "t: float32[6, 4] = aten.t.default(%h)",
            "s: float32[4] = aten.select.int(%h, 1, 2)",
            "m: float32[4] = aten.mul_.Tensor(%s, 0.5)",
            "y: float32[6, 4] = aten.exp.default(%t)",
        )
    )
    assert calls(graph) == [
        "aten.neg.default(%x)",
        "aten.slice.Tensor(%neg_0, 1, 2, 3, 1)",
        "aten.reshape.default(%slice_0, (4))",
        "aten.mul.Tensor(%reshape_0, 0.5)",
        "aten.slice.Tensor(%neg_0, 1, 2, 3, 1)",
        "aten.reshape.default(%mul_0, (4, 1))",
        "aten.slice_scatter.default(%neg_0, %reshape_1, 1, 2, 3, 1)",
        "aten.permute.default(%slice_scatter_0, (1, 0))",
        "aten.exp.default(%permute_0)",
    ]


def test_written_buffer_is_an_output_and_keeps_its_dtype():
    graph = functionalise(
        lines(
            "m: float32[6] = aten.mean.dim(%x, (0), False)",
            "d: float64[6] = aten.to.dtype(%m, dtype:float64)",
            "n: float32[6] = aten.add_.Tensor(%b, %d)",
            inputs=X + B,
            outputs=("n",),
        )
    )
    assert "aten.to.dtype(%add_0, dtype:float32)" in calls(graph)[-1]
    kinds = [(item.kind, item.target) for item in graph.outputs]
    assert kinds == [("user", "n"), ("buffer", "b")]
    assert graph.outputs[0].value == graph.outputs[1].value
    verify(graph, canonical=False)


def test_written_parameter_is_refused():
    graph = parse(
        X
        + W
        + '%d: float32[6, 6] = aten.detach.default(%w) @ "emb" "m.py:3"\n'
        + '%e: float32[6, 6] = aten.embedding_renorm_.default(%d, %x, 1.0, 2.0) @ "emb" "m.py:3"\n'
        + 'return user %x ""\n'
    )
    with pytest.raises(TraceError) as error:
        functionalise(graph)
    assert "'w'" in error.value.what
    assert error.value.where == "module 'emb', m.py:3"
    assert "max_norm" in error.value.fix


def test_batch_norm_in_training_returns_new_statistics():
    graph = functionalise(
        parse(
            'input %x: float32[4, 6] = "args[0]"\n' + B + 'buffer %v: float32[6] = "v"\n'
            "%y: float32[4, 6] = aten.batch_norm.default(%x, None, None, %b, %v, True, 0.1, 1e-05,"
            ' False) @ "bn" ""\nreturn user %y ""\n'
        )
    )
    (node,) = graph.nodes
    assert node.op == "aten._native_batch_norm_legit_functional.default"
    assert [item.value for item in graph.outputs[1:]] == [v.name for v in node.outputs[3:]]


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((("float32", 1), ("float64", 1)), "float64"),
        ((("float32", 1), ("float64", 0)), "float32"),
        ((("int64", 2), ("float32", 0)), "float32"),
        ((("float16", 1), ("bfloat16", 1)), "float32"),
        ((("uint8", 1), ("int8", 1)), "int16"),
        ((("bool", 1), ("int64", 0)), "int64"),
    ],
)
def test_promotion(dtypes, expected):
    assert promote([TensorSpec((2,) * ndim, name) for name, ndim in dtypes]) == expected


def test_dead_calls_and_constants_go():
    graph = lines(
        "a: float32[4, 6] = aten.neg.default(%x)",
        "d: float32[4, 6] = aten.exp.default(%k)",
        inputs=X + W + 'constant %k: float32[4, 6] = "k"\n',
        outputs=("a",),
    )
    assert [item.target for item in remove_dead(graph).inputs] == ["args[0]", "w"]
    assert len(remove_dead(graph).nodes) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (X + '%y: float32[4, 6] = aten.neg.default(%z) @ "" ""\n', "before it is made"),
        (X + '%x: float32[4, 6] = aten.neg.default(%x) @ "" ""\n', "made twice"),
        (X + 'return user %z ""\n', "which nothing makes"),
        (X + '%y: float32[4, 6] = aten.relu_.default(%x) @ "" ""\n', "not canonical"),
        (X + '%y: float32[4, 6] = aten.view.default(%x, (4, 6)) @ "" ""\n', "not canonical"),
        (X + 'return buffer %x "b"\n', "belongs to no buffer"),
        (X + B + 'return buffer %x "b"\n', "becomes"),
        (X + X.replace("%x", "%z"), "two inputs"),
        (X + '%y: int64[4]* = aten.neg.default(%x) @ "" ""\n', "cannot require a gradient"),
    ],
)
def test_verify_names_the_violation(text, reason):
    with pytest.raises(GraphError, match=reason):
        verify(parse(text))


def layer(index, source, width=6):
    return (
        f'%a{index}: float32[4, {width}] = aten.exp.default(%{source}) @ "layers.{index}.act" ""\n'
        f"%b{index}: float32[4, {width}] = aten.mul.Tensor(%a{index}, %{source})"
        f' @ "layers.{index}" ""\n'
    )


def test_blocks_are_isomorphic_and_counted():
    text = X + layer(0, "x") + layer(1, "b0") + layer(2, "b1")
    odd = '%c: float32[4, 6] = aten.exp.default(%b2) @ "layers.3" ""\nreturn user %c ""\n'
    (block,) = find_blocks(parse(text.replace("6]*", "6]") + odd))
    assert block.count == 3
    assert block.paths == ("layers.0", "layers.1", "layers.2")
    assert block.nodes == ((0, 1), (2, 3), (4, 5))
    assert block.inputs == (("x",), ("b0",), ("b1",))
    assert block.outputs == (("b0",), ("b1",), ("b2",))


def test_blocks_that_differ_in_wiring_or_constants_are_apart():
    graph = parse(X.replace("*", "") + layer(0, "x") + layer(1, "b0") + 'return user %b1 ""\n')
    second = graph.nodes[3]
    swapped = replace(second, args=(second.args[1], second.args[0]))
    assert find_blocks(replace(graph, nodes=(*graph.nodes[:3], swapped), _specs={})) == ()
    assert len(find_blocks(graph)) == 1
