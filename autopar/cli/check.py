"""Check a configuration of DeepSpeed, Megatron-LM, torchtitan or Accelerate before it runs.

Says whether it fits, how long a step is, how far that is from the best plan, and what to change
first. Everything is predicted; no GPU is needed. Exit codes: 0 it fits, 1 it does not.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from autopar.cli import options as shared
from autopar.cli import sizes
from autopar.errors import InputError
from autopar.imports import Imported, read_config
from autopar.imports.read import samples

if TYPE_CHECKING:
    from autopar.check import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "config", metavar="CONFIG", help="DeepSpeed JSON, Megatron-LM script or arguments,"
        " torchtitan TOML, Accelerate YAML",
    )  # fmt: skip
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="as for `autopar plan`; may be left out where the file describes its model",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", metavar="C", required=True, help='such as "8x8xH100-SXM", or a YAML file'
    )
    shared.add_sizes(parser)
    parser.add_argument(
        "--no-search", action="store_true", help="do not look for the best plan to compare with"
    )
    parser.add_argument(
        "--time-limit", type=float, default=20.0, metavar="S",
        help="seconds for which the best plan is looked for (default: 20)",
    )  # fmt: skip
    parser.add_argument(
        "--software", metavar="NAME",
        help="price it as other software than its framework's would carry it out, such as autopar",
    )  # fmt: skip
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Read, price, search, print."""
    imported = read_config(options.config)
    cluster = shared.read_cluster(options.cluster)
    if options.software:
        from autopar.cost_models.software import stack

        stack(options.software)
    setting = imported.on(cluster.num_devices)
    progress = shared.Progress()
    try:
        report = _check(options, imported, setting, cluster, progress)
    finally:
        progress.end()
    if options.json:
        print(json.dumps(report.to_data(), indent=2))
    else:
        print(*report.lines(), sep="\n")
    return 0 if report.fits else 1


def _check(
    options: argparse.Namespace,
    imported: Imported,
    setting: Imported,
    cluster: Any,
    progress: shared.Progress,
) -> Report:
    from autopar.check import check
    from autopar.trace import trace

    batch = options.global_batch_size or setting.batch()
    seq = options.seq_len or setting.seq_len
    name, (model, args, kwargs, loss_fn) = _model(options, setting, batch, seq)
    batch = batch or samples(args, kwargs)
    if batch is None:
        raise InputError("the batch size is not known", fix="say --global-batch-size N")
    if seq is None and options.model is None:
        seq = sizes.tokens(args)
    traced = trace(model, args, kwargs, loss_fn)
    return check(
        imported,
        traced.graph,
        traced.loss,
        cluster,
        model=name,
        batch=batch,
        seq_len=seq or sizes.tokens(args),
        stack=options.software,
        search_s=None if options.no_search else options.time_limit,
        on_progress=progress,
    )


def _model(
    options: argparse.Namespace, setting: Imported, batch: int | None, seq: int | None
) -> tuple[str, tuple[Any, tuple[Any, ...], dict[str, Any], Any]]:
    """The model that is named, or that the file describes, and a call of it."""
    from autopar.runtime.loader import load_model

    if options.model is not None:
        own = sizes.is_function(options.model)
        loaded = load_model(options.model, batch=None if own else batch, seq=None if own else seq)
        return options.model, (loaded.model, loaded.args, dict(loaded.kwargs), loaded.loss_fn)
    if setting.model is None:
        raise InputError(
            f"{setting.where} does not describe a model",
            expected="MODEL behind it: a preset such as llama3-8b, file.py:function, ...",
            fix="`autopar models` lists the presets",
        )
    if batch is None:
        raise InputError(
            f"{setting.where} does not say how large the batch is",
            fix="say --global-batch-size N",
        )
    from autopar.check.model import DEFAULT_SEQ, described_model

    made = described_model(setting, setting.model, batch, seq or DEFAULT_SEQ)
    return setting.model.name, (*made, None)
