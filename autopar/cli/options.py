"""Options that several commands share, and their meaning."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError
from autopar.plan.extras import POLICIES, RESERVED, split_text
from autopar.plan.shapes import shown
from autopar.plan.strategies import ROLES, STRATEGIES, default_mesh, strategy_name
from autopar.search.asked import TIME, kept_by_search
from autopar.sharding.mesh import Mesh

if TYPE_CHECKING:
    from autopar.cost_models.cluster import ClusterSpec
    from autopar.imports.read import Resolved
    from autopar.plan.plan import Plan

DEFAULT_RANKS = 4
DEFAULT_CLUSTER = f"{DEFAULT_RANKS}xcpu"
EXTRAS = ("microbatches", "schedule", "chunks", "zero", "recompute", "cuts", "tensor")
"""Options that say the same as the constraints of their names."""
STEERING = ("cluster", "mesh", "strategy", "constraints", *EXTRAS)
"""Options of `add_choices`."""
MODEL_HELP = (
    "file.py:function or package.module:function; the function returns (model, args, kwargs) or a "
    "dict with model, args, kwargs and loss_fn; or a Hugging Face config.json; or a preset such as "
    "gpt3-175b (`autopar models` lists them)"
)


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_width(parser: argparse.ArgumentParser) -> None:
    """``--width``."""
    parser.add_argument(
        "--width", type=int, metavar="N", help="columns (default: those of the terminal, or 100)"
    )


def add_choices(parser: argparse.ArgumentParser) -> None:
    """What steers a plan: `STEERING`."""
    parser.add_argument(
        "--cluster",
        metavar="C",
        help='such as "8x8xH100-SXM", "4xcpu" or a YAML file (default: 4xcpu)',
    )
    parser.add_argument("--mesh", metavar="AXES", help='axes and sizes, such as "dp=2,tp=2"')
    parser.add_argument(
        "--strategy", metavar="NAME", help="a named strategy, such as ddp or megatron"
    )
    parser.add_argument(
        "--constraints",
        metavar="FILE",
        help="factor to mesh axis, as JSON text or in a JSON or YAML file, or text such as"
        " placements=lm_head.weight:whole; or a configuration of DeepSpeed (JSON), Megatron-LM"
        " (script), torchtitan (TOML) or Accelerate (YAML)",
    )
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="compute the batch in M parts, one by one"
    )
    parser.add_argument(
        "--schedule", metavar="NAME", help="order of a pipeline (mesh axis pp), such as 1f1b"
    )
    parser.add_argument("--chunks", type=int, metavar="V", help="stages per pipeline rank")
    parser.add_argument(
        "--zero", type=int, metavar="STAGE", help="ZeRO stage 0 to 3 over the data axes"
    )
    parser.add_argument(
        "--recompute",
        metavar="WHAT",
        help='"full", "selective" or patterns over ops: what backward computes again',
    )
    parser.add_argument(
        "--cuts", metavar="A,B", help="where stages begin: module paths, such as layers.4,layers.8"
    )
    parser.add_argument(
        "--tensor", metavar="NAME", help="what the axis tp splits: " + ", ".join(ROLES)
    )


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Sizes of the call of a preset."""
    parser.add_argument(
        "--global-batch-size", type=int, metavar="N", help="samples of a step, for a preset"
    )
    parser.add_argument("--seq-len", type=int, metavar="S", help="tokens per sample, for a preset")


def read_search(options: argparse.Namespace) -> tuple[Mesh | None, dict[str, Any]] | None:
    """The mesh and the constraints that a search keeps; None if there is nothing to search.

    A search takes place if one is asked for, with --search or as the strategy; or if a cluster is
    given, and neither a strategy nor factors on axes say how to plan.

    Raises:
        AutoparError: If the options cannot be read.
    """
    about_parts = options.objective != TIME or options.step_within is not None
    asked = options.search is not None or options.strategy == "search" or about_parts
    if options.strategy not in (None, "search"):
        if asked:
            name = "--search" if options.search is not None else "--objective"
            raise InputError(
                f"{name} is given, and a strategy says how to plan",
                expected="one of them; a search keeps --mesh, --constraints, "
                + ", ".join(f"--{n}" for n in EXTRAS),
            )
        return None
    if not asked and options.cluster is None:
        return None
    cluster = read_cluster(options.cluster or DEFAULT_CLUSTER)
    mesh = Mesh.parse(options.mesh) if options.mesh else None
    if mesh is not None and options.cluster:
        mesh.check_devices(cluster.num_devices)
    given: dict[str, Any] = {}
    if options.constraints:
        found = _resolved(options, mesh, cluster, search=asked)
        if not asked and found.imported is not None:
            return None  # the file says all of a plan
        assert isinstance(found.constraints, dict)
        given, mesh = found.constraints, found.mesh
    kept = _with_extras(given, options)
    assert isinstance(kept, dict)
    kept_so = kept_by_search(
        kept, cluster=options.cluster is not None, mesh=mesh is not None, search=asked
    )
    if kept_so is None and asked:
        raise InputError(
            "a search is asked for, and the constraints name a strategy",
            expected="one of them; --tensor says what tensor ranks split",
            where="--constraints",
        )
    if kept_so is not None and options.constraints:
        _tell_notes(found)
    return None if kept_so is None else (mesh, kept_so)


class Progress:
    """A line on a terminal that says how far a search is; silent elsewhere."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()
        self.last_s = 0.0

    def __call__(self, line: str) -> None:
        """Show a line, a few times a second."""
        now = time.monotonic()
        if self.shown and now - self.last_s > 0.2:
            self.last_s = now
            print(f"\r{line[:78]:<78}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self.shown and self.last_s:
            print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)


def read_choices(options: argparse.Namespace) -> tuple[Mesh, str | dict[str, Any] | None]:
    """The mesh and the constraints that the options of `add_choices` stand for.

    Without ``--mesh`` the strategy shapes one over the cluster, by default four local ranks.

    Raises:
        AutoparError: If an option cannot be read, or mesh and cluster differ in size.
    """
    if options.strategy and options.constraints:
        raise InputError("--strategy and --constraints are both given", expected="one of them")
    constraints = options.strategy
    cluster = read_cluster(options.cluster) if options.cluster else None
    mesh = Mesh.parse(options.mesh) if options.mesh else None
    if mesh is not None and cluster is not None:
        mesh.check_devices(cluster.num_devices)
    if options.constraints:
        constraints, mesh = _read_constraints(options, mesh, cluster)
    constraints = _with_extras(constraints, options)
    if mesh is None:
        count = cluster.num_devices if cluster else DEFAULT_RANKS
        mesh = default_mesh(strategy_name(constraints), count)
    return mesh, constraints


def _with_extras(
    constraints: str | dict[str, Any] | None, options: argparse.Namespace
) -> str | dict[str, Any] | None:
    """The constraints with what `EXTRAS` add.

    Raises:
        InputError: If both say something of the same.
    """
    extras = {name: getattr(options, name, None) for name in EXTRAS}
    given = {name: value for name, value in extras.items() if value is not None}
    if not given:
        return constraints
    if isinstance(constraints, str):
        constraints = split_text(constraints)
    for name in given:
        if constraints and name in constraints:
            raise InputError(
                f"--{name} is given, and the constraints say {name} too", expected="one of them"
            )
    if "recompute" in given and given["recompute"] not in POLICIES:
        given["recompute"] = _list(given["recompute"])
    if "cuts" in given:
        given["cuts"] = _list(given["cuts"])
    return {**(constraints or {}), **given}


def _list(text: str) -> list[str]:
    """Parts that commas join, or ``+`` as in constraints that are text."""
    return [part.strip() for part in re.split(r"[,+]", text)]


def read_cluster(text: str) -> ClusterSpec:
    """The cluster that ``--cluster`` names: a file, or text such as ``8x8xH100-SXM``.

    Raises:
        ClusterError: If it is neither.
    """
    from autopar.cost_models.cluster import ClusterSpec

    if text.endswith((".yaml", ".yml", ".json")):
        return ClusterSpec.load(text)
    return ClusterSpec.parse(text)


def check_writable(path: str, *inputs: str | None) -> None:
    """Refuse an output file whose folder does not exist, before the work is done.

    Args:
        path: The output.
        inputs: Files that are read, and must not be overwritten.

    Raises:
        InputError: If `path` is a folder, lies in none, or is an input.
    """
    target = Path(path)
    for name in inputs:
        if name is not None and target.exists() and Path(name).exists() and target.samefile(name):
            raise InputError(
                f"output {path!r} is the input itself", expected="another file", where="--output"
            )
    if target.is_dir() or not target.parent.is_dir():
        what = "is a folder" if target.is_dir() else f"is in no folder: no {str(target.parent)!r}"
        raise InputError(f"output {path!r} {what}", expected="a file in an existing folder")


def write_output(path: str, text: str) -> None:
    """Write an output file.

    Raises:
        InputError: If that is not possible.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"output {path!r} cannot be written: {error.strerror}",
            expected="a file in a folder that can be written to",
            where="--output",
        ) from None


def tell_changes(before: Plan | None, after: Plan) -> None:
    """Say on standard error what has become of a plan that met inputs of other sizes.

    Args:
        before: The plan as it was given, if one was.
        after: The plan that was carried out.
    """
    from autopar.planning import changes

    if before is not None and (text := changes(before, after)):
        print(text, file=sys.stderr)


def _read_constraints(
    options: argparse.Namespace, mesh: Mesh | None, cluster: ClusterSpec | None
) -> tuple[dict[str, Any], Mesh | None]:
    """What ``--constraints`` says, and the mesh that a file asks for.

    What a framework's configuration says beside that is printed.
    """
    found = _resolved(options, mesh, cluster)
    _tell_notes(found)
    assert isinstance(found.constraints, dict)
    return found.constraints, found.mesh


def _tell_notes(found: Resolved) -> None:
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)


def _resolved(
    options: argparse.Namespace,
    mesh: Mesh | None,
    cluster: ClusterSpec | None,
    *,
    search: bool = False,
) -> Resolved:
    """What ``--constraints`` says: a file, JSON text, or text such as ``zero=1,cuts=layers.4``."""
    from autopar.imports.read import Resolved, resolve

    text = options.constraints
    if _is_text(text):
        return Resolved(mesh=mesh, constraints=split_text(text))
    if not text.lstrip().startswith("{"):
        return resolve(
            Path(text), mesh, cluster.num_devices if cluster else None,
            batch=getattr(options, "global_batch_size", None), search=search,
        )  # fmt: skip
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"constraints are no JSON: {error}",
            expected='an object such as {"heads": "tp", "batch": "dp"}, or the name of a file',
            fix="put it in single quotes, so that the shell leaves its double quotes alone",
            where="--constraints",
        ) from None
    if not isinstance(value, dict):
        raise InputError(
            f"constraints are {shown(value)}",
            expected='an object such as {"heads": "tp", "batch": "dp"}',
            where="--constraints",
        )
    return Resolved(mesh=mesh, constraints=value)


def names_file(constraints: str | None) -> bool:
    """Whether ``--constraints`` names a file, and is neither JSON nor other text."""
    if constraints is None or constraints.lstrip().startswith("{"):
        return False
    return not _is_text(constraints)


def _is_text(text: str) -> bool:
    """Whether constraints are a strategy, or pairs such as ``zero=1``, and so no file."""
    if text.partition("=")[0].strip() in (*RESERVED, *STRATEGIES):
        return True
    return bool(re.match(r"\s*\w+\s*[=,]", text)) and not Path(text).exists()
