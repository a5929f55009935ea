"""One local rank: a process that runs the functions its `LocalRanks` sends.

Protocol, one pickle per message. The pool sends a port once, 0 to rank 0, which answers with the
port it listens on; then any number of `Task`s, each answered by any number of
``("report", value)`` and one of ``("ok", result)``, ``("error", error or None, what,
traceback)`` or ``("nested", error, what, "")``. End of file means: stop.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from autopar.errors import AutoparError, InputError
from autopar.runtime.loader import load_file_as, load_object

# Name under which the caller's script is imported: its `if __name__ == "__main__"` stays quiet.
_CALLERS_MAIN = "__autopar_main__"
# Set in a process that is a local rank.
serving = threading.Event()


class NestedRanksError(BaseException):
    """A local rank was about to start local ranks.

    Not an Exception: neither the user's script nor the loader is to handle it on the way up.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A function by name, with its arguments.

    Attributes:
        module: Module name, or None when `name` is a full ``file.py:function`` target.
        file: Source file of the module.
        name: Qualified name in the module, or the full target.
        main_file: File of the caller's ``__main__``, whose classes may be in `payload`.
        path: The caller's import path.
        payload: Pickle of the argument tuple.
    """

    module: str | None
    file: str | None
    name: str
    main_file: str | None
    path: tuple[str, ...]
    payload: bytes

    def run(self, communicator: Any) -> Any:
        """Call the function with `communicator` and the arguments."""
        sys.path.extend(entry for entry in self.path if entry not in sys.path)
        if self.main_file is not None and b"__main__" in self.payload:
            sys.modules["__main__"] = load_file_as(Path(self.main_file), _CALLERS_MAIN)
        function = self._function()
        return function(communicator, *pickle.loads(self.payload))

    def _function(self) -> Any:
        if self.module is None:
            return load_object(self.name)
        value: Any = self._module(self.module)
        for part in self.name.split("."):
            value = getattr(value, part)
        return value

    def _module(self, name: str) -> ModuleType:
        if name == "__main__":
            assert self.file is not None, self
            return load_file_as(Path(self.file), _CALLERS_MAIN)
        spec = None
        with contextlib.suppress(ImportError, ValueError):  # of a parent package, or no spec
            spec = importlib.util.find_spec(name)
        if spec is not None and (self.file is None or _same(spec.origin, self.file)):
            return importlib.import_module(name)
        if self.file is None:
            raise InputError(f"no module {name!r}", fix="define the function in a file")
        return load_file_as(Path(self.file), name)


def _same(origin: str | None, file: str) -> bool:
    return origin is not None and Path(origin).resolve() == Path(file).resolve()


def main() -> None:
    """Serve the pool named by the command line (rank, ranks, port, threads, timeout)."""
    rank, world_size, port, threads, timeout_s = sys.argv[1:]
    del sys.argv[1:]
    serve(int(rank), int(world_size), int(port), int(threads), float(timeout_s))


def serve(rank: int, world_size: int, port: int, threads: int, timeout_s: float) -> None:
    """Answer the pool that listens on `port` of this machine until it hangs up."""
    serving.set()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_stop_with_parent, args=(os.getppid(),), daemon=True).start()
    connection = Client(("127.0.0.1", port), authkey=bytes.fromhex(os.environ["AUTOPAR_POOL_KEY"]))
    assert isinstance(connection, Connection), connection
    connection.send_bytes(pickle.dumps(rank))
    try:
        communicator = _join(connection, rank, world_size, threads, timeout_s)
        communicator.report = lambda value: connection.send_bytes(pickle.dumps(("report", value)))
        while True:
            task: Task = pickle.loads(connection.recv_bytes())
            connection.send_bytes(_answer(task, communicator))
    except (EOFError, ConnectionResetError, BrokenPipeError):
        # No farewell: peers may be gone already, and waiting for them is how processes hang.
        os._exit(0)


def _join(
    connection: Connection, rank: int, world_size: int, threads: int, timeout_s: float
) -> Any:
    import torch
    import torch.distributed as dist

    from autopar.runtime.comm_torch import TorchCommunicator

    torch.set_num_threads(threads)
    timeout = datetime.timedelta(seconds=timeout_s)
    port: int = pickle.loads(connection.recv_bytes())
    store = dist.TCPStore(  # type: ignore[attr-defined] # public, but not in __all__
        "127.0.0.1", port, world_size, rank == 0, timeout, wait_for_workers=False
    )
    if rank == 0:
        connection.send_bytes(pickle.dumps(store.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return TorchCommunicator(torch.device("cpu"))


def _answer(task: Task, communicator: Any) -> bytes:
    try:
        return pickle.dumps(("ok", task.run(communicator)))
    except NestedRanksError:
        refusal = InputError(
            "a local rank was about to start local ranks again",
            expected="a script that starts them only when it is run, not when it is imported, as "
            "every rank does to find its model and functions",
            fix='put the call under `if __name__ == "__main__":`, or let verify use threads=True',
            where=task.main_file,
        )
        return pickle.dumps(("nested", refusal, refusal.what, ""))
    except BaseException as error:
        text = traceback.format_exc()
        known = error if isinstance(error, AutoparError) else None
        return pickle.dumps(("error", known, f"{type(error).__name__}: {error}", text))


def _stop_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
