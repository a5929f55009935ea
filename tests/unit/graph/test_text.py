"""The text form and its parser are inverse to each other."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.graph.ir import ITEM_BYTES, Graph, Input, Node, Output, Ref, TensorSpec, Token, Value
from autopar.graph.text import parse, to_text

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,12}", fullmatch=True)
TOKENS = st.builds(
    Token,
    st.sampled_from(["dtype", "device", "layout", "memory_format"]),
    st.from_regex(r"[a-z][a-z0-9_]{0,8}(:[0-9])?", fullmatch=True),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.just(math.nan),
    st.text(max_size=8),
    st.builds(Ref, NAMES),
    TOKENS,
)
ARGS = st.recursive(LEAVES, lambda item: st.lists(item, max_size=3).map(tuple), max_leaves=6)
SPECS = st.builds(
    TensorSpec,
    st.lists(st.integers(0, 10**12), max_size=4).map(tuple),
    st.sampled_from(sorted(ITEM_BYTES)),
    st.booleans(),
)
VALUES = st.builds(Value, NAMES, SPECS)
INPUTS = st.builds(
    Input,
    kind=st.sampled_from(["parameter", "buffer", "constant", "input"]),
    value=VALUES,
    target=st.text(max_size=12),
    persistent=st.booleans(),
)
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda key: key not in ("inf", "nan"))


@st.composite
def nodes(draw):
    outputs = tuple(draw(st.lists(VALUES, max_size=3)))
    return Node(
        name=outputs[0].name if outputs else draw(NAMES),
        op=f"aten.{draw(st.from_regex('[a-z_]{1,8}', fullmatch=True))}.default",
        args=tuple(draw(st.lists(ARGS, max_size=3))),
        kwargs=tuple(draw(st.lists(st.tuples(KEYS, ARGS), max_size=2))),
        outputs=outputs,
        module=draw(st.text(max_size=8)),
        source=draw(st.text(max_size=8)),
        context=tuple(draw(st.lists(st.text(max_size=5), max_size=3))),
    )


@st.composite
def results(draw):
    name = draw(st.none() | NAMES)
    literal = draw(ARGS.filter(lambda arg: not isinstance(arg, Ref))) if name is None else None
    kind = draw(st.sampled_from(["user", "buffer"]))
    return Output(kind=kind, value=name, target=draw(st.text(max_size=8)), literal=literal)


GRAPHS = st.builds(
    Graph,
    inputs=st.lists(INPUTS, max_size=3).map(tuple),
    nodes=st.lists(nodes(), max_size=4).map(tuple),
    outputs=st.lists(results(), max_size=3).map(tuple),
)


@settings(max_examples=40, deadline=None)
@given(GRAPHS)
def test_round_trip(graph):
    text = to_text(graph)
    again = parse(text)
    assert to_text(again) == text
    assert again == graph


def test_example():
    text = (
        'parameter %fc.weight: float32[2, 4]* = "fc.weight"\n'
        'buffer %mean: float32[4] = "mean" transient\n'
        'input %x: float32[8, 4] = "args[0]"\n'
        "%linear_0: float32[8, 2]* = aten.linear.default(%x, %fc.weight, None)"
        ' @ "fc" "model.py:12" ["autocast", "cpu", "bfloat16"]\n'
        "%to_0: bfloat16[8, 2]* = aten.to.dtype(%linear_0, dtype:bfloat16)"
        ' {scale=1e-05, low=-inf, dims=(0, -1)} @ "" ""\n'
        'return user %to_0 "[0]"\n'
        'return user True "[1]"\n'
    )
    graph = parse(text)
    assert graph.nodes[1].kwargs == (("scale", 1e-5), ("low", -math.inf), ("dims", (0, -1)))
    assert graph.inputs[1].persistent is False
    assert to_text(graph) == text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('input %x: float32[8 4] = "a"', "expected ','"),
        ('tensor %x: float32[8] = "a"', "unknown line kind"),
        ('%y: float32[] = aten.neg.default(%x @ "" ""', "expected ','"),
        ('%y: float32[] = aten.neg.default(what) @ "" ""', "expected an argument"),
        ("return user %x", "expected string"),
    ],
)
def test_malformed_lines_are_named(line, reason):
    with pytest.raises(ValueError, match="line 2") as error:
        parse("\n" + line)
    assert reason in str(error.value)
