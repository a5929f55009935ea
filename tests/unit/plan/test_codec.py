"""Plan files: written, read back, and every mutilated field refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from autopar.errors import PlanError
from autopar.plan.build import apply_plan, make_plan
from autopar.plan.plan import Plan
from autopar.sharding.mesh import Mesh
from tests.models.cases import language
from tests.models.check import Case

WRONG: tuple[Any, ...] = (
    None, 3, -1, 1.5, True, "x", "", [], {}, [1], ["x"], [[1, 2]], [["x", 1]], {"a": 1}, [{}],
    float("nan"),
)  # fmt: skip
# What these hold is for people to read, or may be left out.
FREE = {
    ("notes",), ("unruled",), ("strategy",), ("searched",), ("overrides",), ("recompute",),
    ("structure",), ("forecast",),
}  # fmt: skip


@cache
def case() -> Case:
    return language.heads(6)


@cache
def plan() -> Plan:
    made, _ = make_plan(case().traced.graph, Mesh.parse("dp=2,tp=4"), "megatron", notes=("a note",))
    return made


def data() -> Any:
    held = json.loads(plan().to_json())
    held["overrides"] = {"0.query/aten.linear.default#0": ["batch@b0:1x4", *["heads@n:4x6"] * 2]}
    held["unruled"] = [{"op": "aten.x", "module": "m", "source": "f.py:1", "size_bytes": 8}]
    return held


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in JSON; two entries of each list."""
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        entries = enumerate(value[:2])
    for key, item in entries:
        yield from paths(item, (*path, key))


def changed(path: tuple[Any, ...], value: Any) -> Any:
    held = data()
    inner = held
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return held


def test_a_plan_survives_its_file(tmp_path):
    file = tmp_path / "plan.json"
    plan().save(file)
    assert Plan.load(file) == plan()
    assert Plan.from_json(json.dumps(data())).overrides
    assert apply_plan(Plan.from_json(json.dumps(data())), case().traced.graph)


def test_reading_a_plan_needs_no_torch(tmp_path):
    file = tmp_path / "plan.json"
    plan().save(file)
    code = (
        "import sys, autopar; plan = autopar.Plan.load(sys.argv[1]); "
        "assert 'torch' not in sys.modules; print(plan.strategy, *plan.notes)"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True
    )
    assert "megatron" in made.stdout and "a note" in made.stdout


def test_the_file_is_for_people():
    text = plan().to_json()
    assert '"0.query.weight"' in text and "heads" in text
    assert "v1" not in text, "names of values are not stable"


@pytest.mark.parametrize("name", sorted({path[0] for path in paths(data())}))
def test_every_wrong_field_is_refused_by_name(name: str):
    graph = case().traced.graph
    for path in paths(data()):
        if path[0] != name:
            continue
        for value in WRONG:
            if (path[:1] in FREE or path[0] == "storage") and _harmless(path, value):
                continue
            held = changed(path, value)
            if json.dumps(held) == json.dumps(data()):
                continue
            try:
                apply_plan(Plan.from_json(json.dumps(held), "p.json"), graph)
            except PlanError as error:
                assert error.where is not None, error
                assert name in str(error) or "constraints" in str(error), error
            else:
                # The only changes that still make a plan: other ranks, or less split.
                assert path in {("mesh", 0, 1), ("order", 0, 1)}, (path, value)


def _harmless(path: tuple[Any, ...], value: Any) -> bool:
    """Whether a plan with this change is as good as before."""
    try:
        Plan.from_json(json.dumps(changed(path, value)))
    except PlanError:
        return False
    return path[0] != "overrides" or value == {}


@pytest.mark.parametrize("name", sorted(data()))
def test_every_field_is_needed(name: str):
    held = data()
    del held[name]
    with pytest.raises(PlanError, match=name):
        Plan.from_json(json.dumps(held), "p.json")


def test_unknown_fields_are_refused():
    with pytest.raises(PlanError, match="unheard_of"):
        Plan.from_json(json.dumps(data() | {"unheard_of": 1}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "p.json:1:1"),
        ("{", "not JSON"),
        ("[]", "an object"),
        ("3", "an object"),
        ('{"schema_version": 99}', "a version from 1 to 2"),
    ],
)
def test_no_plan_at_all(text: str, words: str):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(text, "p.json")
    assert words in str(caught.value) and "p.json" in str(caught.value)


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(PlanError, match=r"none\.json"):
        Plan.load(tmp_path / "none.json")
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(binary)
