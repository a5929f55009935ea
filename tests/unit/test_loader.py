"""Finding models by name, and saying what is wrong when they cannot be found."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import InputError
from autopar.runtime.loader import as_loaded_model, load_model, load_object

FILE = """
import torch
def build():
    return torch.nn.Linear(3, 2), (torch.ones(4, 3),), {}
def build_dict():
    return {"model": torch.nn.Linear(3, 2), "args": [torch.ones(4, 3)],
            "loss_fn": lambda out, x: out.sum()}
def broken():
    raise KeyError("weights")
def wrong():
    return torch.nn.Linear(3, 2)
class Group:
    @staticmethod
    def build():
        return build()
constant = 3
"""


@pytest.fixture
def model_file(tmp_path):
    file = tmp_path / "some_model.py"
    file.write_text(FILE)
    return file


def test_file_targets(model_file):
    loaded = load_model(f"{model_file}:build")
    assert isinstance(loaded.model, torch.nn.Linear)
    assert loaded.args[0].shape == (4, 3) and loaded.kwargs == {} and loaded.loss_fn is None
    with_loss = load_model(f"{model_file}:build_dict")
    assert isinstance(with_loss.args, tuple) and with_loss.loss_fn is not None
    assert isinstance(load_model(f"{model_file}:Group.build").model, torch.nn.Linear)
    assert load_object(f"{model_file}:build") is load_object(f"{model_file}:build")


def test_module_targets():
    loaded = load_model("autopar.runtime.tiny_gpt:build")
    assert sum(p.numel() for p in loaded.model.parameters()) > 3_000_000
    assert loaded.model(*loaded.args, **loaded.kwargs).ndim == 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("model.py", "cannot read 'model.py'"),
        ("model.py:", "cannot read"),
        (":build", "cannot read"),
        ("missing_file.py:build", "no file 'missing_file.py'"),
        ("missing_package.module:build", "no module 'missing_package.module'"),
        ("autopar.runtime.tiny_gpt:nonesuch", "has no 'nonesuch'"),
    ],
)
def test_bad_targets(target, message):
    with pytest.raises(InputError, match=message):
        load_model(target)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "failed: KeyError: 'weights'"),
        ("wrong", "returns Linear"),
        ("constant", "is of type int"),
    ],
)
def test_bad_functions(model_file, name, message):
    with pytest.raises(InputError, match=message) as caught:
        load_model(f"{model_file}:{name}")
    if name == "broken":
        assert caught.value.where == f"{model_file}:9"


def test_a_file_that_fails_names_its_line(tmp_path):
    file = tmp_path / "fails_on_import.py"
    file.write_text("x = 1\nx.missing\n")
    with pytest.raises(InputError, match=r"importing .* failed: AttributeError") as caught:
        load_object(f"{file}:build")
    assert caught.value.where == f"{file}:2"


def test_errors_name_the_line_of_the_users_file(tmp_path):
    """Not the line of the library in which the error was raised in the end."""
    file = tmp_path / "fails_in_torch.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(-3, 2)\n")
    with pytest.raises(InputError) as caught:
        load_model(f"{file}:build")
    assert caught.value.where == f"{file}:3"
    at_import = tmp_path / "fails_in_torch_at_import.py"
    at_import.write_text("import torch\nlayer = torch.nn.Linear(-3, 2)\n")
    with pytest.raises(InputError) as caught:
        load_object(f"{at_import}:build")
    assert caught.value.where == f"{at_import}:2"
    broken = tmp_path / "is_no_python.py"
    broken.write_text("x = 1\ndef build(:\n")
    with pytest.raises(InputError, match="SyntaxError") as caught:
        load_object(f"{broken}:build")
    assert caught.value.where == f"{broken}:2"


def test_unknown_presets_are_answered_with_similar_ones():
    with pytest.raises(InputError, match="llama3-70b") as caught:
        load_model("lama3-70b")
    assert caught.value.fix is not None and "autopar models" in caught.value.fix


MODEL = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((MODEL, ()), "a tuple of 2"),
        ({"args": ()}, "no key 'model'"),
        ({"model": MODEL, "inputs": ()}, r"unknown keys \['inputs'\]"),
        ((3, (), {}), "model of type int"),
        ((MODEL, torch.ones(2), {}), "args of type Tensor"),
        ((MODEL, (), ()), "kwargs of type tuple"),
        ({"model": MODEL, "loss_fn": 3}, "loss_fn of type int"),
        (None, "returns NoneType"),
    ],
)
def test_bad_results(result, message):
    with pytest.raises(InputError, match=message):
        as_loaded_model(result, "target")
