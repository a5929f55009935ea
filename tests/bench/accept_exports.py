"""Exports, read by the targets' own code: ``python -m tests.bench.accept_exports TARGET``.

Needs the target's package: deepspeed, accelerate, torchtitan 0.2, or a checkout of Megatron-LM on
the path. Prints what the target has read; it raises what it does not accept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.export.facts import facts_of
from autopar.export.targets import export
from autopar.plan.plan import Plan
from tests.unit.export.plans import plan_of

FULL = ("layers.**/*",)
PLANS = {
    "ddp": plan_of({"dp": 4}),
    "zero3": plan_of(
        {"dp": 4}, zero=3, dtype="bfloat16", recompute=FULL, pipeline={"microbatches": 2}
    ),
    "zero1": plan_of({"dp": 4}, zero=1, pipeline={"microbatches": 2}),
    "tensor": plan_of({"dp": 2, "tp": 2}, sequence=True),
    "fused": plan_of({"dp": 2, "tp": 2}, gpt=True),
    "uneven": plan_of(
        {"pp": 2, "dp": 2, "tp": 2}, sequence=True, zero=1, dtype="bfloat16",
        pipeline={"microbatches": 4}, stages=(1, 3),
    ),
    "interleaved": plan_of(
        {"pp": 2, "dp": 2},
        pipeline={"microbatches": 4, "schedule": "interleaved_1f1b", "chunks": 2},
    ),
    "context": plan_of({"dp": 2, "cp": 2}, zero=3),
}  # fmt: skip


def read_accelerate(plan: Plan, file: Path) -> Any:
    """`accelerate launch`'s own loading and checks."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    options = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    _validate_launch_command(options)
    return load_config_from_file(str(file)).distributed_type


def read_deepspeed(plan: Plan, file: Path) -> Any:
    """DeepSpeed's configuration class, for as many data ranks as the plan has."""
    import deepspeed.comm
    from deepspeed.runtime.config import DeepSpeedConfig

    class Ranks:
        def get_data_parallel_world_size(self) -> int:
            return facts_of(plan).data_degree

    deepspeed.comm.get_rank = lambda *_: 0
    config = DeepSpeedConfig(json.loads(file.read_text()), mpu=Ranks())
    tensor = config.tensor_parallel_config
    specs = tensor.get_partition_config_object()
    return (
        config.train_batch_size, config.gradient_accumulation_steps,
        int(config.zero_optimization_stage), config.pipeline["stages"], tensor.autotp_size,
        len(specs.layer_specs) if specs else 0,
    )  # fmt: skip


def read_torchtitan(plan: Plan, file: Path) -> Any:
    """The job configuration of torchtitan 0.2."""
    from torchtitan.config.manager import ConfigManager

    config = ConfigManager().parse_args(["--job.config_file", str(file)])
    return config.parallelism.module_fqns_per_model_part, config.activation_checkpoint.mode


def read_megatron(plan: Plan, file: Path) -> Any:
    """Megatron-LM's argument parser, and its reading of a layout."""
    import typing

    import typing_extensions

    # Its newest sources import it from there, which Python 3.11 lacks.
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )
    from megatron.training.arguments import add_megatron_arguments

    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    found = parser.parse_args(" ".join(lines).split())
    if found.pipeline_model_parallel_layout is not None:
        layout = PipelineParallelLayerLayout.from_str(
            found.pipeline_model_parallel_layout, found.pipeline_model_parallel_size
        )
        layout.validate_layer_layout(found.num_layers, None)
    return found.tensor_model_parallel_size, found.pipeline_model_parallel_size


READERS: dict[str, tuple[str, Callable[[Plan, Path], Any]]] = {
    "accelerate": (".yaml", read_accelerate),
    "deepspeed": (".json", read_deepspeed),
    "torchtitan": (".toml", read_torchtitan),
    "megatron": (".args", read_megatron),
}


def main() -> None:
    """Read the exports of all plans."""
    target = sys.argv[1]
    ending, read = READERS[target]
    with tempfile.TemporaryDirectory() as folder:
        for name, plan in PLANS.items():
            file = Path(folder) / f"plan{ending}"
            file.write_text(export(plan, target).text)
            print(f"{target} accepts {name}: {read(plan, file)}")


if __name__ == "__main__":
    main()
