"""Plans that were searched for run, and train what one device trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import autopar
from autopar.runtime.comm import Communicator
from autopar.runtime.launch import LocalRanks
from autopar.runtime.tiny_gpt import GPT, GPTConfig
from autopar.sharding.mesh import Mesh
from tests.models import zoo

Example = Callable[[], zoo.Example]


def gpt() -> zoo.Example:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=64, context=16, layers=4, heads=4, width=32))
    tokens = torch.randint(0, 64, (12, 16))
    return model, (tokens, tokens), {}


@pytest.mark.parametrize(
    ("build", "cluster"),
    [
        (gpt, "3xcpu"),
        (zoo.llama, "4xcpu"),
        pytest.param(zoo.t5, "4xcpu", marks=pytest.mark.long),
    ],
)
def test_a_searched_plan_equals_one_device(build: Example, cluster: str):
    model, args, kwargs = build()
    plan = autopar.plan(model, cluster, args, kwargs)
    assert plan.searched
    report = autopar.verify(model, args, kwargs, plan=plan, threads=True, dtype="float64")
    assert report.equal, str(report)


@pytest.mark.parametrize("mesh", ["pp=2,tp=2", pytest.param("pp=4", marks=pytest.mark.long)])
def test_a_searched_rest_of_a_mesh_equals_one_device(mesh: str):
    model, args, kwargs = gpt()
    plan = autopar.plan(model, "4xcpu", args, kwargs, mesh=mesh)
    assert plan.searched and Mesh.parse(mesh).axes == plan.mesh
    report = autopar.verify(model, args, kwargs, plan=plan, threads=True, dtype="float64")
    assert report.equal, str(report)


def _trained(comm: Communicator) -> tuple[str, list[float]]:
    model, args, kwargs = gpt()
    compiled = autopar.compile(model, f"{comm.world_size}xcpu", optimizer="sgd", lr=0.1, comm=comm)
    losses = [float(compiled.step(*args, **kwargs)) for _ in range(2)]
    return compiled.plan.to_json(), losses


def test_compile_searches_for_all_ranks_alike(ranks2: LocalRanks):
    plans, losses = zip(*ranks2.run(_trained), strict=True)
    assert plans[0] == plans[1] and losses[0] == losses[1]
    assert '"searched": true' in plans[0]
