"""autopar: a compiler whose output is a training run.

The public names are lazy: importing this package imports neither torch nor anything else.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import (
        CompiledModel,
        compile,
        evaluate,
        load_plan,
        measure,
        plan,
        reprice,
        search,
        trace,
        verify,
    )
    from autopar.cost_models.cluster import ClusterSpec
    from autopar.errors import (
        AutoparError,
        ClusterError,
        InputError,
        NonFiniteError,
        PlanError,
        RankError,
        RuleError,
        TraceError,
    )
    from autopar.plan.plan import Plan

__version__ = "0.1.0"

_HOMES = {
    "CompiledModel": "autopar.api",
    "compile": "autopar.api",
    "evaluate": "autopar.api",
    "load_plan": "autopar.api",
    "measure": "autopar.api",
    "reprice": "autopar.api",
    "verify": "autopar.api",
    "ClusterSpec": "autopar.cost_models.cluster",
    "Plan": "autopar.plan.plan",
    "AutoparError": "autopar.errors",
    "ClusterError": "autopar.errors",
    "InputError": "autopar.errors",
    "NonFiniteError": "autopar.errors",
    "PlanError": "autopar.errors",
    "RankError": "autopar.errors",
    "RuleError": "autopar.errors",
    "TraceError": "autopar.errors",
}
# Functions of autopar.api that share their name with the package of what they make.
_CALLABLE_PACKAGES = frozenset({"plan", "search", "trace"})

__all__ = [
    "AutoparError",
    "ClusterError",
    "ClusterSpec",
    "CompiledModel",
    "InputError",
    "NonFiniteError",
    "Plan",
    "PlanError",
    "RankError",
    "RuleError",
    "TraceError",
    "compile",
    "evaluate",
    "load_plan",
    "measure",
    "plan",
    "reprice",
    "search",
    "trace",
    "verify",
]


class _CallablePackage(ModuleType):
    """A package that, called, calls the function of its name in `autopar.api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        api = importlib.import_module("autopar.api")
        return getattr(api, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(ModuleType):
    """This package: the import system binds submodules by setting attributes on it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _CALLABLE_PACKAGES and type(value) is ModuleType:
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_PACKAGES:
        return importlib.import_module(f"autopar.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
