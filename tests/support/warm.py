"""Runs scripts in processes that have torch imported already, because each import of torch takes seconds.

`PARENT` runs this file as a program. The program imports torch once, and then forks a process for each script. The
process goes on as a new interpreter would: `sitecustomize` first, which loads the agent, then the script as `__main__`.
The agent meets modules that are imported already, so a test about imports needs a new interpreter. So does a test about
the teardown of the interpreter: here it is skipped, because it writes to all memory that the process shares with its
parent, which takes longer than most scripts.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_MOST = 1 << 20  # bytes of a request: an environment


class WarmProcess:
    """A process that was forked for a script, with the methods of `subprocess.Popen` that the tests use."""

    def __init__(self, pid: int, reply: socket.socket, output: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reply, self._output = reply, output

    def communicate(self, timeout: float = 150.0) -> tuple[str, None]:
        """The output, after the process ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired("a forked script", timeout, self._output.read_bytes())
        return self._output.read_text(), None

    def poll(self) -> int | None:
        return self._ended(0.0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _ended(self, timeout: float) -> int | None:
        """The exit code, negative for a signal; None if the process still runs after `timeout` seconds."""
        if self.returncode is None:
            self._reply.settimeout(timeout)
            try:
                self.returncode = int(self._reply.recv(100))
            except (TimeoutError, BlockingIOError):
                return None
            self._reply.close()
        return self.returncode


class WarmParent:
    """Starts the program below at the first script. It ends with this process."""

    def __init__(self) -> None:
        self._requests: socket.socket | None = None

    def start(self, script: Path, env: dict[str, str], output: Path, arguments: Sequence[str] = ()) -> WarmProcess:
        if self._requests is None:
            self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
            theirs.close()
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps({"script": str(script), "env": env, "output": str(output), "arguments": [*arguments]})
        socket.send_fds(self._requests, [request.encode()], [theirs.fileno()])
        theirs.close()
        return WarmProcess(int(reply.recv(100)), reply, output)


PARENT = WarmParent()  # of all tests in this process


def _next_script() -> dict[str, Any]:
    """Waits for requests, and returns in the process that was forked for a script. Ends the program when the tests have
    ended."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes in between
    while True:
        data, replies, _flags, _address = socket.recv_fds(requests, _MOST, 1)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _fork_and_wait(socket.socket(fileno=replies[0]))
            return dict(json.loads(data))
        os.close(replies[0])


def _fork_and_wait(reply: socket.socket) -> None:
    """Forks the process for the script, and returns in it. A process in between reports its pid, then its exit code."""
    pid = os.fork()
    if pid:
        reply.send(str(pid).encode())
        reply.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        os._exit(0)
    reply.close()


def _become(script: str, env: dict[str, str], output: str, arguments: list[str]) -> None:
    """Gives this process the environment, arguments and output that a new interpreter for the script would have."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(os.path.dirname(script))
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.argv[:] = [script, *arguments]
    sys.path[0:1] = [os.path.dirname(script), *env["PYTHONPATH"].split(os.pathsep)]
    sys.modules.pop("sitecustomize", None)


def _run(script: str) -> None:
    main = ModuleType("__main__")
    main.__file__ = script
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_text(), script, "exec", dont_inherit=True), main.__dict__)


def _skip_teardown() -> None:
    """The last work at exit of a script."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    failed = hasattr(sys, "last_type")  # the interpreter has printed an uncaught exception
    os._exit(1 if failed or not isinstance(_code, int | None) else (_code or 0) & 0xFF)


_code: Any = None  # with which the script called sys.exit
if __name__ == "__main__":
    atexit.register(_skip_teardown)  # before anything else is registered, so that it runs last
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.nn.parallel
    import torch.utils.data  # noqa: F401

    gc.freeze()
    request = _next_script()
    _become(**request)
    try:
        import_module("sitecustomize")
        _run(request["script"])
    except SystemExit as end:
        _code = end.code
        raise
