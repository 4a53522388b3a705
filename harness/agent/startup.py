"""The agent's work when a process of the job starts. In a rank: starts the agent (`start_in_rank`). In the torchrun of
a job on one node: counts the attempts (`count_attempts`). In each node's torchrun of a job on several nodes: records
the rounds of the rendezvous (`record_rounds`). Also runs code as soon as a module is imported (`PostImport`), and
writes the Python stacks of a rank on request (`listen`)."""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..protocol import wire
from ..protocol.agent_plan import AgentPlan
from ..protocol.wire import STACKS, STACKS_SIGNAL
from .job_signals import raise_if_of_the_job

Then = Callable[[ModuleType], None]


class PostImport:
    """Calls functions after imports. It is an import finder that finds nothing itself: it asks the other finders, and
    replaces the loader's method that executes the module."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Then]] = {}
        self._ended: set[str] = set()  # names of modules whose import has ended

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def when(self, name: str, then: Then) -> None:
        """Calls `then` with the module: now if it is already imported, otherwise at the end of its import."""
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
    if environ.get(wire.ENV_AGENT_PID, str(pid)) != str(pid):  # if the pid is the same, this rank has called exec
        return None
    size, attempt = int(environ.get("WORLD_SIZE", "1")), wire.attempt_of(environ)
    return Identity(wire.rank_of(environ), int(environ["LOCAL_RANK"]), size, attempt, pid)


def start_in_rank() -> None:
    """Starts the agent if this process is a rank. An error is printed on stderr, and the job goes on without an
    agent."""
    try:
        who = identify(os.environ, os.getpid())
        if who is not None:
            _start_agent(who)
    except Exception as error:
        print(f"torchaos: the agent did not start: {error!r:.300}", file=sys.stderr)


def _start_agent(who: Identity) -> None:
    from .agent import Agent
    from .hooks import install

    plan = AgentPlan.read(os.environ[wire.ENV_PLAN])
    os.environ[wire.ENV_AGENT_PID] = str(who.pid)
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


_OF_RANK = re.compile(r"rank\d+-a(\d+)-p\d+x*\.jsonl")


def count_attempts() -> None:
    """Must be called in the torchrun of a job on one node. Records the number of this torchrun's first attempt."""
    post = PostImport()
    post.when("torch.distributed.launcher.api", _wrap_torchrun)
    post.install()


def _wrap_torchrun(module: ModuleType) -> None:
    original = getattr(module, "launch_agent", None)
    if original is None:
        return

    @functools.wraps(original)
    def launch_agent(*args: Any, **kwargs: Any) -> Any:
        ended_well = _safely(_begin)
        result = original(*args, **kwargs)  # raises an error if a rank failed for good
        if ended_well is not None:
            _safely(ended_well)
        return result

    module.launch_agent = launch_agent  # type: ignore[attr-defined]


def _safely(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        raise_if_of_the_job(error)
        print(f"torchaos: the attempts of this torchrun are not counted: {error!r}", file=sys.stderr)
        return None


def _begin() -> Callable[[], object]:
    """Records where the attempts begin. Returns a function to call if the torchrun ends successfully."""
    folder = Path(AgentPlan.read(os.environ[wire.ENV_PLAN]).events)
    first = first_attempt(folder, int(os.environ.get(wire.ENV_ATTEMPT_BASE, "0")))
    os.environ[wire.ENV_ATTEMPT_BASE] = str(first)  # the workers inherit it
    pid = os.getpid()
    source = f"torchrun-a{first}-p{pid}"
    events = wire.EventFile(folder / f"{source}.jsonl", source, None, first)
    data = {"pid": pid, "start_ticks": wire.start_ticks(pid), "ended": False}
    events.emit(wire.Kind.TORCHRUN, data)
    return lambda: events.emit(wire.Kind.TORCHRUN, {**data, "ended": True})


def first_attempt(folder: Path, submitted: int) -> int:
    """The number of a torchrun's first attempt. `submitted`: the first attempt of the submission.

    Each torchrun counts its restarts from 0, and a script may start torchrun again (`until torchrun train.py; do sleep
    1; done`). So the attempts of a torchrun that follows a failed one are numbered on from there: it continues the same
    training. Torchruns at the same time, or after a successful one, may be separate trainings: they all begin with
    `submitted`, and then their steps count for no verdict."""
    for event in _torchruns(folder):
        if (event.attempt or 0) >= submitted and (event.data["ended"] or _is_other(event)):
            return submitted
    used = [int(found[1]) for name in os.listdir(folder) if (found := _OF_RANK.fullmatch(name))]
    return max([*used, submitted - 1]) + 1


def _torchruns(folder: Path) -> Iterator[wire.Event]:
    for path in folder.glob("torchrun-*.jsonl"):
        for line in path.read_bytes().splitlines():
            yield wire.Event.from_line(line)


def _is_other(event: wire.Event) -> bool:
    """Whether the event is from another process that still exists."""
    pid, ticks = event.data["pid"], event.data["start_ticks"]
    return pid != os.getpid() and ticks is not None and wire.start_ticks(pid) == ticks


_PACKAGE = "torch.distributed.elastic.rendezvous"


def record_rounds() -> None:
    """Must be called in the torchrun of each node of a job on several nodes. Records each round of the rendezvous, and
    gives its number to the ranks. The round has the same number on all nodes.

    Torchelastic's own restart count is not enough: the torchrun of each node counts only the failures that it saw
    itself, a node that comes back begins at 0, and a change of membership does not count."""
    post = PostImport()
    post.when(f"{_PACKAGE}.dynamic_rendezvous", _wrap_dynamic)  # c10d, etcd-v2
    post.when(f"{_PACKAGE}.etcd_rendezvous", _wrap_etcd)  # the older etcd handler, which counts from 1
    post.install()


def _wrap_dynamic(module: ModuleType) -> None:
    _wrap_rendezvous(
        module, "DynamicRendezvousHandler", "next_rendezvous", lambda self, _: self._state_holder.state.round
    )


def _wrap_etcd(module: ModuleType) -> None:
    _wrap_rendezvous(module, "EtcdRendezvous", "rendezvous_barrier", lambda _, result: int(result[0]) - 1)


def _wrap_rendezvous(module: ModuleType, name: str, method: str, round_of: Callable[[Any, Any], Any]) -> None:
    """Records the round after each call of the method. `round_of` gets the object and the method's result."""
    kind: Any = getattr(module, name, None)
    original = getattr(kind, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def call(self: Any) -> Any:
        result = original(self)
        try:
            _record(int(round_of(self, result)))
        except Exception as error:
            raise_if_of_the_job(error)
            os.environ.pop(wire.ENV_ROUND, None)
            print(f"torchaos: the round of the rendezvous is not known: {error!r}", file=sys.stderr)
        return result

    setattr(kind, method, call)


def _record(number: int) -> None:
    os.environ[wire.ENV_ROUND] = str(number)  # the workers inherit it
    node = int(os.environ[wire.ENV_NODE])
    source = f"node{node}-p{os.getpid()}-r{number}"
    plan = AgentPlan.read(os.environ[wire.ENV_PLAN])
    events = wire.EventFile(Path(plan.events) / f"{source}.jsonl", source, None, wire.attempt_of(os.environ))
    data = {"done": True, "round": number, "node": node}
    events.emit(wire.Kind.ELASTIC_RENDEZVOUS, data)
    events.close()
