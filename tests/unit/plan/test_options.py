"""Command line options for the parts of a plan, merged into the constraints."""

from __future__ import annotations

import argparse

import pytest

from autopar.cli.options import STEERING, add_choices, read_choices
from autopar.errors import InputError
from autopar.plan.strategies import parse_constraints


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_choices(parser)
    options = parser.parse_args(words)
    assert set(vars(options)) == set(STEERING)
    return options


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


def test_what_is_said_twice_is_refused():
    with pytest.raises(InputError, match="--zero is given"):
        read_choices(parsed("--constraints", '{"batch": "dp", "zero": 1}', "--zero", "0"))
