"""Start a script on several local ranks, as torchrun does on one machine.

Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The
first rank that fails stops the others, and its exit code is returned (128 + n for signal n).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

from autopar.errors import InputError

_STOP_S = 5.0  # between asking a rank to stop and killing it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="local ranks")
    parser.add_argument(
        "--json", action="store_true", help="print exit codes per rank as JSON on the last line"
    )
    parser.add_argument("script", help="Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def run(options: argparse.Namespace) -> int:
    """Start the ranks and wait for them."""
    if options.ranks < 1:
        raise InputError(f"-n {options.ranks}", expected="at least 1 rank")
    if not Path(options.script).is_file():
        raise InputError(f"no file {options.script!r}", expected="a Python file")
    command = [sys.executable, "-u", options.script, *options.arguments]
    processes, readers = _start(command, options.ranks)
    try:
        failed = _wait(processes)
    finally:
        _stop(processes)
        for reader in readers:
            reader.join()
    if options.json:
        print(json.dumps({"exit_codes": [process.returncode for process in processes]}))
    if failed is None:
        return 0
    code = processes[failed].returncode
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    print(f"error: rank {failed} failed with {how}; the others were stopped", file=sys.stderr)
    return code if code > 0 else 128 - code


def _start(
    command: list[str], count: int
) -> tuple[list[subprocess.Popen[str]], list[threading.Thread]]:
    port = _free_port()
    threads = max(1, (os.cpu_count() or 1) // count)
    processes, readers = [], []
    lock = threading.Lock()
    for rank in range(count):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        processes.append(process)
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert stream is not None
            reader = threading.Thread(target=_copy, args=(stream, target, rank, lock), daemon=True)
            reader.start()
            readers.append(reader)
    return processes, readers


def _copy(stream: IO[str], target: IO[str], rank: int, lock: threading.Lock) -> None:
    for line in stream:
        with lock, contextlib.suppress(BrokenPipeError):  # nobody reads; ranks go on all the same
            target.write(f"[{rank}] {line}" if line.endswith("\n") else f"[{rank}] {line}\n")
            target.flush()


def _wait(processes: list[subprocess.Popen[str]]) -> int | None:
    """The first rank that fails, as soon as it does, or None when all have succeeded."""
    ended: queue.Queue[int] = queue.Queue()

    def watch(rank: int) -> None:
        processes[rank].wait()
        ended.put(rank)

    for rank in range(len(processes)):
        threading.Thread(target=watch, args=(rank,), daemon=True).start()
    for _ in processes:
        rank = ended.get()
        if processes[rank].returncode != 0:
            return rank
    return None


def _stop(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _STOP_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
