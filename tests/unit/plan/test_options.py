"""Command line options for the parts of a plan, merged into the constraints."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from autopar.cli.options import STEERING, add_choices, add_sizes, read_choices, read_search
from autopar.cli.sizes import fill_in, may_differ
from autopar.errors import InputError, PlanError
from autopar.plan.strategies import parse_constraints


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_choices(parser)
    options = parser.parse_args(words)
    assert set(vars(options)) == set(STEERING)
    return options


def searched(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_choices(parser)
    parser.add_argument("--search")
    parser.set_defaults(objective="time", step_within=None)
    return parser.parse_args(words)


def test_options_say_the_same_as_constraints():
    mesh, constraints = read_choices(
        parsed("--mesh", "pp=2,dp=2", "--strategy", "megatron", "--microbatches", "4",
               "--schedule", "interleaved_1f1b", "--chunks", "3", "--zero", "1",
               "--recompute", "selective")
    )  # fmt: skip
    text = "megatron,microbatches=4,schedule=interleaved_1f1b,chunks=3,zero=1,recompute=selective"
    assert parse_constraints(constraints, mesh) == parse_constraints(text, mesh)


def test_options_beside_a_map_and_patterns():
    mesh, constraints = read_choices(
        parsed("--mesh", "dp=2", "--constraints", '{"batch": "dp"}', "--recompute", "a/*,!b/*")
    )
    assert constraints == {"batch": "dp", "recompute": ["a/*", "!b/*"]}
    assert parse_constraints(constraints, mesh).explicit


def test_without_options_constraints_are_untouched():
    assert read_choices(parsed("--strategy", "megatron"))[1] == "megatron"
    assert read_choices(parsed())[1] is None
    assert str(read_choices(parsed("--strategy", "megatron", "--zero", "1"))[0]) == "tp=4"
    assert read_choices(parsed("--zero", "2"))[1] == {"zero": 2}


def test_constraints_may_be_text():
    text = "placements=lm_head.weight:whole+tokens:vocab@0,zero=1"
    for cuts, again in (("layers.2,layers.4", "a*,!b*"), ("layers.2+layers.4", "a*+!b*")):
        words = ("--constraints", text, "--cuts", cuts, "--recompute", again)
        assert read_choices(parsed(*words))[1] == {
            "placements": {"lm_head.weight": "whole", "tokens": "vocab@0"}, "zero": 1,
            "cuts": ["layers.2", "layers.4"], "recompute": ["a*", "!b*"],
        }  # fmt: skip
    mesh, kept = read_choices(parsed("--constraints", "megatron,zero=0"))
    assert str(mesh) == "tp=4" and kept == {"strategy": "megatron", "zero": 0}
    for slip, name in (("zeroo=1", "zero"), ("placement=a:whole", "placements")):
        with pytest.raises(PlanError, match=f"did you mean '{name}'"):
            read_choices(parsed("--constraints", slip))
    with pytest.raises(InputError, match="--tensor is given"):
        read_choices(parsed("--constraints", "tensor=megatron", "--tensor", "sequence"))


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--cluster", "8xA100", "--cuts", "a,b"], {"cuts": ["a", "b"]}),
        (["--cluster", "8xA100", "--constraints", "tensor=megatron"], {"tensor": "megatron"}),
        (["--cluster", "8xA100", "--constraints", '{"ffn": "tp"}'], {"ffn": "tp"}),
        (["--cluster", "8xA100", "--mesh", "tp=8", "--constraints", '{"ffn": "tp"}'], None),
        (["--search", "exact", "--mesh", "tp=4", "--constraints", '{"ffn": "tp"}'], {"ffn": "tp"}),
        (["--cuts", "a,b"], None),
        (["--strategy", "search", "--zero", "1"], {"zero": 1}),
        (["--cluster", "8xA100", "--constraints", '{"strategy": "ddp"}'], None),
    ],
)
def test_what_a_search_is_asked_for(words: list[str], kept: dict[str, object] | None):
    found = read_search(searched(*words))
    assert (None if found is None else found[1]) == kept


def test_a_strategy_leaves_nothing_to_search():
    for words in (["--strategy", "ddp"], ["--constraints", '{"strategy": "ddp"}']):
        with pytest.raises(InputError, match="strategy"):
            read_search(searched("--search", "exact", *words))


def test_a_configuration_is_kept_if_a_search_is_asked_for(tmp_path: Path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,'
        ' "zero_optimization": {"stage": 0}}'
    )
    words = ["--cluster", "8xA100", "--constraints", str(file)]
    assert read_search(searched(*words)) is None
    found = read_search(searched(*words, "--search", "exact"))
    assert found == (None, {"micro_batch": 2, "microbatches": 4, "zero": 0})


BATCH = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}'
STEPS = '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}'
SCRIPT = "--micro-batch-size 1 --tensor-model-parallel-size 2 --seq-length 512"


@pytest.mark.parametrize(
    ("text", "words", "sizes"),
    [
        (BATCH, [], (64, None)),
        (BATCH, ["--search", "exact"], (64, None)),
        (BATCH, ["--global-batch-size", "64", "--seq-len", "128"], (64, 128)),
        (BATCH, ["--global-batch-size", "32"], "--global-batch-size 32 is given"),
        (STEPS, [], (64, None)),
        (STEPS, ["--global-batch-size", "32"], "the configuration says 64 samples"),
        (STEPS, ["--global-batch-size", "32", "--search", "exact"], (32, None)),
        (STEPS, ["--mesh", "pp=2,dp=4"], (32, None)),
        (SCRIPT, [], (4, 512)),
        (SCRIPT, ["--global-batch-size", "8"], (8, 512)),
        (SCRIPT, ["--seq-len", "256"], "--seq-len 256 is given"),
        ('{"batch": "dp"}', ["--global-batch-size", "8"], (8, None)),
    ],
)
def test_sizes_of_a_configuration_are_those_of_the_step(
    tmp_path: Path, text: str, words: list[str], sizes: tuple[int | None, int | None] | str
):
    file = tmp_path / ("run.sh" if text is SCRIPT else "constraints.json")
    file.write_text(text)
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    add_choices(parser)
    add_sizes(parser)
    parser.add_argument("--search")
    parser.set_defaults(objective="time", step_within=None)
    given = ["--cluster", "8xA100", "--constraints", str(file), *words]
    options = parser.parse_args(["gpt2-124m", *given])
    if isinstance(sizes, str):
        with pytest.raises(InputError, match=sizes):
            fill_in(options)
        return
    fill_in(options)
    assert (options.global_batch_size, options.seq_len) == sizes
    own = parser.parse_args(["file.py:build", "--cluster", "8xA100", "--constraints", str(file)])
    fill_in(own)
    assert own.global_batch_size is None and may_differ("file.py:build", str(file))
    assert not may_differ("gpt2", str(file)) and not may_differ("file.py:build", "zero=1")


def test_what_is_said_twice_is_refused():
    with pytest.raises(InputError, match="--zero is given"):
        read_choices(parsed("--constraints", '{"batch": "dp", "zero": 1}', "--zero", "0"))
