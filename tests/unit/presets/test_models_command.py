"""``autopar models``: the presets with their sizes."""

from __future__ import annotations

import json

from autopar.cli.main import main
from autopar.presets import PRESETS


def test_all_are_listed_with_their_sizes(capsys):
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PRESETS)
    assert any(line.startswith("gpt3-175b") and "175B" in line for line in lines)


def test_some_are_listed_as_json(capsys):
    assert main(["models", "llama3", "--json"]) == 0
    found = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert set(found) == {"llama3-8b", "llama3-70b", "llama3-405b"}
    assert found["llama3-8b"]["parameters"] == 8.03e9


def test_an_unknown_name_is_answered_with_similar_ones(capsys):
    assert main(["models", "lama33-8b"]) == 2
    assert "llama3-8b" in capsys.readouterr().err
