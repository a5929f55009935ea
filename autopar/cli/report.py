"""Write a plan as one HTML file that needs no network.

It shows what the plan's file predicts: the step over time, memory over time and by rank, where
each parameter lies, the alternatives. With --measured, a step that ``compiled.profile`` measured is
laid over the prediction.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from autopar.cli import options as shared
from autopar.cost_models.residuals import Residual, mean_error, residuals
from autopar.plan.plan import Plan
from autopar.report.html import report
from autopar.schedules.chrome import Recording, read_recording
from autopar.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("plan", metavar="PLAN", help="plan file (JSON) with predictions")
    parser.add_argument(
        "-o", "--output", default="report.html", metavar="FILE",
        help="write the page here (default: report.html)",
    )  # fmt: skip
    parser.add_argument(
        "--measured", metavar="TRACE", help="a step that compiled.profile(...).save(TRACE) wrote"
    )
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Make the page, write it, and say where it is."""
    shared.check_writable(options.output, options.plan, options.measured)
    plan = Plan.load(options.plan)
    recording: Recording | None = None
    found: tuple[Residual, ...] = ()
    if options.measured:
        recording = read_recording(options.measured)
        found = residuals(plan, recording)
    text = report(plan, recording=recording, found=found)
    shared.write_output(options.output, text)
    size = len(text.encode())
    assert plan.forecast is not None
    if options.json:
        told: dict[str, Any] = {
            "output": options.output, "size_bytes": size,
            "predicted_step_s": plan.forecast.step_s,
        }  # fmt: skip
        if recording is not None:
            told |= {"measured_step_s": recording.step_s, "mean_error": mean_error(found)}
        print(json.dumps(told, indent=2))
        return 0
    print(f"{format_bytes(size)} written to {options.output}; open it in a browser")
    if recording is not None:
        print(f"mean error of the actions that compute (predicted / measured): "
              f"{mean_error(found):.1%}")  # fmt: skip
    return 0
