"""What the agent does when a rank starts: finds out whether the process is a rank of the job, and starts the agent in
it (`start_in_rank`). Also what has to be done as soon as a module is imported (`PostImport`), and the Python stacks of
a rank on request (`listen`)."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..protocol import wire
from ..protocol.agent_plan import AgentPlan
from ..protocol.wire import STACKS, STACKS_SIGNAL

Then = Callable[[ModuleType], None]


class PostImport:
    """Calls functions after imports. It is an import finder that finds no module itself: it asks the other finders, and
    replaces the method of the loader that executes the module."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Then]] = {}
        self._ended: set[str] = set()  # names of modules whose import has ended

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def when(self, name: str, then: Then) -> None:
        """Calls `then` with the module: now if it is imported already, otherwise at the end of its import."""
        module = sys.modules.get(name)
        under_way = getattr(getattr(module, "__spec__", None), "_initializing", False) and name not in self._ended
        if module is not None and not under_way:
            then(module)
        else:
            self._waiting.setdefault(name, []).append(then)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                self._follow(name, spec)
                return spec  # type: ignore[no-any-return]
        return None

    def _follow(self, name: str, spec: ModuleSpec) -> None:
        # The loader object stays the same, because tools check its type. Only `exec_module` of this instance is
        # replaced, and restored before the module runs.
        loader: Any = spec.loader
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            original(module)
            self._ended.add(name)
            for then in self._waiting.pop(name, []):
                then(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a class, or a loader with slots: builtins and frozen modules, never torch's
            return


@dataclass(frozen=True)
class Identity:
    rank: int  # in the whole job
    local_rank: int
    world_size: int  # number of ranks of its own torchrun
    attempt: int  # counted over restarts and resubmissions
    pid: int

    @property
    def source(self) -> str:
        return f"rank{self.rank}-a{self.attempt}-p{self.pid}"


def identify(environ: Mapping[str, str], pid: int) -> Identity | None:
    """The identity of this process, or None if the agent must not start in it. Raises ValueError for a malformed
    number.

    RANK in the environment is not enough, because data-loader workers inherit it. A process is a rank if it has
    torchelastic's variables, and if the agent was not started in one of its ancestors."""
    if not {"RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", wire.ENV_PLAN} <= environ.keys():
        return None
    if environ.get(wire.ENV_ARMED, str(pid)) != str(pid):  # if the pid is the same, this rank has called exec
        return None
    size, attempt = int(environ.get("WORLD_SIZE", "1")), wire.attempt_of(environ)
    return Identity(wire.rank_of(environ), int(environ["LOCAL_RANK"]), size, attempt, pid)


def start_in_rank() -> None:
    """Starts the agent if this process is a rank. An error is printed on stderr, and the job goes on without an
    agent."""
    try:
        who = identify(os.environ, os.getpid())
        if who is not None:
            _arm(who)
    except Exception as error:
        print(f"torchaos: the agent did not start: {error!r:.300}", file=sys.stderr)


def _arm(who: Identity) -> None:
    from .agent import Agent
    from .hooks import install

    plan = AgentPlan.read(os.environ[wire.ENV_PLAN])
    os.environ[wire.ENV_ARMED] = str(who.pid)
    folder, source = Path(plan.events), who.source
    while (folder / f"{source}.jsonl").exists():  # written by this same process before it called exec
        source += "x"
    listen(who)
    install(Agent(plan, who, wire.EventFile(folder / f"{source}.jsonl", source, who.rank, who.attempt)))


def listen(who: Identity) -> None:
    """Makes the rank write its main thread's Python stack to a file when the harness sends STACKS_SIGNAL. Python's
    faulthandler does it: it is C code that needs no interpreter lock, so it also works in a rank that hangs in a call,
    and costs nothing before. Does nothing if the job handles this signal itself, or if the file can't be made.

    The harness sends the signal only when it is about to end the job, and only to a process that handles it."""
    if signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
        return
    with suppress(OSError, RuntimeError, ValueError):
        folder = Path(os.environ[wire.ENV_PLAN]).parent / STACKS
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"rank{who.rank}-a{who.attempt}-p{who.pid}.txt"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        faulthandler.register(STACKS_SIGNAL, os.open(path, flags, 0o600), all_threads=False)
