"""The fuzz notices mistakes: each injected one is caught by random plans, drawn blindly."""

from __future__ import annotations

import contextlib
import io
import textwrap

import pytest

from autopar.sharding.mesh import Mesh
from tests.distributed.fuzz import run
from tests.distributed.fuzz_bugs import BUGS
from tests.distributed.fuzz_campaign import campaign, draw, reference
from tests.distributed.fuzz_coverage import Coverage
from tests.distributed.fuzz_models import subject
from tests.distributed.fuzz_shrink import Case, shrink, smallest
from tests.marks import later

MAX_PLANS = 12
"""A campaign of 150 plans gives every model at least 15."""

SMALL = Mesh.parse("x=2")
"""Programs are captured anew for every rank, and bugs of programs show on two."""

MISFITS = ("AttributeError", "TypeError", "NameError", "KeyError")


@pytest.mark.parametrize("name", [*list(BUGS)[::2], *later(*list(BUGS)[1::2])])
def test_an_injected_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch):
    bug = BUGS[name]
    right, want = subject(bug.model), reference(bug.model)
    wrong, coverage = bug.subject(right), Coverage()
    for seed in range(MAX_PLANS):
        with monkeypatch.context() as patch:
            bug.inject(patch)
            _, sharded = draw(wrong, seed, coverage, SMALL if bug.programs else None)
            found, program = run(wrong, sharded, want, programs=bug.programs, zero=bug.zero)
        if found:
            break
        assert program is not None
        coverage.add(right, sharded, program)
    else:
        pytest.fail(f"{MAX_PLANS} plans do not notice it")
    # A wrong value, or shapes that do not meet; not a mistake that no longer fits the code.
    assert not any(word in item.name for item in found for word in MISFITS), found[0]
    _, sharded = draw(right, seed, coverage, SMALL if bug.programs else None)
    assert not run(right, sharded, want)[0]


def test_a_failing_plan_shrinks_to_the_choice_that_matters(monkeypatch: pytest.MonkeyPatch):
    name, bug = "moe", BUGS["mean divides by the local count"]
    held, want = subject(name), reference(name)
    bug.inject(monkeypatch)
    sharded = next(s for s in (draw(held, seed)[1] for seed in range(20)) if run(held, s, want)[0])
    small = smallest(Case(subject=held, sharded=sharded, want=want))
    left = [
        (node.op, picked)
        for node, picked in zip(held.traced.graph.nodes, small.sharded.choices, strict=True)
        if any(choice.kind != "replicate" for choice in picked)
    ]
    assert len(left) == 1
    assert left[0][0].startswith("aten.mean")
    # The report holds code that runs the small plan again.
    report = shrink(small)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(textwrap.dedent(report[report.index("  from tests") :]), {})
    assert "differs by" in said.getvalue()


def test_a_campaign_reports_a_failure_with_its_reproducer(monkeypatch: pytest.MonkeyPatch):
    BUGS["softmax of the local part"].inject(monkeypatch)
    held, want = subject("moe"), reference("moe")
    seed = next(seed for seed in range(20) if run(held, draw(held, seed, Coverage())[1], want)[0])
    result = campaign([("moe", seed)])
    assert result.plans == 1
    assert f"moe, seed {seed}, mesh" in result.failures[0]
    assert "reproduce('moe'" in result.failures[0]
