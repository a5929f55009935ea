"""Local ranks: a pool of processes that run functions together over gloo.

Used by verify, quickstart and the tests. A rank that fails, dies or stops answering becomes a
`RankError` that names it, and takes the pool with it: nothing hangs, nothing is orphaned. The
next run starts the pool anew.
"""

from __future__ import annotations

import inspect
import multiprocessing.connection as mpc
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import autopar
from autopar.errors import AutoparError, InputError, RankError
from autopar.runtime.worker import NestedRanksError, Task, serving

# How long the other ranks may take to report their own failure before they are stopped.
_GRACE_S = 1.0
_START_TIMEOUT_S = 120.0
# Not `-m`: the worker's own module would then exist twice, as itself and as __main__.
_WORKER = "from autopar.runtime.worker import main; main()"


@final
class LocalRanks:
    """`count` processes on this machine, started on first use.

    Args:
        count: Number of ranks.
        timeout_s: Seconds one `run` may take.
        threads: Compute threads per rank; by default the machine's cores shared out.

    Example:
        >>> with LocalRanks(2) as ranks:                                   # doctest: +SKIP
        ...     ranks.run("my_package.work:total", 3)                      # total(comm, 3)
        [6, 6]
    """

    def __init__(self, count: int, timeout_s: float = 600.0, *, threads: int | None = None) -> None:
        if count < 1:
            raise InputError(f"{count} local ranks", expected="at least 1")
        self.count = count
        self.timeout_s = timeout_s
        self._threads = threads or max(1, (os.cpu_count() or 1) // count)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[mpc.Connection] = []

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_processes", None):
            self.close()

    def run(
        self,
        function: str | Callable[..., Any],
        *args: Any,
        on_report: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Run ``function(communicator, *args)`` on every rank.

        Args:
            function: ``"package.module:function"``, ``"file.py:function"``, or a function defined
                at the top level of a module or script.
            args: Picklable arguments, copied to every rank.
            on_report: Called with the rank and the value of each ``communicator.report(value)``.

        Returns:
            The results, in rank order.

        Raises:
            InputError: If the function or an argument cannot be sent.
            AutoparError: The error itself, with its parts, when the first failing rank raised one.
            RankError: When a rank raised anything else, died, or did not answer in time.
        """
        message = pickle.dumps(_task(function, args))
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                connection.send_bytes(message)
            answers = self._collect(on_report)
        except BaseException:
            self.close()
            raise
        return self._results(answers)

    def close(self) -> None:
        """Stop the processes. The pool may be used again."""
        processes, self._processes = self._processes, []
        for connection in self._connections:
            connection.close()
        self._connections = []
        deadline = time.monotonic() + 0.5
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        if serving.is_set():
            raise NestedRanksError
        key = secrets.token_bytes(16)
        with mpc.Listener(("127.0.0.1", 0), "AF_INET", backlog=self.count, authkey=key) as listener:
            port = listener.address[1]
            assert isinstance(port, int), listener.address
            try:
                self._processes = [self._spawn(rank, port, key) for rank in range(self.count)]
                self._accept(listener)
                self._connections[0].send_bytes(pickle.dumps(0))
                store_port = self._receive_port()
                for connection in self._connections[1:]:
                    connection.send_bytes(pickle.dumps(store_port))
            except BaseException:
                self.close()
                raise

    def _spawn(self, rank: int, port: int, key: bytes) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environment["OMP_NUM_THREADS"] = str(self._threads)
        environment["AUTOPAR_POOL_KEY"] = key.hex()
        # The child must find this very package, installed or not.
        environment["PYTHONPATH"] = os.pathsep.join(
            part for part in (environment.get("PYTHONPATH"), _package_parent()) if part
        )
        arguments = [rank, self.count, port, self._threads, self.timeout_s]
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _WORKER, *map(str, arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
        )

    def _accept(self, listener: mpc.Listener) -> None:
        connections: dict[int, mpc.Connection] = {}
        deadline = time.monotonic() + _START_TIMEOUT_S
        # Listener has no timeout of its own; its socket does.
        socket = listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(0.2)
        while len(connections) < self.count:
            self._check_alive("while starting")
            try:
                connection = listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise RankError(
                        f"local ranks did not start within {_START_TIMEOUT_S:g} s"
                    ) from None
                continue
            rank: int = pickle.loads(connection.recv_bytes())
            connections[rank] = connection
        self._connections = [connections[rank] for rank in range(self.count)]

    def _receive_port(self) -> int:
        connection = self._connections[0]
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not connection.poll(0.2):
            self._check_alive("while starting")
            if time.monotonic() > deadline:
                raise RankError(f"rank 0 did not start within {_START_TIMEOUT_S:g} s")
        port: int = pickle.loads(connection.recv_bytes())
        return port

    def _check_alive(self, when: str) -> None:
        for rank, process in enumerate(self._processes):
            if process.poll() is not None:
                raise RankError(f"rank {rank} died {when}: {_cause(process.returncode)}")

    def _collect(self, on_report: Callable[[int, Any], None] | None) -> dict[int, Any]:
        """Answers by rank; after the first failure only those that come within the grace."""
        waiting = dict(zip(self._connections, range(self.count), strict=True))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout_s
        failing = False
        while waiting:
            ready = mpc.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                if failing:
                    return answers
                raise RankError(
                    f"ranks {sorted(waiting.values())} did not answer within {self.timeout_s:g} s",
                    fix="raise timeout_s if the work is long; else look for a rank that skips a "
                    "collective",
                )
            for connection in ready:
                assert isinstance(connection, mpc.Connection), connection
                rank = waiting[connection]
                answer = self._receive(connection, rank)
                if answer[0] == "report":
                    if on_report is not None:
                        on_report(rank, answer[1])
                    continue
                del waiting[connection]
                answers[rank] = answer
                if answer[0] != "ok" and not failing:
                    failing = True
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return answers

    def _receive(self, connection: mpc.Connection, rank: int) -> Any:
        try:
            return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            try:
                process.wait(1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return ("dead", None, _cause(process.returncode), "")
        except Exception as error:
            text = f"its result cannot be read here: {type(error).__name__}: {error}"
            return ("error", None, text, "")

    def _results(self, answers: dict[int, Any]) -> list[Any]:
        failures = {rank: answer for rank, answer in answers.items() if answer[0] != "ok"}
        if not failures:
            return [answers[rank][1] for rank in range(self.count)]
        # Ranks that fail alike stand at the same point and can go on; else nobody knows.
        alike = len({_signature(answer) for answer in failures.values()}) == 1
        if len(failures) < self.count or not alike or _root(failures)[1][0] != "error":
            self.close()
        rank, (kind, error, what, text) = _root(failures)
        if kind == "nested":
            raise error
        if isinstance(error, AutoparError):
            error.add_note(f"raised on rank {rank} of {self.count}\n{text}")
            raise error
        if kind == "dead":
            raise RankError(f"rank {rank} died: {what}", where=f"rank {rank} of {self.count}")
        failure = RankError(f"rank {rank} failed: {what}", where=f"rank {rank} of {self.count}")
        failure.add_note(text)
        raise failure


def _signature(answer: Any) -> tuple[str, str, str]:
    kind, error, what, _ = answer
    return kind, type(error).__name__, what


def _root(failures: dict[int, Any]) -> tuple[int, Any]:
    """The failure to report: a death before an error, an own error before a broken connection."""

    def order(item: tuple[int, Any]) -> tuple[int, int]:
        rank, (kind, error, what, _) = item
        if kind == "dead":
            return 0, rank
        if error is None and ("Connection" in what or "gloo" in what.lower()):
            return 2, rank
        return 1, rank

    return min(failures.items(), key=order)


def _cause(returncode: int) -> str:
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exit code {returncode}"


def _package_parent() -> str:
    file = autopar.__file__
    assert file is not None
    return str(Path(file).absolute().parent.parent)


def _task(function: str | Callable[..., Any], args: tuple[Any, ...]) -> Task:
    main_file = getattr(sys.modules["__main__"], "__file__", None)
    try:
        payload = pickle.dumps(args)
    except Exception as error:
        raise InputError(
            f"an argument cannot be sent to the ranks: {error}",
            expected="picklable arguments",
            fix="pass a model as 'file.py:function' or define its class at the top of a module",
        ) from error
    module: str | None
    if isinstance(function, str):
        module, file, name = None, None, function
    else:
        module, name = function.__module__, function.__qualname__
        if "<" in name:
            raise InputError(
                f"{name} cannot be sent to the ranks",
                expected="a function defined at the top level of a module",
            )
        file = inspect.getsourcefile(function)
    return Task(
        module=module,
        file=None if file is None else str(Path(file).absolute()),
        name=name,
        main_file=None if main_file is None else str(Path(main_file).absolute()),
        path=tuple(sys.path),
        payload=payload,
    )
