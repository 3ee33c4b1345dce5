"""Runs of examples/train_moe.py in processes that have torch already.

Each process of a run imports torch and the example, which takes longer than the few steps of a test. Here one process
imports them and forks for each run, and for each rank that the launcher of a run starts. The script itself runs as a
user's command does: as ``__main__``, with its own arguments, environment and output.

A run that is measured from its start, stopped by signals or started by another launcher is a new process instead.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

SOCKET = "TRAIN_MOE_FORK_SERVER"  # environment variable: the socket's path

#: What the runs import.
IMPORTED = (
    "matplotlib.pyplot",
    "moe_lm.compare",
    "moe_lm.launch",
    "moe_lm.plots",
    "moe_lm.run",
    "moe_lm.sample",
    "torch._inductor.compile_fx",
)


class ForkedRun:
    """The part of ``subprocess.Popen`` that the launcher of the example uses, for a process that the server forks."""

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        stdout: int = 1,
        stderr: int = 2,
        file_size: tuple[int, int] | None = None,
    ) -> None:
        """``file_size`` is the limit of files that the process writes; without it, that of this process."""
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(env[SOCKET])
        request = {
            "arguments": command[1:],
            "environment": env,
            "folder": os.getcwd(),
            "file_size": file_size or resource.getrlimit(resource.RLIMIT_FSIZE),
        }
        socket.send_fds(self._connection, [json.dumps(request).encode()], [stdout, stderr])
        self.pid = int(self._connection.recv(32))

    def poll(self, seconds: float = 0.0) -> int | None:
        """The exit status, or None if the process still runs after these seconds."""
        if self.returncode is None and select.select([self._connection], [], [], seconds)[0]:
            self.returncode = int(self._connection.recv(32))
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        if self.poll(timeout) is None:
            self.kill()
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(request: dict[str, Any], output: list[int]) -> NoReturn:
    """The forked process: runs the script with the arguments, environment and output of the request."""
    status = 1
    try:
        os.setsid()
        for number, file in zip((1, 2), output, strict=True):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        resource.setrlimit(resource.RLIMIT_FSIZE, request["file_size"])
        sys.argv = request["arguments"]
        launcher: Any = sys.modules["moe_lm.launch"]
        if started_by := os.environ.get(launcher.LAUNCHER):
            os.getppid = lambda: int(started_by)  # a rank's parent is its launcher; here it is the server
        launcher.subprocess = SimpleNamespace(Popen=ForkedRun)
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # as Python does
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Server:
    """Forks on request, and sends each client the exit status of its process. Ends with the process that started it."""

    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(16)
        self.clients: dict[int, socket.socket] = {}

    def serve(self) -> None:
        """Until the standard input ends."""
        while True:
            readable: list[Any] = select.select([0, self.listener, *self.clients.values()], [], [], 0.02)[0]
            if self.listener in readable:
                self._fork()
            for pid, client in self.clients.items():
                if client in readable:  # it has ended, as it sends nothing
                    os.kill(pid, signal.SIGKILL)
            self._report()
            if 0 in readable:
                break
        for pid in self.clients:
            os.kill(pid, signal.SIGKILL)

    def _fork(self) -> None:
        client, _ = self.listener.accept()
        content, output, _, _ = socket.recv_fds(client, 2**20, 2)
        pid = os.fork()
        if pid == 0:
            for other in (self.listener, client, *self.clients.values()):
                other.close()
            _run(json.loads(content), output)
        for file in output:
            os.close(file)
        self.clients[pid] = client
        client.send(str(pid).encode())

    def _report(self) -> None:
        while self.clients:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            client = self.clients.pop(pid)
            with client, contextlib.suppress(BrokenPipeError):
                client.send(str(os.waitstatus_to_exitcode(status)).encode())


def main(examples: str, path: str) -> None:
    sys.path.insert(0, examples)
    for module in IMPORTED:
        importlib.import_module(module)
    server = Server(path)
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    server.serve()


def started(folder: Path, examples: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Starts a server with a socket in the folder, and waits for its imports. It ends when its input is closed."""
    command = [sys.executable, "-m", "tests.examples.fork_server", str(examples), str(folder / "socket")]
    server = subprocess.Popen(
        command,
        env=environment,
        cwd=examples.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n", server.wait()
    return server


if __name__ == "__main__":
    main(*sys.argv[1:])
