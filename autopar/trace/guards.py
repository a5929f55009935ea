"""The user's inputs: a flat list of leaves with paths, checked against what was traced."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.errors import InputError, TraceError

PLAIN = (int, float, bool, str, type(None), complex, torch.dtype, torch.device)


def leaf_paths(tree: Any, roots: tuple[str, ...] = ()) -> dict[str, Any]:
    """Leaves of a tree by path, in order.

    Args:
        tree: Any pytree; with `roots`, a tuple whose items the roots name.
        roots: Names for the first key, e.g. ``("args", "kwargs")``.

    Returns:
        Path such as ``args[0]['mask']`` to leaf.
    """
    pairs, _ = pytree.tree_flatten_with_path(tree)
    result = {}
    for path, leaf in pairs:
        head, rest = "", path
        if roots:
            head, rest = roots[path[0].idx], path[1:]  # type: ignore[attr-defined]
        result[head + pytree.keystr(rest)] = leaf
    return result


def describe(leaf: Any) -> str:
    """A leaf in words, for messages."""
    if isinstance(leaf, torch.Tensor):
        return f"a {dtype_name(leaf.dtype)} tensor of shape {tuple(leaf.shape)}"
    if leaf is None:
        return "None"
    if isinstance(leaf, PLAIN):
        return f"the {type(leaf).__name__} {leaf!r}"
    return f"an object of type {type(leaf).__qualname__}"


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def check_leaves(leaves: Mapping[str, Any], what: str) -> None:
    """Refuse leaves that are neither tensors nor plain Python values.

    Raises:
        TraceError: Names the leaf, its type, and how to make it a pytree.
    """
    for path, leaf in leaves.items():
        if isinstance(leaf, (torch.Tensor, *PLAIN)):
            continue
        name = type(leaf).__qualname__
        if dataclasses.is_dataclass(leaf):
            fix = f"call torch.export.register_dataclass({name}) once, before tracing"
            reason = f"the dataclass {name} is not registered as a pytree"
        elif "Cache" in name:
            fix = "pass use_cache=False, or return tensors instead of a cache"
            reason = f"a cache of type {name} is no tree of tensors"
        else:
            fix = (
                f"pass its tensors in a dict or tuple, or register {name} with "
                "torch.utils._pytree.register_pytree_node"
            )
            reason = f"objects of type {name} cannot be split into tensors"
        raise TraceError(
            f"{what} {path or '(the whole)'}: {reason}",
            where=path or what,
            expected="tensors, numbers, strings, None, and dicts, lists, tuples of them",
            fix=fix,
        )


def check_loss_function(loss_fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse a loss function that cannot be called as it will be.

    Raises:
        InputError: It is not callable, or takes another number of arguments.
    """
    form = "a function called as loss_fn(outputs, *args, *kwargs.values())"
    if not callable(loss_fn):
        raise InputError(f"loss_fn is {describe(loss_fn)}", where="loss_fn", expected=form)
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return  # some builtins have none
    try:
        signature.bind(None, *args, *kwargs.values())
    except TypeError as error:
        inputs = [f"args[{index}]" for index in range(len(args))] + list(kwargs)
        raise InputError(
            f"loss_fn{signature} cannot take (outputs, {', '.join(inputs)}): {error}",
            where="loss_fn",
            expected=form,
            fix="let it take the outputs and then every input; *rest takes those it ignores",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGuard:
    """What the inputs were when the model was traced.

    Attributes:
        tensors: Path to (shape, dtype name), in graph input order.
        values: Path to the Python value, None included.
    """

    tensors: dict[str, tuple[tuple[int, ...], str]]
    values: dict[str, Any]

    @classmethod
    def of(cls, leaves: Mapping[str, Any]) -> InputGuard:
        """The guard for `leaves` by path."""
        tensors, values = {}, {}
        for path, leaf in leaves.items():
            if isinstance(leaf, torch.Tensor):
                tensors[path] = (tuple(leaf.shape), dtype_name(leaf.dtype))
            else:
                values[path] = leaf
        return cls(tensors=tensors, values=values)

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call in graph input order.

        Raises:
            InputError: An input is missing, extra, or differs from the traced one.
        """
        leaves = leaf_paths((tuple(args), dict(kwargs)), ("args", "kwargs"))
        known = self.tensors.keys() | self.values.keys()
        if leaves.keys() != known:
            self._refuse_paths(leaves, known)
        for path, value in self.values.items():
            came = leaves[path]
            if type(came) is not type(value) or came != value:
                raise _differs(path, describe(value), describe(came))
        result = []
        for path, (shape, dtype) in self.tensors.items():
            came = leaves[path]
            same = (
                isinstance(came, torch.Tensor)
                and tuple(came.shape) == shape
                and dtype_name(came.dtype) == dtype
            )
            if not same:
                raise _differs(path, f"a {dtype} tensor of shape {shape}", describe(came))
            result.append(came)
        return result

    def _refuse_paths(self, leaves: Mapping[str, Any], known: Any) -> None:
        for path in leaves:
            if path not in known:
                raise InputError(
                    f"input {path} was not there when the model was traced",
                    where=path,
                    expected=f"inputs {', '.join(sorted(known))}",
                    fix="leave it out, or compile again with example inputs that hold it",
                )
        missing = next(path for path in [*self.tensors, *self.values] if path not in leaves)
        raise InputError(
            f"input {missing} is missing or None",
            where=missing,
            expected=f"inputs {', '.join(sorted(known))}",
            fix="pass it, or compile again with example inputs without it",
        )


def _differs(path: str, traced: str, came: str) -> InputError:
    return InputError(
        f"input {path} is {came}, but the model was traced with {traced}",
        where=path,
        expected=traced,
        fix="pass the same kind of input, or compile again with these example inputs",
    )
