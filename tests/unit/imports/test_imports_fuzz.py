"""Whatever stands in a file, reading it ends with an answer or with one of our errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.imports.read import Own, read_constraints
from autopar.imports.script import read_flags

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
FILES = sorted(file for file in CONFIGS.iterdir() if file.suffix != ".md")
WORDS = st.sampled_from(
    ["-1", "0", "1e400", "NaN", "null", "true", '"', "'", "{", "[", "\\", "$X", "$((1/0))", "é",
     "--", "--num-layers", "\n", "\t", "=", ":", "#", "9" * 400, "${A:-${B}}", "]"]
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def survives(file: Path) -> None:
    """Reading a file gives an answer that can be used, or an error that says what is wrong."""
    try:
        found = read_constraints(file)
        if isinstance(found, Own):
            json.dumps(found.constraints, default=str)
            return
        placed = found.on(found.pp * found.tp * found.cp * found.replicas * 8)
        placed.mesh()
        placed.constraints()
        placed.notes()
    except AutoparError as error:
        assert error.what


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
@settings(max_examples=6)
@given(data=st.data())
def test_mutated_files(file, folder, data):
    text = file.read_text()
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.sampled_from([0, 1, 5, 40, len(text)]))
        text = text[:start] + data.draw(WORDS) + text[start + cut :]
    mutated = folder / file.name
    mutated.write_text(text)
    survives(mutated)


@settings(max_examples=25)
@given(
    flags=st.dictionaries(
        st.from_regex(r"--[a-z]{1,8}(-[a-z]{1,8}){0,2}", fullmatch=True),
        st.lists(st.from_regex(r"[A-Za-z0-9_./]{1,8}", fullmatch=True), max_size=3),
        max_size=8,
    ),
    layout=st.sampled_from(["lines", "continued", "array", "one line"]),
)
def test_flags_come_back_in_every_layout(flags, layout):
    """What is written as arguments in a text, in continued lines or in an array is read again."""
    words = [" ".join((name, *values)) for name, values in flags.items()]
    text = {
        "lines": "\n".join(words),
        "continued": 'ARGS=" \\\n' + " \\\n".join(words) + ' \\\n"',
        "array": "ARGS=(\n" + "\n".join(f"    {word}" for word in words) + "\n)",
        "one line": " ".join(words),
    }[layout]
    found, _ = read_flags(text)
    assert {name: list(flag.values) for name, flag in found.items()} == flags
