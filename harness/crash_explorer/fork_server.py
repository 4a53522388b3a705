"""A process that runs in the job's own Python, imports the libraries that the job imports, and forks the ranks of each
resume. This file is run by its path, with the standard library only.

It reads requests from the socket whose number is its argument, one JSON object per line, and answers each with a line:

    {"do": "import", "names": [...]}  ->  {"threads": n, "cuda": bool, "good": n}: how many of the modules were imported
        until there was a thread or a CUDA context; the modules after that are not imported
    {"do": "store"}  ->  {"port": n}: a new store of torch.distributed, in a process of its own as with torchrun;
        0: there is none. The process of the previous store is ended
    {"do": "fork", "ranks": [{"env", "argv", "cwd", "path", "log", "anew"}]}  ->  {"pids": [...]}; `anew`: the command
        of a new interpreter in which the rank then runs; empty: the rank runs in the forked process
    {"do": "ends", "pids": [...]}  ->  {"codes": {pid: code}} of the ranks that have ended; negative: a signal

In a forked rank, `serve` returns the program to run, so that the script runs at the bottom of the stack."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
import types
from typing import Any

from torchaos.harness.host.processes import end_with

_AGENT = "_torchaos"


def serve(sock: socket.socket) -> dict[str, Any] | None:
    """Serves requests. In the parent: returns None when the other end is closed. In a forked rank: returns the program
    to run."""
    lines, keeper = sock.makefile("rb"), StoreProcess()
    for line in lines:
        request = json.loads(line)
        if request["do"] == "import":
            answer = _import(request["names"])
        elif request["do"] == "ends":
            answer = {"codes": _ends(request["pids"])}
        elif request["do"] == "store":
            answer = {"port": keeper.start()}
        else:
            pids = []
            for rank in request["ranks"]:
                pid = os.fork()
                if not pid:
                    lines.detach()
                    sock.close()
                    return dict(rank)
                pids.append(pid)
            answer = {"pids": pids}
        sock.sendall(json.dumps(answer).encode() + b"\n")
    return None


class StoreProcess:
    """A forked process with a store of torch.distributed. If rank 0 served the store, the other ranks would try to
    connect too early, and torch would try again only half a second later."""

    def __init__(self) -> None:
        self._pid = 0

    def start(self) -> int:
        """The port of a new store; 0 if there is none."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        ours, theirs = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            end_with(parent)
            with contextlib.suppress(BaseException):
                os.close(ours)
                os.write(theirs, str(_store_port()).encode())
                os.close(theirs)
                signal.pause()
            os._exit(1)
        os.close(theirs)
        with os.fdopen(ours) as port:
            return int(port.read() or 0)


_store: Any = None  # lives as long as the keeper


def _store_port() -> int:
    global _store
    from torch._C._distributed_c10d import TCPStore

    _store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    return int(_store.port)


def _import(names: list[str]) -> dict[str, Any]:
    good, threads, cuda = 0, _threads(), _has_cuda()
    for name in names:
        with contextlib.suppress(BaseException):  # the rank, which may import in another order, will show the error
            importlib.import_module(name)
        threads, cuda = _threads(), _has_cuda()
        if threads > 1 or cuda:
            break
        good += 1
    return {"threads": threads, "cuda": cuda, "good": good}


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _has_cuda() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    asks = getattr(cuda, "is_initialized", None)  # torch is not whole while it is being imported
    return bool(asks and asks())


def _ends(pids: list[int]) -> dict[int, int]:
    found = {}
    for pid in pids:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            done, status = pid, 0
        if done:
            found[pid] = os.waitstatus_to_exitcode(status)
    return found


def become(rank: dict[str, Any], parent: int) -> types.ModuleType:
    """Makes this process look like a rank that torchrun has just started. Returns the rank's `__main__`."""
    end_with(parent)
    log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    os.environ.clear()
    os.environ.update(rank["env"])
    os.chdir(rank["cwd"])
    sys.argv, sys.path[0] = list(rank["argv"]), rank["path"]
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    return main


def set_threads() -> None:
    """Sets torch's number of threads to the number in the rank's environment. The parent has one thread."""
    wanted, torch = os.environ.get("OMP_NUM_THREADS", ""), sys.modules.get("torch")
    if torch is not None and wanted.isdecimal() and int(wanted) > 1:
        torch.set_num_threads(int(wanted))


def leave_at_once() -> None:
    """The last action of a rank at exit: skips the teardown of the interpreter. The teardown would touch all memory
    that the rank shares with its parent, which takes seconds for large libraries. It might also wait for threads that
    only the parent has."""
    if _rank is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    failed = hasattr(sys, "last_type")  # the interpreter has printed an uncaught exception
    os._exit(1 if failed or not isinstance(_code, (int, type(None))) else (_code or 0) & 0xFF)


def start_agent(folder: str) -> None:
    """Starts the agent as its sitecustomize would, although torch is imported already. The agent replaces functions of
    torch. If a module imported such a function earlier (`from torch import save`), the function is replaced there
    too."""
    before = {name: dict(vars(module)) for name, module in list(sys.modules.items()) if _may_be_patched(name, module)}
    package = sys.modules[_AGENT] = types.ModuleType(_AGENT)
    package.__path__ = [folder]
    importlib.import_module(f"{_AGENT}.agent").start()
    new = {}  # by id of the old function: its module, and the replacement. `before` keeps the old functions alive
    for name, was in before.items():
        now = vars(sys.modules[name])
        new.update({id(old): (name, now[key]) for key, old in was.items() if now.get(key, old) is not old})
    for name, module in list(sys.modules.items()) if new else ():
        if name.startswith(_AGENT) or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            owner, replacement = new.get(id(value), ("", None))
            if owner and not (owner == "torch" and name.startswith("torch.")):  # torch imports these before the agent
                setattr(module, key, replacement)


def _may_be_patched(name: str, module: Any) -> bool:
    known = ("torch", "safetensors", "lightning", "lightning_fabric", "torchdata")
    return isinstance(module, types.ModuleType) and name.partition(".")[0] in known


_rank: dict[str, Any] | None = None
_code: Any = None  # with which the script called sys.exit
if __name__ == "__main__":
    atexit.register(leave_at_once)  # before anything else is registered, so that it runs last
    _parent = os.getpid()
    _rank = serve(socket.socket(fileno=int(sys.argv[1])))
    if _rank is not None:
        _main = become(_rank, _parent)
        if _rank["anew"]:
            os.execve(_rank["anew"][0], _rank["anew"], _rank["env"])
        set_threads()
        start_agent(_rank["agent"])
        try:
            if _rank["module"]:
                import runpy

                runpy._run_module_as_main(_rank["module"], alter_argv=True)  # type: ignore[attr-defined]
            else:
                with open(_rank["argv"][0], "rb") as _file:
                    _script = compile(_file.read(), _rank["argv"][0], "exec")
                _main.__dict__["__file__"] = _rank["argv"][0]
                exec(_script, _main.__dict__)
        except SystemExit as _end:
            _code = _end.code
            raise
