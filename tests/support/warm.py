"""Runs scripts in processes that have torch imported already, because each import of torch takes seconds; and commands
of torchaos in processes that have torchaos.

`PARENT` and `COMMANDS` run this file as a program, once for all processes that run the tests of a session (`share`).
The program imports, and then forks a process for each script or command. It goes on as a new interpreter would: for a
script, `sitecustomize` first, which loads the agent, then the script as `__main__`. The agent meets modules that are
imported already, so a test about imports needs a new interpreter. So does a test about the teardown of the interpreter:
here it is skipped, because it writes to all memory that the process shares with its parent, which takes longer than
most scripts.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import pkgutil
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_MOST = 1 << 20  # bytes of a request: an environment
_IMPORTS = {
    "torch": (
        "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.nn.parallel",
        "torch.utils.data",
    ),
    "torchaos": ("torchaos.harness.cli", "torchaos.assertions", "torchaos.injectors"),
}  # fmt: skip


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


_FOLDER = "WARM_PARENTS"  # variable: the folder where the programs listen; its name begins with its maker's pid


def share() -> None:
    """From now on, this process and those that it starts have the same programs, which end when this process ends."""
    if _FOLDER not in os.environ:
        os.environ[_FOLDER] = tempfile.mkdtemp(prefix=f"{os.getpid()}-")
        atexit.register(_remove, Path(os.environ[_FOLDER]))


def _remove(folder: Path) -> None:
    if _maker(folder) == os.getpid():  # not in a process that was forked
        shutil.rmtree(folder, ignore_errors=True)


def _maker(folder: Path) -> int:
    return int(folder.name.partition("-")[0])


class WarmParent:
    """Starts the program below at the first script, if no other process has started it."""

    def __init__(self, imports: str) -> None:
        self._requests: socket.socket | None = None
        self._imports = imports

    def start(self, script: Path, env: dict[str, str], output: Path, arguments: Sequence[str] = ()) -> WarmProcess:
        """The output and the errors of the script go into a file; it runs in the folder that it lies in."""
        with open(os.devnull) as nothing, open(output, "wb") as file:
            streams = (nothing.fileno(), file.fileno(), file.fileno())
            return self.start_with([str(script), *arguments], env, script.parent, streams, output)

    def start_with(
        self, argv: Sequence[str], env: dict[str, str], cwd: Path, streams: tuple[int, int, int], output: Path
    ) -> WarmProcess:
        """The same, with files that are open already, for 0 to 2."""
        if self._requests is None:
            self._requests = self._connected()
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps({"argv": [*argv], "env": env, "cwd": str(cwd)})
        socket.send_fds(self._requests, [request.encode()], [theirs.fileno(), *streams])
        theirs.close()
        return WarmProcess(int(reply.recv(100)), reply, output)

    def _connected(self) -> socket.socket:
        share()
        folder = Path(os.environ[_FOLDER])
        address = folder / self._imports
        with open(folder / "lock", "w") as lock, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not address.exists():
                listener.bind(str(address))
                listener.listen()
                command = [sys.executable, __file__, str(listener.fileno()), self._imports, str(_maker(folder))]
                subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL)
        requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        requests.connect(str(address))
        return requests


PARENT = WarmParent("torch")
COMMANDS = WarmParent("torchaos")


def torchaos(
    *words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, stdin: int | None = None
) -> subprocess.CompletedProcess[str]:
    """`torchaos WORDS`, and what it printed. Without `stdin` there is nothing to read. `env` is added to our own."""
    with tempfile.TemporaryDirectory() as folder:
        argv = ["torchaos", *map(str, words)]
        return _finished(COMMANDS, argv, Path(folder), cwd or Path.cwd(), {**os.environ, **(env or {})}, stdin)


def python(code: str) -> subprocess.CompletedProcess[str]:
    """`python -c CODE`, where torch is imported already, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(code)
        return _finished(PARENT, [str(script)], Path(folder), Path(folder), {**os.environ})


def _finished(
    parent: WarmParent, argv: list[str], folder: Path, cwd: Path, env: dict[str, str], stdin: int | None = None
) -> subprocess.CompletedProcess[str]:
    """What ran to its end, with its output in files in `folder`."""
    said, errors = folder / "stdout", folder / "stderr"
    with open(os.devnull) as nothing, open(said, "wb") as out, open(errors, "wb") as error:
        streams = (nothing.fileno() if stdin is None else stdin, out.fileno(), error.fileno())
        process = parent.start_with(argv, env, cwd, streams, said)
    output, _ = process.communicate(600)
    return subprocess.CompletedProcess(argv, process.returncode or 0, output, errors.read_text())


def _next_request() -> dict[str, Any]:
    """Waits for requests, and returns in the process that was forked for one. Ends the program when the tests have
    ended."""
    listener, tests = socket.socket(fileno=int(sys.argv[1])), os.pidfd_open(int(sys.argv[3]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes in between
    served = [listener]
    while True:
        waited_for: list[Any] = [tests, *served]
        ready = select.select(waited_for, [], [])[0]
        if tests in ready:
            os._exit(0)
        for one in [one for one in served if one in ready]:
            if one is listener:
                served.append(listener.accept()[0])
                continue
            data, files, _flags, _address = socket.recv_fds(one, _MOST, 4)
            if not data:
                served.remove(one)
                one.close()
            elif os.fork() == 0:
                for other in served:
                    other.close()
                os.close(tests)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                reply, *streams = files
                for number, file in enumerate(streams):
                    os.dup2(file, number)
                    os.close(file)
                _fork_and_wait(socket.socket(fileno=reply))
                return dict(json.loads(data))
            for file in files:
                os.close(file)


def _fork_and_wait(reply: socket.socket) -> None:
    """Forks the process for the script, and returns in it. A process in between reports its pid, then its exit code."""
    pid = os.fork()
    if pid:
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):  # who reads the script's output does not wait for this process
            os.dup2(null, number)
        reply.send(str(pid).encode())
        reply.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        os._exit(0)
    reply.close()


def _become(argv: list[str], env: dict[str, str], cwd: str) -> None:
    """Gives this process the environment, arguments and folder that a new interpreter for the script would have."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv[:] = argv
    search = env.get("PYTHONPATH", "")
    sys.path[0:1] = [cwd, *filter(None, search.split(os.pathsep))]
    random.seed()


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
    for name in _IMPORTS[sys.argv[2]]:
        module = import_module(name)
        if name.startswith("torchaos."):
            for below in pkgutil.iter_modules(module.__path__, f"{name}."):
                import_module(below.name)
    if sys.argv[2] == "torchaos":
        registry = import_module("torchaos.harness.registry")
        registry.names("injectors")  # parses all modules, which is kept
        registry.forget()  # the packages of this process, which may not be those of a command
    gc.freeze()
    request = _next_request()
    _become(**request)
    try:
        if sys.argv[0] == "torchaos":
            import_module("torchaos.harness.cli").main()
        else:
            sys.modules.pop("sitecustomize", None)
            if importlib.util.find_spec("sitecustomize"):
                import_module("sitecustomize")
            _run(sys.argv[0])
    except SystemExit as end:
        _code = end.code
        raise
