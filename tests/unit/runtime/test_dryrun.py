"""Dry runs: summaries against the node-level walk, messages, CUDA's ops, the command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar import api
from autopar.cli.dryrun import read_ranks
from autopar.cli.main import main
from autopar.errors import InputError
from autopar.plan.build import make_plan
from autopar.runtime.dryrun import DryRun, dry_run
from autopar.runtime.dryrun_report import as_json, as_text
from autopar.runtime.loader import load_model
from autopar.runtime.tiny_gpt import GPT, GPTConfig
from autopar.schedules.actions import SENDS, Action, Schedule
from autopar.schedules.communicate import add_communication
from autopar.schedules.deliveries import Deliveries
from autopar.schedules.make import make_schedule
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced, trace


class Norms(nn.Module):
    """Batch statistics, buffers, dropout and a message that passes a stage by."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.second, self.drop = nn.Linear(16, 16), nn.Dropout(0.25)
        self.third, self.last = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """A loss."""
        a = self.norm(self.first(x))
        b = self.drop(torch.relu(self.second(a)))
        return self.last(torch.tanh(self.third(b)) + a).square().mean()


@cache
def traced_gpt() -> Traced:
    torch.manual_seed(0)
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    config = GPTConfig(vocabulary=32, context=16, layers=2, heads=2, width=16)
    return trace(GPT(config), (tokens, tokens), {}, None)


@cache
def traced_norms() -> Traced:
    return trace(Norms(), (torch.zeros(8, 8),), {}, None)


MODELS = {"gpt": traced_gpt, "norms": traced_norms}


def run(model: str, mesh: str, constraints: str, **options: object) -> DryRun:
    traced = MODELS[model]()
    plan, _ = make_plan(traced.graph, Mesh.parse(mesh), constraints, notes=traced.notes)
    ranks = sorted({0, plan.device_mesh.size - 1} if plan.num_stages > 1 else {0})
    return dry_run(traced, plan, ranks, **options)  # type: ignore[arg-type]


CASES = [
    ("gpt", "dp=1", "ddp"),
    ("gpt", "dp=2", "ddp,zero=3,microbatches=2"),
    ("gpt", "pp=2,dp=2", "ddp,zero=1,microbatches=4,schedule=1f1b,recompute=selective"),
    ("gpt", "pp=2,dp=2", "ddp,zero=2,microbatches=4,schedule=zb_h1"),
    ("gpt", "pp=2,tp=2", "megatron,microbatches=4,schedule=zbv"),
    ("gpt", "pp=2", "ddp,microbatches=4,schedule=zb_h1,recompute=selective"),
    ("gpt", "pp=2,tp=2", "megatron_sp,microbatches=4,schedule=interleaved_1f1b,chunks=2"),
    ("norms", "pp=3", "ddp,microbatches=4,schedule=1f1b"),
    ("norms", "pp=2,dp=2", "ddp,microbatches=4,schedule=pipedream"),
    ("norms", "pp=2", "ddp,microbatches=4,schedule=pipedream_2bw"),
]


@pytest.mark.parametrize(("model", "mesh", "constraints"), CASES)
def test_summaries_equal_the_node_level_walk(model: str, mesh: str, constraints: str) -> None:
    """To the byte, after and during every action."""
    summarised = run(model, mesh, constraints)
    walked = run(model, mesh, constraints, by_node=True)
    for one, other in zip(summarised.ranks, walked.ranks, strict=True):
        assert [(m.what, m.peak_bytes, m.live_bytes) for m in one.moments] == [
            (m.what, m.peak_bytes, m.live_bytes) for m in other.moments
        ]
        assert (one.peak_bytes, one.resident) == (other.peak_bytes, other.resident)
        assert one.peak_bytes == max(m.peak_bytes for m in one.moments)
        # Weights of old versions come and go; else nothing outlives a step.
        if "pipedream" not in constraints:
            assert one.moments[-1].live_bytes == one.resident_bytes


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"]),
    ranks=st.integers(2, 4),
    rounds=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_messages_are_in_use_until_an_answer_proves_their_arrival(
    name: str, ranks: int, rounds: int
) -> None:
    """An oracle over all orders: what the rank cannot know may still be under way."""
    chunks = 2 if name in ("interleaved_1f1b", "zbv") else 1
    plain = make_schedule(name, ranks, ranks * rounds, chunks=chunks)
    pairs = {(stage, stage + 1) for stage in range(plain.num_stages - 1)}
    schedule = add_communication(plain, pairs, pairs)
    for rank in range(ranks):
        deliveries = Deliveries(schedule, rank)
        for position, action in enumerate(schedule.actions[rank]):
            if action.kind in SENDS:
                arrived = {now for now in range(position, len(schedule.actions[rank]) + 1)
                           if deliveries.arrived(action, now)}  # fmt: skip
                expected = known_after(schedule, rank, action)
                assert arrived == set(range(expected, len(schedule.actions[rank]) + 1))


def known_after(schedule: Schedule, rank: int, sent: Action) -> int:
    """The first number of own actions after which the message must have been received.

    Runs everybody as far as they get while its receiver never takes it: what this rank can still
    do then proves nothing.
    """
    taken = sent.counterpart
    done = [0] * schedule.num_ranks
    out: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for other, row in enumerate(schedule):
            while done[other] < len(row):
                action = row[done[other]]
                if action == taken:
                    break
                if action.kind.startswith("RECV") and action.counterpart not in out:
                    break
                out.add(action)
                done[other] += 1
                moved = True
    return done[rank] + 1


def attention_model(dtype: torch.dtype) -> Traced:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
            self.scale, self.out = nn.RMSNorm(32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).view(2, 40, 3, 4, 8).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 40, 32)
            return self.out(x + self.scale(y)).square().mean()

    model = Attention().to(dtype)
    return trace(model, (torch.zeros(2, 40, 32, dtype=dtype),), {}, None)


def saved_bytes(found: DryRun) -> int:
    [rank] = found.ranks
    return next(m.live["saved"] for m in rank.moments if m.what == "0F0")


@pytest.mark.parametrize(
    ("dtype", "columns", "random_state"),
    [(torch.bfloat16, 40, 2 * 8 + 8), (torch.float32, 64, 8 + 8)],
)
def test_cuda_saves_what_its_kernels_save(
    dtype: torch.dtype, columns: int, random_state: int
) -> None:
    """Counted by hand for one forward of (2, 40, 32) with 4 heads.

    Flash attention keeps a number per row, the memory-efficient kernel rounds rows up to 32.
    """
    traced = attention_model(dtype)
    plan, _ = make_plan(traced.graph, Mesh.parse("dp=1"), "ddp", notes=traced.notes)
    found = dry_run(traced, plan, [0], device="cuda")
    rows = 2 * 40
    whole = dtype.itemsize * rows * 32
    # Normed, qkv, attended, normed by the root mean square and added up, the output.
    tensors = whole + 3 * whole + whole + whole + whole
    # Mean and deviation, inverse root mean square, log-sum-exp: float32.
    statistics = 4 * (2 * rows + rows + 2 * 4 * columns)
    assert saved_bytes(found) == tensors + statistics + random_state


class Biased(nn.Module):
    """Attention whose scores get a trained bias, the same in every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)
        self.bias = nn.Parameter(torch.zeros(1, 4, 40, 40))

    def forward(self, x: Tensor) -> Tensor:
        split = (heads.transpose(1, 2) for heads in self.qkv(x).view(2, 40, 12, 8).split(4, 2))
        query, key, value = split
        return F.scaled_dot_product_attention(query, key, value, self.bias).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuda_saves_no_scores_where_a_mask_is_trained(dtype: torch.dtype) -> None:
    """The CPU keeps probabilities of (2, 4, 40, 40); CUDA's kernel a number per row."""
    with torch.device("meta"):
        model, x = Biased().to(dtype), torch.zeros(2, 40, 32, dtype=dtype)
    traced = trace(model, (x,), {}, None)
    plan, _ = make_plan(traced.graph, Mesh.parse("dp=1"), "ddp", notes=traced.notes)
    whole = dtype.itemsize * 2 * 40 * 32
    probabilities = 4 * 2 * 4 * 40 * 40
    # Query, key and value as one, what is attended; the sum is of one element.
    kept = 3 * whole + whole + 4 * 2 * 4 * 64 + 2 * 8
    assert saved_bytes(dry_run(traced, plan, [0], device="cuda")) == kept
    assert saved_bytes(dry_run(traced, plan, [0], device="cpu")) >= probabilities


def test_the_command_prints_tables_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced = trace(Norms(), (torch.zeros(8, 8),), {}, None)
    plan, _ = make_plan(traced.graph, Mesh.parse("pp=2"), "ddp,microbatches=4", notes=traced.notes)
    plan.save(tmp_path / "plan.json")
    target = f"{__file__}:build"
    words = ["dryrun", str(tmp_path / "plan.json"), target, "--ranks", "0,last"]
    assert main([*words, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    found = dry_run(traced, plan, (0, 1))
    assert text.rstrip() == as_text(found, plan)
    assert "rank 1: peak" in text and "optimizer" in text
    assert main([*words, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(as_json(found)))
    if not torch.backends.cuda.is_built():
        assert main([*words, "--by-node"]) == 2
        assert "torch without CUDA" in capsys.readouterr().err


def build() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, object]]:
    """The model of the command's test, on no device."""
    with torch.device("meta"):
        return Norms(), (torch.zeros(8, 8),), {}


@pytest.mark.parametrize("text", ["", "0,x", "4", "-1", "first,5"])
def test_ranks_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        read_ranks(text, 4)


def test_ranks_have_names() -> None:
    assert read_ranks("first,middle, last,0,2", 8) == (0, 4, 7, 2)


GPT3_SCHEDULES = ["1f1b", "interleaved_1f1b,chunks=2"]


def run_gpt3(
    function: str, schedule: str, mesh: str, folder: Path
) -> tuple[dict[str, Any], float, float]:
    """Plan, then dry run in a process of its own: the report, seconds and GiB of host memory."""
    module = "tests.models.gpt3"
    constraints = f"megatron,zero=1,microbatches=96,schedule={schedule}"
    loaded = load_model(f"{module}:{function}")
    plan = api.plan(loaded.model, None, loaded.args, mesh=mesh, constraints=constraints)
    plan.save(folder / "plan.json")
    words = ["dryrun", str(folder / "plan.json"), f"{module}:{function}", "--json"]
    began = time.monotonic()
    # A process counts the most memory it ever held; getrusage would count its parent's too.
    text = (
        "import sys; from pathlib import Path; from autopar.cli.main import main;"
        "code = main(sys.argv[1:]);"
        "lines = Path('/proc/self/status').read_text().splitlines();"
        "print(next(line for line in lines if line.startswith('VmHWM')), file=sys.stderr);"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", text, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    peak_gib = int(done.stderr.strip().splitlines()[-1].split()[1]) / 1024**2
    return json.loads(done.stdout), time.monotonic() - began, peak_gib


@pytest.mark.long
@pytest.mark.parametrize("schedule", GPT3_SCHEDULES)
def test_gpt3_on_a_thousand_ranks_takes_a_minute(schedule: str, tmp_path: Path) -> None:
    report, seconds, peak_gib = run_gpt3("build", schedule, "pp=8,dp=16,tp=8", tmp_path)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 512, 1023]
    assert seconds <= 60 and peak_gib <= 8
    check_gpt3(report, 12288, data=16, tensor=8)


def test_a_small_gpt3_in_continuous_integration(tmp_path: Path) -> None:
    report, _, peak_gib = run_gpt3("build_small", "1f1b", "pp=4,dp=4,tp=4", tmp_path)
    assert peak_gib <= 2
    check_gpt3(report, 3072, data=4, tensor=4)


def check_gpt3(report: dict[str, Any], width: int, data: int, tensor: int) -> None:
    """The middle rank's parameters and state are those of whole layers, counted by hand."""
    middle = report["ranks"][1]
    # Matrices and the biases of their columns are divided; norms and other biases are not.
    layer = (12 * width**2 + 7 * width) // tensor + 6 * width
    resident = middle["resident"]
    numel = round(resident["parameters"] / (2 * layer)) * layer
    assert numel > 0
    assert resident["parameters"] == pytest.approx(2 * numel, rel=1e-3)
    assert resident["gradients"] == pytest.approx(2 * numel, rel=1e-3)
    assert resident["optimizer"] == pytest.approx(2 * 2 * numel / data, rel=1e-3)
    assert middle["peak_bytes"] > middle["resident_bytes"]
