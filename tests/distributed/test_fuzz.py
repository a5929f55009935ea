"""Random legal plans train exactly what one device trains, and reach everything there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from autopar.runtime.launch import LocalRanks
from tests.distributed.fuzz import TOLERANCE, differences, solo
from tests.distributed.fuzz_campaign import Campaign, on_rank, on_two_processes, reference
from tests.distributed.fuzz_models import BUILDERS, build, eager, subject, whole

CI_PLANS = 150
LONG_PLANS = 2000

pytestmark = pytest.mark.timeout(900)


Record = Callable[[str, object], None]


def report(result: Campaign, record_property: Record) -> None:
    """Leave figures and coverage for the summary at the end of the run (see conftest)."""
    head = (
        f"{result.plans} plans, {len(result.failures)} failures, {result.round_trips} through "
        f"their file form, {result.seconds:.0f} s"
    )
    record_property("summary", f"{head}\n{result.coverage.table(result.universe())}")


@pytest.fixture(scope="module")
def fuzzed() -> Campaign:
    return on_two_processes(CI_PLANS)


def test_no_random_plan_differs_from_one_device(fuzzed: Campaign, record_property: Record):
    report(fuzzed, record_property)
    assert fuzzed.plans == CI_PLANS
    assert not fuzzed.failures, "\n\n".join(fuzzed.failures)


def test_random_plans_reach_every_choice_lowering_and_reshard(fuzzed: Campaign):
    missing = fuzzed.coverage.missing(fuzzed.universe())
    assert not missing, "\n".join(map(str, missing))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt", 3),
        ("resnet", 3),
        *(pytest.param(name, 4, marks=pytest.mark.long) for name in ("resnet", "moe")),
    ],
)
def test_random_plans_on_processes(name: str, count: int, local_ranks: Callable[[int], LocalRanks]):
    # Threads exchange tensors in their own way; gloo pads, copies and orders in another.
    for found in local_ranks(count).run(on_rank, name, (0, 1, 2)):
        assert not found, "\n".join(found)


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_no_random_plan_of_two_thousand_differs(record_property: Record):
    result = on_two_processes(LONG_PLANS, start=CI_PLANS)
    report(result, record_property)
    assert not result.failures, "\n\n".join(result.failures)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_graph_on_one_device_is_the_eager_model(name: str):
    # Without dropout, whose numbers eager torch draws otherwise, in the models' own float32.
    held = whole(name)
    found = differences(solo(held), eager(build(name, dropout=False)), 0, 2e-6)
    assert not found, "\n".join(map(str, found))


def test_a_model_draws_other_masks_in_another_step():
    held = subject("gpt")
    again = solo(held, seed=1)
    assert differences(reference("gpt"), again, 0, TOLERANCE)
    assert not differences(reference("gpt"), solo(held), 0, 0.0)


def test_losses_are_of_the_size_of_a_guess():
    # A model whose loss is 0 or huge would hide mistakes.
    for name in BUILDERS:
        loss = reference(name)["loss"]
        assert loss is not None
        assert 0.1 < float(loss) < 10
        found = [value for value in reference(name).values() if value is not None]
        assert all(torch.isfinite(value).all() for value in found)
