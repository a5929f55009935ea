"""Samples of a step, tokens of a sample: of options, a configuration's file, or a call."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.cli import options as shared
from autopar.errors import InputError
from autopar.imports.imported import Imported
from autopar.imports.read import Own, on_devices, read_constraints, samples, shape
from autopar.sharding.mesh import Mesh


def fill_in(options: argparse.Namespace) -> None:
    """Take batch and sequence length from the configuration's file, if it says them.

    Models that a function makes have sizes of their own: nothing is done for these.

    Args:
        options: Those of ``autopar plan``; ``global_batch_size`` and ``seq_len`` are set.

    Raises:
        AutoparError: If an option says something else than the file, or the file is wrong.
    """
    if is_function(options.model) or not shared.names_file(options.constraints):
        return
    found = read_constraints(options.constraints)
    if isinstance(found, Own):
        return
    open_degrees = options.search is not None and not found.parallel
    found = _on(found, options)
    steps = "accumulation" in found.stated and found.micro_batch is not None and not open_degrees
    stated = found.batch() if steps else found.global_batch
    _refuse_other("--global-batch-size", options.global_batch_size, stated, "samples", found)
    _refuse_other("--seq-len", options.seq_len, found.seq_len, "tokens", found)
    if options.global_batch_size is None:
        options.global_batch_size = found.batch()
    if options.seq_len is None:
        options.seq_len = found.seq_len


def is_function(model: str) -> bool:
    """Whether a MODEL names a function, which makes inputs of sizes of its own."""
    return ":" in model


def _on(found: Imported, options: argparse.Namespace) -> Imported:
    mesh = Mesh.parse(options.mesh) if options.mesh else None
    text = options.cluster or (shared.DEFAULT_CLUSTER if options.search is not None else None)
    return on_devices(found, mesh, shared.read_cluster(text).num_devices if text else None)


def _refuse_other(
    option: str, given: int | None, stated: int | None, what: str, found: Imported
) -> None:
    if None not in (given, stated) and given != stated:
        raise InputError(
            f"{option} {given} is given, and the configuration says {stated:,} {what}",
            expected="one of them",
            fix=f"leave {option} out, or change the file",
            where=found.where,
        )


def tokens(args: Sequence[Any]) -> int | None:
    """Tokens of a sample of language models, whose first argument is (batch, tokens)."""
    sizes = shape(args[0]) if args else ()
    return sizes[1] if len(sizes) == 2 else None


def may_differ(model: str, constraints: str | None) -> bool:
    """Whether a file may say another batch than a model has that a function makes.

    Args:
        model: What names the model.
        constraints: What ``--constraints`` says.
    """
    there = shared.names_file(constraints) and Path(constraints or "").is_file()
    return is_function(model) and there


def take_from(options: argparse.Namespace, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Take the batch from a call of the model, where `may_differ`.

    Args:
        options: Those of a command; ``global_batch_size`` is set.
        args: Positional arguments of the model.
        kwargs: Keyword arguments.
    """
    found = read_constraints(options.constraints)
    stated = None if isinstance(found, Own) else found.global_batch
    options.global_batch_size = samples(args, kwargs, stated=stated)
