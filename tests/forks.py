"""Processes that do not import torch anew: one server a test session has imported what commands import, and forks for
each command line. A fork has the working folder, environment, streams, signals and exit status of a process of its
own; only its imports are the server's."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[1]


class Fork:
    """A running command line, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, report: int, out: BinaryIO | None, err: BinaryIO | None):
        self._report, self._out, self._err = report, out, err
        self._said = b""
        self.returncode: int | None = None
        self.pid = int(self._line(250.0) or 0)
        assert self.pid, "the server forked no process"

    def _line(self, timeout: float) -> bytes | None:
        """The server's next line, None where it does not come in time [s]."""
        end = time.monotonic() + timeout
        while b"\n" not in self._said:
            if not select.select([self._report], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            more = os.read(self._report, 100)
            assert more, "the server ended"
            self._said += more
        line, self._said = self._said.split(b"\n", 1)
        return line

    def poll(self) -> int | None:
        return self._ended(0.0)

    def _ended(self, timeout: float) -> int | None:
        if self.returncode is None and (line := self._line(timeout)) is not None:
            self.returncode = int(line)
            os.close(self._report)
        return self.returncode

    def wait(self, timeout: float = 250.0) -> int:
        if (status := self._ended(timeout)) is None:
            self.kill()
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return status

    def communicate(self, timeout: float = 250.0) -> tuple[str, str]:
        """Wait for the end; what it wrote to standard output and to standard error."""
        self.wait(timeout)
        said = []
        for file in (self._out, self._err):
            if file is not None:
                file.seek(0)
            said.append("" if file is None else file.read().decode())
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The server, seen from the tests; it is started by the first command line and ends with `close`."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None

    def start(
        self, *words: object, out: BinaryIO | None = None, merged: bool = False, cwd: Path = ROOT, **environment: str,
    ) -> Fork:
        """Start what `python *words` starts (`-m module ...` or `script ...`).

        out: where standard output goes instead of to `communicate`; merged: standard error goes there too;
        environment: variables beside those of the tests."""
        if self._control is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], stdin=subprocess.DEVNULL, cwd=ROOT,
                pass_fds=[theirs.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
            theirs.close()
        held: BinaryIO | None = tempfile.TemporaryFile() if out is None else None
        errors: BinaryIO | None = None if merged else tempfile.TemporaryFile()
        target: Any = out or held
        read, write = os.pipe()
        request = {"words": list(map(str, words)), "cwd": str(cwd), "environment": {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}}
        socket.send_fds(self._control, [json.dumps(request).encode()],
                        [target.fileno(), (errors or target).fileno(), write])
        os.close(write)
        return Fork(read, held, errors)

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._server.wait()


def preload() -> None:
    """Import what commands import, and `sparsekv.cli` not: `-m` runs it."""
    from sparsekv.cli import COMMANDS

    for row in COMMANDS.values():
        importlib.import_module(row.module)
    for name in ("lightning.pytorch", "transformers.models.llama.modeling_llama", "typer._adapters", "rich.console"):
        if importlib.util.find_spec(name) is not None:  # typer's is private, and not in every version
            importlib.import_module(name)
    del sys.modules["sparsekv.cli"]
    gc.collect()
    gc.freeze()  # forks share these pages as long as nothing looks at them


def serve(control: socket.socket) -> list[str]:
    """Fork for every request until the tests close their end; returns in the fork alone: the command line to run."""
    preload()
    while True:
        message, files, _, _ = socket.recv_fds(control, 1 << 20, 3)
        while _reaped(os.WNOHANG):
            pass
        if not message:
            while _reaped(0):
                pass
            os._exit(0)
        if os.fork() == 0:
            break
        for file in files:
            os.close(file)
    control.close()
    out, err, report = files
    request = json.loads(message)
    if child := os.fork():  # one process a command waits for it, so that the server never does
        os.write(report, b"%d\n" % child)
        os.close(out)
        os.close(err)
        os.write(report, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    os.close(report)
    for here, there in ((out, 1), (err, 2)):
        os.dup2(here, there)
        os.close(here)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # of TMPDIR
    return list(request["words"])


def _reaped(options: int) -> bool:
    try:
        return os.waitpid(-1, options)[0] > 0
    except ChildProcessError:
        return False


def run(words: list[str]) -> int:
    """Run a command line in this process; its exit status."""
    try:
        if words[0] == "-m":
            sys.path[0], sys.argv = os.getcwd(), words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0], sys.argv = str(Path(words[0]).parent), words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = run(serve(socket.socket(fileno=int(sys.argv[1]))))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # an interpreter that ends visits all that was imported, and copies its pages: three seconds
