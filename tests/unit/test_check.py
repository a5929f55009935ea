"""Checking configurations of other frameworks: fit, time, what to change first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.check import check
from autopar.check.changes import single_changes
from autopar.check.language import language_of
from autopar.check.model import described_model
from autopar.check.price import Pricer, gradient_bytes_of, software_of
from autopar.check.report import Best
from autopar.cli.main import main
from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.imports import read_config
from autopar.imports.imported import Described
from autopar.presets.config import DecoderConfig
from autopar.presets.registry import build_decoder
from autopar.search.problem import Problem
from autopar.trace import trace

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
TINY = DecoderConfig(
    layers=4, hidden=64, heads=4, vocab=256, ffn=128, positions="rope", norm="rms", gated=True,
    bias=False, tied=False,
)  # fmt: skip
NODE = ClusterSpec.parse("8xA100-80-SXM")


@pytest.fixture(scope="module")
def traced():
    model, args, kwargs = build_decoder(TINY, batch=32, seq=64)
    return trace(model, args, kwargs, None)


@pytest.fixture(scope="module")
def titan():
    found = read_config(CONFIGS / "torchtitan_debug.toml")
    return replace(found, model=Described(sizes=TINY, name="tiny"), micro_batch=4).on(8)


def pricer(traced, setting, batch=32, cluster=NODE):
    software = software_of(setting, cluster)
    return Pricer(traced.graph, traced.loss, cluster, software, batch, gradient_bytes_of(setting))


def report(traced, setting, cluster=NODE, **options):
    options = {"model": "tiny", "batch": 32, "seq_len": 64, "search_s": None} | options
    return check(setting, traced.graph, traced.loss, cluster, **options)


def test_a_report_says_fit_time_and_changes(traced, titan):
    found = report(traced, titan)
    text = "\n".join(found.lines())
    assert found.fits and "fits     yes" in text and "(predicted)" in text
    assert found.now.step_s > 0 and "tokens/s per device" in text
    data = json.loads(json.dumps(found.to_data()))
    assert data["fits"] and data["mesh"] == {"dp": 8} and data["best"] is None
    assert data["predicted"]["step_s"] == found.now.step_s
    used = data["predicted"]["device_bytes"][data["predicted"]["fullest_rank"]]
    assert sum(data["predicted"]["bytes_by_kind"].values()) == used


def test_changes_of_what_fits_are_faster_and_best_first(traced, titan):
    changes = report(traced, replace(titan, recompute="full", recompute_every=1)).changes
    assert changes and all(item.priced.fits for item in changes)
    saved = [item.saved for item in changes]
    assert saved == sorted(saved, reverse=True) and saved[-1] > 0
    for item in changes:  # each is what pricing it alone says
        again = pricer(traced, item.priced.setting).price(item.priced.setting)
        assert again.step_s == item.priced.step_s and again.device_bytes == item.priced.device_bytes
    named = [item.text for item in changes]
    assert any(text.startswith("recompute full -> none") for text in named)
    spelled = {item.text: item.spelled for item in changes}
    assert spelled["recompute full -> none"] == "activation_checkpoint.mode = none"


def test_changes_of_what_does_not_fit_make_it_fit(traced, titan):
    tight = NODE.with_figures({"memory.memory_gib": 2.0}, source="test")
    full = report(traced, replace(titan, zero=0), tight)
    if full.fits:
        tight = NODE.with_figures({"memory.memory_gib": 0.9}, source="test")
        full = report(traced, replace(titan, zero=0), tight)
    assert not full.fits and "too much" in "\n".join(full.lines())
    assert full.changes
    first = full.changes[0]
    assert first.priced.fits or first.saved_bytes > 0


def test_single_changes_keep_devices_and_batch(titan):
    wide = replace(titan, pp=2, tp=2, shards=2, sequence_parallel=True).on(8)
    seen = set()
    for text, _, setting in single_changes(wide, 32):
        assert text not in seen
        seen.add(text)
        assert setting.on(8).mesh().size == 8
        assert setting.data * setting.microbatches(32) <= 32
        assert setting != wide
    assert {"tp 2 -> 1", "tp 2 -> 4", "pp 2 -> 1", "micro batch 4 -> 8", "ZeRO 3 -> 2"} <= seen


def test_recomputation_of_frameworks(traced, titan):
    """Fewer nodes the less is asked for; per-op checkpointing keeps every second product."""
    price = pricer(traced, titan)

    def again(**fields):
        return price.again(replace(titan, **{"recompute_every": 1} | fields))

    full, half = again(recompute="full"), again(recompute="full", recompute_every=2)
    ops, attention = again(recompute="ops"), again(recompute="attention")
    assert len(half) * 2 == len(full) and half < full
    assert ops < full and attention < full and len(attention) == TINY.layers
    assert again(recompute="none") == frozenset()
    first = again(recompute="full", recompute_layers=1)
    assert len(first) * TINY.layers == len(full)
    nodes = {node.name: node for node in traced.graph.nodes}
    products = [name for name in ops if "linear" in nodes[name].op]
    kept = [name for name in full - ops if "linear" in nodes[name].op]
    assert len(products) == TINY.layers * 3 and len(kept) == TINY.layers * 4


def test_stages_have_the_framework_layers(traced, titan):
    price = pricer(traced, titan)
    even = replace(titan, pp=2, shards=4, micro_batch=2)
    assert price.plan(even).pipeline.cuts[0].startswith("blocks.2")
    uneven = replace(even, ends_count=False, first_layers=3)
    assert price.plan(uneven).pipeline.cuts[0].startswith("blocks.3")


def test_wider_gradients_cost_memory(traced, titan):
    plain = replace(titan, zero=0)
    price = pricer(traced, plain)
    price.gradient_bytes = 2
    narrow = price.price(plain)
    price.gradient_bytes = 4
    wide = price.price(plain)
    more = wide.device_bytes[0] - narrow.device_bytes[0]
    assert more == pytest.approx(2 * TINY.params() * price.software.reserved_factor, rel=0.02)
    assert wide.step_s == narrow.step_s


def test_the_best_plan_is_no_slower_than_the_configuration(traced, titan):
    two = replace(titan, shards=None)
    found = report(traced, two, ClusterSpec.parse("2xA100-80-SXM"), search_s=2.0)
    assert found.best is not None and found.searched
    assert found.best.step_s <= found.now.step_s * 1.02
    assert any(line.startswith("best") for line in found.lines())


def test_what_is_said_of_the_best_plan_is_true(traced, titan):
    found = report(traced, titan)
    now_s = found.now.step_s
    tight = tuple(size // 2 for size in found.now.device_bytes)
    full = replace(found, now=replace(found.now, capacity_bytes=tight))

    def best(times, complete=True):
        made = Best(
            text="dp=8", step_s=times * now_s, device_bytes=1, bound_s=0.0, seconds=5.0,
            complete=complete,
        )  # fmt: skip
        texts = [
            "\n".join(replace(item, best=made, searched=True).lines()) for item in (found, full)
        ]
        for text in texts:
            assert "as fast" not in text and text.count("best     ") == 1
        return [text.partition("best     ")[2].partition("\n")[0] for text in texts]

    fast, full_fast = best(0.5)
    assert "this one takes +100.0% (search of 5 s)" in fast
    assert "it fits, and takes 50.0% less time" in full_fast and "does not fit" in full_fast
    same, full_same = best(1.0)
    assert same.startswith("the search found nothing faster; its fastest takes")
    assert "it fits" in full_same
    slow, full_slow = best(1.2, complete=False)
    assert slow.startswith("the search, stopped after 5 s, found nothing faster; its fastest takes")
    assert "20.0% more time" in full_slow and "search stopped after 5 s" in full_slow
    assert "predicted" in slow


@pytest.mark.parametrize("name", [file.name for file in sorted(CONFIGS.iterdir())
                                  if file.suffix != ".md"])  # fmt: skip
def test_changes_are_what_the_framework_has_words_for(name):
    setting = read_config(CONFIGS / name)
    fixed = setting.pp * setting.tp * setting.cp * setting.replicas * (setting.shards or 8)
    setting = replace(setting.on(fixed), global_batch=None, micro_batch=1, accumulation=32)
    language, batch = language_of(setting), 32 * setting.data
    kinds = set()
    for _, kind, changed in single_changes(setting, batch):
        kinds.add(kind)
        assert language.says(setting, changed)
        assert changed.schedule != "zb_h1"
        if setting.source == "megatron":
            assert changed.schedule in ("1f1b", "interleaved_1f1b")
            assert changed.zero <= max(1, setting.zero)
        if setting.source in ("deepspeed", "accelerate"):
            assert changed.pp == setting.pp and not changed.sequence_parallel
    assert kinds and not (setting.source == "deepspeed" and "sequence_parallel" in kinds)


def test_plans_are_searched_that_the_framework_has_words_for(traced, titan):
    plain = replace(titan, source="megatron", stack="mcore", zero=1)
    allowed = language_of(plain).allowed(8)
    assert "zb_h1" not in allowed["schedule"] and allowed["zero"] == (0, 1)
    problem = Problem(traced.graph, traced.loss, NODE, allowed=allowed)
    points = list(problem.space.points())
    assert points and {point.zero for point in points} == {0, 1}
    assert {point.schedule for point in points} == {"1f1b", "interleaved_1f1b"}
    alone = language_of(replace(titan, source="deepspeed", stack="deepspeed-hf")).allowed(8)
    problem = Problem(traced.graph, traced.loss, NODE, allowed=alone)
    assert {(point.pipeline, point.role) for point in problem.space.points()} == {
        (1, ""), (1, "megatron"),
    }  # fmt: skip


def test_described_models_are_as_large_as_described():
    setting = read_config(CONFIGS / "megatron_t5_220m.sh").on(8)
    assert setting.model is not None
    model, args, _ = described_model(setting, setting.model, 8, 64)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(222.9e6, rel=0.02)
    assert args[0].shape == (8, 64)


def test_command(capsys, tmp_path):
    debug = str(CONFIGS / "torchtitan_debug.toml")
    words = ["check", debug, "--cluster", "2xA10G", "--seq-len", "128", "--no-search"]
    assert main(words) == 0
    assert "fits     yes" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"] == "torchtitan"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.toml", "--cluster", "8xH100-SXM"], "cannot read constraints"),
        ([str(CONFIGS / "deepspeed_zero3.json"), "--cluster", "8xH100-SXM"], "describe a model"),
        ([str(CONFIGS / "megatron_gpt3_175b.sh"), "--cluster", "8xH100-SXM"], "multiple of 128"),
        ([str(CONFIGS / "torchtitan_debug.toml"), "--cluster", "what"], "cannot read cluster"),
        ([str(CONFIGS / "torchtitan_debug.toml"), "--cluster", "8xH100-SXM", "--software", "x"],
         "unknown software stack"),
        ([str(CONFIGS / "deepspeed_zero3.json"), "llama3-8", "--cluster", "8xH100-SXM"],
         "llama3-8b"),
    ],
)  # fmt: skip
def test_bad_words_exit_with_two(words, message, capsys):
    assert main(["check", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_batch_that_does_not_divide(traced, titan):
    with pytest.raises(PlanError, match="no multiple of micro batch"):
        report(traced, replace(titan, micro_batch=3))
