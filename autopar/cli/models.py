"""List the models that can be named: published ones, with their sizes.

Any of them is a MODEL of `autopar plan` and its like; so are functions of one's own and Hugging
Face configurations.
"""

from __future__ import annotations

import argparse
import json

from autopar.cli import options as shared
from autopar.errors import InputError
from autopar.presets.config import DecoderConfig
from autopar.presets.registry import PRESETS, Preset, similar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="a part of a name")
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the presets, or those whose names hold a text."""
    found = [item for name, item in PRESETS.items() if (options.name or "") in name]
    if not found:
        raise InputError(f"no preset {options.name!r}", expected=similar(options.name))
    if options.json:
        print(json.dumps([_data(item) for item in found], indent=2))
        return 0
    width = max(len(item.name) for item in found)
    for item in found:
        print(f"{item.name:<{width}}  {_count(item.params):>6}  {_sizes(item)}")
    return 0


def _data(preset: Preset) -> dict[str, object]:
    return {
        "name": preset.name, "family": preset.family, "parameters": preset.params,
        "batch": preset.batch, "seq": preset.seq, "source": preset.source,
        "sizes": _sizes(preset),
    }  # fmt: skip


def _count(params: float) -> str:
    return f"{params / 1e9:.3g}B" if params >= 1e9 else f"{params / 1e6:.3g}M"


def _sizes(preset: Preset) -> str:
    sizes, seq = preset.sizes, f"batch {preset.batch} x {preset.seq}"
    if isinstance(sizes, DecoderConfig):
        experts = f", {sizes.experts} experts" if sizes.experts else ""
        shape = f"{sizes.layers} layers of {sizes.hidden}, {sizes.heads} heads{experts}"
    elif "hidden" in sizes:
        shape = f"{sizes['layers']} layers of {sizes['hidden']}, {sizes['heads']} heads"
    else:
        shape = f"{sum(sizes['layers'])} blocks"
    return f"{preset.family}: {shape}; {seq}; {preset.source}"
