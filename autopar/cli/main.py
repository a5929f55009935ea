"""``autopar``: one file per command, imported only when it is asked for."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import autopar
from autopar.errors import AutoparError, meant

COMMANDS = {
    "quickstart": "plan, verify and train a small GPT on real text on local CPU ranks",
    "plan": "choose how to shard a model over a cluster",
    "check": "say whether a configuration of another framework fits, and what to change first",
    "models": "list the models that can be named",
    "show": "print a plan: what is split over what, and why it fits",
    "explain": "say where a plan's seconds and bytes come from, and why no other plan was taken",
    "simulate": "write the predicted step of a plan as a Chrome trace",
    "report": "write a plan as one HTML page: step and memory over time, parameters, alternatives",
    "lint": "report everything that is wrong with a plan file",
    "diff": "compare two plans",
    "reprice": "predict a plan anew: another cluster, batch or sequence length",
    "export": "write a plan as configuration of DeepSpeed, Megatron, torchtitan, ... or as PyTorch",
    "verify": "run sharded on local ranks beside one device, and compare everything",
    "dryrun": "execute ranks of a plan without their devices, and report what they hold",
    "run": "start a script on several local ranks",
    "profile": "measure this machine, or mend a cluster with a measured step; write a cluster file",
    "validate": "price published training runs, and print the errors",
}
_CHOICE = re.compile(r"invalid choice: '(.*)' \(choose from (.*)\)")
_EXITS = "exit codes: 0 yes, 1 no (not equal, infeasible), 2 bad input, 3 an error in autopar"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Words after ``autopar``; those of the process by default.

    Returns:
        The exit code: 0 yes, 1 no, 2 bad input, 3 an error in autopar itself.
    """
    # A command is a short process that keeps most of what it makes: fewer collections.
    gc.set_threshold(1_000_000, 50, 1000)
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _top_parser()
    if not words or words[0] not in COMMANDS:
        parser.parse_args(words)  # --help, --version and unknown commands end here
        parser.print_help()
        return 2
    command = importlib.import_module(f"autopar.cli.{words[0]}")
    own = _Parser(
        prog=f"autopar {words[0]}",
        description=command.__doc__,
        epilog=_EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(own)
    options = own.parse_args(words[1:])
    return _run(command.run, options)


def entry() -> NoReturn:
    """Run `main` as a process that ends with it.

    Taking an interpreter with torch in it apart takes as long as a second, and frees what the
    system frees anyway.
    """
    try:
        code = main()
    except SystemExit as end:  # argparse has printed what is wrong
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(function: object, options: argparse.Namespace) -> int:
    assert callable(function), function
    try:
        code: int = function(options)
        sys.stdout.flush()
        return code
    except AutoparError as error:
        if getattr(options, "json", False):
            print(json.dumps({"error": describe_error(error)}, indent=2))
        else:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has seen enough; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted before there was a result", file=sys.stderr)
        return 130
    except Exception:
        traceback.print_exc()
        print(
            "This is an error in autopar; please report it with the lines above.", file=sys.stderr
        )
        return 3


class _Parser(argparse.ArgumentParser):
    """A parser that says what was probably meant by options and choices that there are not."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and end with exit code 2."""
        choice = _CHOICE.search(message)
        if choice is not None:
            word, known = choice[1], re.findall(r"[\w-]+", choice[2])
        else:
            word = message.partition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
            known = re.findall(r"--[\w-]+", self.format_help())
        fix = meant(word, known)
        super().error(message if fix is None else f"{message}\n  fix:      {fix}")


def describe_error(error: AutoparError) -> dict[str, str | None]:
    """The parts of an error, as ``--json`` prints them."""
    return {
        "type": type(error).__name__,
        "what": error.what,
        "where": error.where,
        "expected": error.expected,
        "fix": error.fix,
    }


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    parser = _Parser(
        prog="autopar",
        usage="autopar [-h] [--version] COMMAND ...",
        description="A compiler whose output is a training run.",
        epilog=f"commands:\n{listing}\n\n`autopar COMMAND --help` says more.\n{_EXITS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"autopar {autopar.__version__}")
    parser.add_argument("command", nargs="?", choices=list(COMMANDS), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
