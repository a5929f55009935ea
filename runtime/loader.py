"""Find what a command line names: a function of a file or a module, a configuration, a preset."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from autopar import presets
from autopar.errors import InputError, meant
from autopar.plan.plan import Plan
from autopar.plan.sizes import sizes_of
from autopar.runtime import hf

MOST = 2**31 - 1
"""Most samples of a call, and tokens of a sample."""
_FORMS = "file.py:function or package.module:function"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with inputs to trace it.

    Attributes:
        model: The module.
        args: Positional arguments of one call of the model (the global batch).
        kwargs: Keyword arguments of that call.
        loss_fn: ``loss_fn(outputs, *args, *kwargs.values())``, or None when the model returns
            its loss.
        target: The text that named it.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None
    target: str = ""


def load_object(target: str) -> Any:
    """The object that `target` names.

    Args:
        target: ``file.py:name`` (relative to the working directory) or ``package.module:name``;
            the name may be dotted.

    Raises:
        InputError: If the text, the file, the module or the name is wrong, or the import fails.
    """
    home, colon, name = target.rpartition(":")
    if not colon or not home or not name:
        raise InputError(f"cannot read {target!r}", expected=_FORMS)
    module = _load_file(Path(home)) if home.endswith(".py") else _load_module(home)
    value: Any = module
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            public = [key for key, item in vars(module).items() if callable(item) and key[0] != "_"]
            raise InputError(
                f"{home} has no {name!r}",
                expected="one of " + ", ".join(sorted(public)[:12]) if public else None,
                fix=meant(name, public),
                where=getattr(module, "__file__", None),
            ) from None
    return value


def load_model(target: str, *, batch: int | None = None, seq: int | None = None) -> LoadedModel:
    """Call the function that `target` names and check what it returns.

    Args:
        target: The name of a preset (`autopar.presets`), a Hugging Face ``config.json``, or see
            `load_object`; the function takes no arguments and returns ``(model, args, kwargs)`` or
            a dict with ``model`` and optionally ``args``, ``kwargs``, ``loss_fn``.
        batch: Samples of the call of a preset or a configuration.
        seq: Tokens of each.

    Raises:
        InputError: If the function cannot be found, fails, or returns something else.
    """
    for name, value in (("batch", batch), ("sequence length", seq)):
        if value is not None and not 1 <= value <= MOST:
            raise InputError(f"{name} {value}", expected=f"a whole number from 1 to {MOST:,}")
    if target in presets.PRESETS:
        return as_loaded_model(presets.build(target, batch=batch, seq=seq), target)
    if hf.is_config(target):
        return as_loaded_model(hf.build(target, batch=batch, seq=seq), target)
    if ":" not in target:
        raise InputError(
            f"cannot read {target!r}",
            expected=f"{_FORMS}, a Hugging Face config.json, or a preset {presets.similar(target)}",
            fix="`autopar models` lists the presets",
        )
    if batch is not None or seq is not None:
        raise InputError(
            f"a batch or a sequence length is given for {target}, which is no preset",
            expected="a preset, or a function that makes inputs of the sizes wanted",
        )
    function = load_object(target)
    if not callable(function):
        raise InputError(f"{target} is of type {type(function).__name__}", expected="a function")
    try:
        result = function()
    except Exception as error:
        raise InputError(
            f"{target} failed: {type(error).__name__}: {error}",
            expected="a function without arguments",
            where=_raised_at(error, _file_of(function)),
        ) from error
    return as_loaded_model(result, target)


def load_planned(target: str, plan: Plan | None) -> LoadedModel:
    """The same with the sizes that a plan was made for, where the target leaves them open."""
    if plan is None or ":" in target:  # functions have sizes of their own
        return load_model(target)
    batch, seq = sizes_of(plan)
    return load_model(target, batch=batch, seq=seq)


def as_loaded_model(result: object, target: str) -> LoadedModel:
    """Check what a model function returned.

    Raises:
        InputError: If it is neither ``(model, args, kwargs)`` nor a dict of these.
    """
    expected = "(model, args, kwargs), or a dict with model, args, kwargs and loss_fn"
    if isinstance(result, tuple) and len(result) == 3:
        result = dict(zip(("model", "args", "kwargs"), result, strict=True))
    if not isinstance(result, Mapping):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise InputError(f"{target} returns {got}", expected=expected)
    unknown = sorted(set(result) - {"model", "args", "kwargs", "loss_fn"})
    if unknown or "model" not in result:
        what = f"unknown keys {unknown}" if unknown else "no key 'model'"
        raise InputError(f"{target} returns a dict with {what}", expected=expected)
    model, loss_fn = result["model"], result.get("loss_fn")
    args, kwargs = result.get("args", ()), result.get("kwargs", {})
    checks = (
        ("model", model, nn.Module, "an nn.Module"),
        ("args", args, tuple | list, "a tuple"),
        ("kwargs", kwargs, Mapping, "a dict"),
    )
    for name, value, kind, wanted in checks:
        if not isinstance(value, kind):
            raise InputError(
                f"{target} returns {name} of type {type(value).__name__}", expected=wanted
            )
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"{target} returns loss_fn of type {type(loss_fn).__name__}")
    return LoadedModel(
        model=model, args=tuple(args), kwargs=dict(kwargs), loss_fn=loss_fn, target=target
    )


def load_file_as(path: Path, name: str) -> ModuleType:
    """Run the Python file at `path` as module `name`, once per process.

    Raises:
        InputError: If the file does not exist or fails.
    """
    known = sys.modules.get(name)
    if known is not None:
        return known
    if not path.is_file():
        raise InputError(f"no file {str(path)!r}", expected=_FORMS)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python path` does: its neighbours are importable
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InputError(
            f"importing {path} failed: {type(error).__name__}: {error}",
            where=_raised_at(error, str(path)),
        ) from error
    return module


def _load_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    for module in list(sys.modules.values()):
        # A running script, or a file loaded before, is not run a second time.
        if getattr(module, "__file__", None) == str(resolved) and module.__name__ != "__main__":
            return module
    name = path.stem
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        name = f"{name}_{abs(hash(str(resolved))):x}"
    return load_file_as(path, name)


def _load_module(name: str) -> ModuleType:
    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        sys.path.insert(0, working_directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise InputError(
                f"importing {name} failed: {error}", where=_raised_at(error)
            ) from error
        raise InputError(
            f"no module {name!r}",
            expected=_FORMS,
            fix="for a file, write its name with .py: file.py:function",
        ) from None
    except Exception as error:
        raise InputError(
            f"importing {name} failed: {type(error).__name__}: {error}", where=_raised_at(error)
        ) from error


def _file_of(function: object) -> str | None:
    code = getattr(function, "__code__", None)
    return None if code is None else str(code.co_filename)


def _raised_at(error: BaseException, file: str | None = None) -> str | None:
    """The line that raised: the last one in `file`, if the error passed through it."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    trace, found, mine = error.__traceback__, None, None
    while trace is not None:
        found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        if file is not None and Path(trace.tb_frame.f_code.co_filename) == Path(file):
            mine = found
        trace = trace.tb_next
    return mine or found
